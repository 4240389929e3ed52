"""Where do two sets of plugins part? First the token, then the layer.

Both generate greedily. At the first difference, the tokens up to there are fed to both again and every call of the
attention is recorded. The second engine gets the first one's q, k, v and outputs in place of its own, layer by layer,
so rounding does not pile up and each layer is judged alone, against float64 and with the yardstick of the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from nanofw.attention import Attention
from nanofw.build import build_engine, build_model
from nanofw.config import Config
from nanofw.errors import EngineError
from nanofw.request import CompletionOutput, SamplingParams
from nanofw.testing.tolerance import naive, yardstick

if TYPE_CHECKING:
    from nanofw.attention import Prologue
    from nanofw.batch import Batch
    from nanofw.engine import Engine, Resolved
    from nanofw.kv_cache import LayerKV, LayerSpec
    from nanofw.model import Model
    from nanofw.plugins import PluginHost
    from nanofw.weights import ModelSource

DIFFERENT_STEPS = "the two sets of plugins take different steps even on one request; cannot compare layers"
MODEL_SLACK = 16
"""Two models may round the inputs of a layer differently: by this many eps of the largest value."""


@dataclass(frozen=True, slots=True)
class LayerDivergence:
    """The first layer that is wrong beyond rounding, all before it being the same.

    Attributes:
        what: "attention": its output is wrong, `error_a` and `error_b` being the distances from float64. "model": q, k
            or v are not the same although all went in the same; `error_b` is the distance from A.
        replay: "prefill": all tokens in one step. "decode": one token a step.
        position: of the first token of that step. allowed: what rounding explains.
    """

    what: Literal["attention", "model"]
    replay: Literal["prefill", "decode"]
    layer: int
    position: int
    error_a: float
    error_b: float
    allowed: float


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token that differs.

    Attributes:
        prompt: which of the prompts, from 0. step: which of its new tokens, from 0.
        token_a, token_b: None where one had ended.
        margin_a, margin_b: log-probability of the likeliest token less that of the second, when fed the same tokens.
        layer: None if each layer agrees to within rounding.
    """

    prompt: int
    step: int
    token_a: int | None
    token_b: int | None
    margin_a: float
    margin_b: float
    layer: LayerDivergence | None


@dataclass(frozen=True, slots=True)
class Report:
    """What `compare` found: tokens that A generated in all, how many prompts differ, where the first does.

    `resolved_a` and `resolved_b` tell which plugins ran.
    """

    prompts: int
    tokens: int
    differ: int
    divergence: Divergence | None
    resolved_a: dict[str, Resolved]
    resolved_b: dict[str, Resolved]

    @property
    def equal(self) -> bool:
        """Whether every token is the same."""
        return self.divergence is None


