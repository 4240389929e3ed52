"""`LLM`: text in, text out. The interface that people know from vLLM, over an engine of plugins."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any, NamedTuple, Protocol

from nanofw.build import build_engine
from nanofw.config import Config
from nanofw.engine import Engine
from nanofw.errors import EngineError, RequestError
from nanofw.model import Model
from nanofw.plugins import PluginHost
from nanofw.request import RequestOutput, SamplingParams
from nanofw.weights import ModelSource, resolve

Prompt = str | Sequence[int]


class Tokenizer(Protocol):
    """What nanofw uses of a tokenizer of transformers."""

    chat_template: str | None

    def encode(self, text: str) -> list[int]: ...  # noqa: D102
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...  # noqa: D102
    def apply_chat_template(self, messages: Any, **kwargs: Any) -> Any: ...  # noqa: D102


class Asked(NamedTuple):
    """One prompt of a call, checked."""

    ids: list[int]
    params: SamplingParams
    text: str | None


class LLM:
    """A model and the plugins that serve it.

    Example::

        llm = LLM("smollm2", attention="vectorized-gather")
        for output in llm.generate(["Hello"], SamplingParams(temperature=0)):
            print(output.outputs[0].text)

    Args:
        model: a local transformers folder, a hub id, `smollm2`, or `dummy:NAME`.
        config: settings to start from (`Config.resolve()` reads files and environment); default: the defaults.
        host: loaded plugins, to share between several engines.
        source: where the weights and the tokenizer come from, instead of what `model` names.
        loaded: a loaded model to share, likewise.
        settings: any field of `Config`: attention, kv_cache, scheduler, runner, sampler, device, dtype, ...
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: Config | None = None,
        host: PluginHost | None = None,
        source: ModelSource | None = None,
        loaded: Model | None = None,
        **settings: Any,
    ) -> None:
        overrides = Config.build(settings | ({"model": model} if model is not None else {}))
        changed = {k: getattr(overrides, k) for k in settings} | ({"model": model} if model is not None else {})
        self.config = (config or Config()).replace(**changed)
        host = host or PluginHost.load(self.config.disable, self.config.plugins, self.config.strict)
        self.source = source or resolve(
            self.config.model,
            trust_remote_code=self.config.trust_remote_code,
            allow_pickle=self.config.allow_pickle,
        )
        self.engine: Engine = build_engine(self.config, host, self.source, loaded)
        self._ids = itertools.count()
        self._inboxes: dict[str, deque[RequestOutput]] = {}

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        tokenizer: Tokenizer = self.engine.tokenizer
        return tokenizer

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Generate for each prompt and wait for all.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            params: for all, or one for each prompt.

        Returns:
            Finished outputs, in the order of the prompts.

        Raises:
            RequestError: one of the prompts can never run; none is started then.
        """
        work = self._check(prompts, params)
        with closing(self._outputs(work, stream=False)) as outputs:
            finished = {o.request_id: o for o in outputs}
        return [finished[name] for name in work]

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[RequestOutput]:
        """Like `generate`, yielding an output of a request whenever it has a new token; `delta` is its new text."""
        yield from self._outputs(self._check(prompts, params), stream=True)

    def chat_prompt(self, messages: str | Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation in the model's chat template, ready for an answer. A text is one user message."""
        if self.tokenizer.chat_template is None:
            raise RequestError(f"{self.config.model} has no chat template; give it plain text")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        ids: list[int] = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return ids

    def _check(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> dict[str, Asked]:
        """What is asked, under the ids that the requests will have."""
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        many: Sequence[Any] = [prompts] if single else prompts
        each = [params] * len(many) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(many):
            raise RequestError(f"{len(many)} prompts and {len(each)} SamplingParams: give one, or one for each prompt")
        work = {}
        for number, (prompt, given) in enumerate(zip(many, each, strict=True)):
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
            how = given or SamplingParams()
            try:
                self.engine.check(ids, how)
            except RequestError as error:
                raise RequestError(f"prompt {number}: {error}") from None
            name = next(name for n in self._ids if (name := f"llm-{n}") not in self.engine.requests)
            work[name] = Asked(ids, how, prompt if isinstance(prompt, str) else None)
        return work

    def _outputs(self, work: Mapping[str, Asked], stream: bool) -> Generator[RequestOutput, None, None]:
        """Add requests and step until they have ended, yielding their outputs.

        What a step brings for another call that is under way (`generate` inside a loop over `stream`) is kept for it.
        Whatever ends the call early (an error, Ctrl-C, a consumer that stopped listening), it leaves nothing behind.
        """
        inbox: deque[RequestOutput] = deque()
        unfinished = len(work)
        with ExitStack() as leaving:
            for name, (ids, how, text) in work.items():
                leaving.callback(self._leave, name)
                self._inboxes[name] = inbox
                self.engine.add(name, ids, how, prompt=text, stream=stream)
            while unfinished:
                if inbox:
                    output = inbox.popleft()
                    unfinished -= output.finished
                    yield output
                elif self.engine.has_work:
                    self._step()
                else:
                    raise EngineError(f"{unfinished} requests of this call were ended by somebody else")

    def _leave(self, name: str) -> None:
        if self._inboxes.pop(name, None) is not None:
            self.engine.abort(name)

    def _step(self) -> None:
        for output in self.engine.step():
            if (inbox := self._inboxes.get(output.request_id)) is not None:
                inbox.append(output)
                if output.finished:
                    del self._inboxes[output.request_id]