def compare(
    a: Config, b: Config, host: PluginHost, source: ModelSource, prompts: Sequence[Sequence[int]], max_tokens: int = 32
) -> Report:
    """Generate with both and compare.

    Args:
        a, b: settings that differ in plugins and their options.
        host: loaded plugins. source: the model.
        prompts: token ids; all are generated together, as one batch.
        max_tokens: most new tokens a prompt.

    Raises:
        NanofwError: one of the two cannot be built, or refuses a prompt.
    """
    model_a = build_model(a, host, source)
    same = (a.model_impl, a.options.get("model")) == (b.model_impl, b.options.get("model"))
    model_b = model_a if same else build_model(b, host, source)
    params = SamplingParams(temperature=0, max_tokens=max_tokens)

    # One engine at a time: each may take most of a GPU's memory for its cache.
    engine = build_engine(a, host, source, model_a)
    tokens_a, resolved_a = [o.token_ids for o in _generate(engine, prompts, params)], engine.resolved
    del engine
    engine = build_engine(b, host, source, model_b)
    tokens_b, resolved_b = [o.token_ids for o in _generate(engine, prompts, params)], engine.resolved
    del engine

    differ = [i for i, (x, y) in enumerate(zip(tokens_a, tokens_b, strict=True)) if x != y]
    found = None
    if differ:
        first, x, y = differ[0], tokens_a[differ[0]], tokens_b[differ[0]]
        step = next((i for i, (s, t) in enumerate(zip(x, y, strict=False)) if s != t), min(len(x), len(y)))
        replay = _Replay(a, b, host, source, model_a, model_b, [*prompts[first], *x[:step]])
        margin_a, margin_b = replay.margins()
        found = Divergence(
            prompt=first,
            step=step,
            token_a=x[step] if step < len(x) else None,
            token_b=y[step] if step < len(y) else None,
            margin_a=margin_a,
            margin_b=margin_b,
            layer=replay.layer("prefill") or replay.layer("decode"),
        )
    return Report(len(prompts), sum(map(len, tokens_a)), len(differ), found, resolved_a, resolved_b)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of an attention: q `[T, Hq, D]`, k and v `[T, Hkv, D]`, the output, and the first token's position.

    `packed` is what q, k and v were made of, where the model left that to the attention; else None.
    """

    layer: int
    spec: LayerSpec
    position: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    packed: torch.Tensor | None
    out: torch.Tensor


class Recorder(Attention):
    """Stands before an attention and keeps what goes in and comes out.

    With calls to follow, their inputs and outputs take the place of what arrives here: what `inner` makes of those
    inputs is kept, and so is what arrived.
    """

    def __init__(self, inner: Attention) -> None:
        super().__init__(inner.spec, inner.options)
        self.inner = inner
        self.start(None)
        vars(self)["capabilities"] = inner.capabilities  # a runner asks the object, not the class

    def start(self, lead: Sequence[Call] | None) -> None:
        """Forget what was recorded (an engine tries its parts while it is built), and follow `lead` from now on."""
        self.lead = lead
        self.calls: list[Call] = []
        self.arrived: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def plan(self, batch: Batch) -> Any:
        """As `inner` does."""
        return self.inner.plan(batch)

    def attend(self, q: torch.Tensor, kv: LayerKV, batch: Batch) -> torch.Tensor:
        """As `inner` does."""
        return self.inner.attend(q, kv, batch)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: LayerKV, batch: Batch) -> torch.Tensor:
        """As `inner` does, on the inputs of the call that is followed, if there is one."""
        return self._call((q, k, v), None, None, kv, batch)

    def forward_packed(self, qkv: torch.Tensor, prologue: Prologue, kv: LayerKV, batch: Batch) -> torch.Tensor:
        """As `inner` does, likewise."""
        return self._call(prologue.split(qkv, kv.spec, batch.positions), qkv, prologue, kv, batch).flatten(1)

    def _call(
        self,
        arrived: tuple[torch.Tensor, ...],
        packed: torch.Tensor | None,
        prologue: Prologue | None,
        kv: LayerKV,
        batch: Batch,
    ) -> torch.Tensor:
        q, k, v = (x.clone() for x in arrived)
        lead = None
        if self.lead is not None:
            self.arrived.append((q, k, v))
            lead = self.lead[len(self.calls)] if len(self.calls) < len(self.lead) else None
            if lead is None or lead.layer != kv.index or lead.q.shape != q.shape:
                raise EngineError(DIFFERENT_STEPS)
            q, k, v, packed = lead.q, lead.k, lead.v, lead.packed
        if packed is None or prologue is None:  # two models may not pack alike
            out = self.inner.forward(q, k, v, kv, batch)
        else:
            packed = packed.clone()
            out = self.inner.forward_packed(packed, prologue, kv, batch).view_as(q)
        position = int(batch.seq_lens_host[0] - batch.query_lens_host[0])
        self.calls.append(Call(kv.index, kv.spec, position, q, k, v, packed, out.clone()))
        return out if lead is None else lead.out


@dataclass(frozen=True, slots=True, eq=False)
class _Replay:
    """The same tokens, fed to both sets of plugins, one request alone."""

    a: Config
    b: Config
    host: PluginHost
    source: ModelSource
    model_a: Model
    model_b: Model
    tokens: Sequence[int]

    def margins(self) -> tuple[float, float]:
        """Of A and B: how far the likeliest next token is ahead of the second."""
        return self._next(self.a, self.model_a), self._next(self.b, self.model_b)

    def layer(self, replay: Literal["prefill", "decode"]) -> LayerDivergence | None:
        """The first layer that is wrong, if any."""
        step_tokens = len(self.tokens) if replay == "prefill" else 1
        leads = self._record(self.a, self.model_a, step_tokens, None)
        follows = self._record(self.b, self.model_b, step_tokens, leads.calls)
        if len(leads.calls) != len(follows.calls):
            raise EngineError(DIFFERENT_STEPS)
        keys: dict[int, list[torch.Tensor]] = {}
        values: dict[int, list[torch.Tensor]] = {}
        for lead, follow, arrived in zip(leads.calls, follows.calls, follows.arrived, strict=True):
            for own, theirs in zip(arrived, (lead.q, lead.k, lead.v), strict=True):
                error = _distance(own, theirs)
                allowed = MODEL_SLACK * torch.finfo(own.dtype).eps * theirs.abs().max().item()
                if not error <= allowed:
                    return LayerDivergence("model", replay, lead.layer, lead.position, 0.0, error, allowed)
            keys.setdefault(lead.layer, []).append(lead.k)
            values.setdefault(lead.layer, []).append(lead.v)
            k, v = torch.cat(keys[lead.layer]), torch.cat(values[lead.layer])
            expected = naive(lead.q.double(), k.double(), v.double(), lead.spec).cpu()
            allowed = yardstick(lead.q, k, v, lead.spec, expected)
            errors = _distance(lead.out, expected), _distance(follow.out, expected)
            if not all(error <= allowed for error in errors):  # a NaN is within no bound
                return LayerDivergence("attention", replay, lead.layer, lead.position, *errors, allowed)
        return None

    def _next(self, config: Config, model: Model) -> float:
        engine = build_engine(self._alone(config, model, len(self.tokens)), self.host, self.source, model)
        output = _generate(engine, [self.tokens], SamplingParams(temperature=0, max_tokens=1, logprobs=2))[0]
        assert output.logprobs is not None
        (_, best), (_, second) = output.logprobs[0].top
        return best - second

    def _record(self, config: Config, model: Model, step_tokens: int, lead: Sequence[Call] | None) -> Recorder:
        if config.runner != Config().runner:
            # A runner that captures a step and replays it calls no Python while it runs: nothing would be recorded.
            options = {kind: table for kind, table in config.options.items() if kind != "runner"}
            config = config.replace(runner=Config().runner, options=options)
        config = self._alone(config, model, step_tokens)
        engine = build_engine(config, self.host, self.source, model, wrap_attention=Recorder)
        recorder = engine.runner.parts.attention
        assert isinstance(recorder, Recorder)
        recorder.start(lead)
        _generate(engine, [self.tokens], SamplingParams(temperature=0, max_tokens=1))
        return recorder

    def _alone(self, config: Config, model: Model, step_tokens: int) -> Config:
        """Settings for this one request, and no more memory than it needs."""
        length = min(len(self.tokens) + 1, model.spec.max_len)
        return config.replace(
            max_num_seqs=1, max_model_len=length, max_batch_tokens=step_tokens, kv_blocks=None, kv_memory=None
        )


def _generate(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[CompletionOutput]:
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, params, stream=False)
    finished = {o.request_id: o.outputs[0] for o in engine.run() if o.finished}
    return [finished[str(number)] for number in range(len(prompts))]


def _distance(x: torch.Tensor, y: torch.Tensor) -> float:
    """Largest difference; NaN if there is one."""
    return (x.cpu().double() - y.cpu().double()).abs().max().item()
