"""A request's life: what was asked (`SamplingParams`), what goes on (`Request`), what came out (`RequestOutput`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Literal

from nanofw.errors import RequestError

if TYPE_CHECKING:
    from nanofw.text import Detokenizer

FinishReason = Literal["stop", "length", "context", "kv_capacity", "abort"]
"""Why a request ended. A stop id or string; `max_tokens`; the model's length; the KV cache's size; the caller."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens for one request, and when to stop. Names follow vLLM's.

    Attributes:
        temperature: 0 takes the arg-max (ties: lowest id); above 0 the logits are divided by it.
        top_k: keep the k most likely tokens; 0 and -1 mean off, and more than the vocabulary is the vocabulary.
        top_p: keep the smallest set of most likely tokens whose probability reaches this; 1 means off.
        priority: smaller is more urgent, for a scheduler that orders by it.
        n: outputs of one prompt, each with a seed of its own; the prompt is computed once where the KV cache can share.
        max_tokens: tokens to generate at most, at least 1.
        min_tokens: stop ids and stop strings do not end the request before it has so many; they stay in the output.
        seed: makes the request's tokens a function of (seed, position, logits) alone; None takes one from the
            engine's seed and the request's number. Output i of n is what a request with seed + i gets.
        stop: end when the text holds one of these; it is cut before the match.
        stop_token_ids: end at one of these ids; the id stays in `token_ids` and leaves no text.
        ignore_eos: do not end at the model's own end-of-sequence ids.
        logprobs: report this many most likely tokens at each position, and the chosen one; None reports nothing.
        prompt_logprobs: likewise for each token of the prompt but the first, given those before it. The whole prompt is
            computed then, whatever a cache holds of it.
        skip_special_tokens: leave special tokens out of the text.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    priority: int = 0
    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    seed: int | None = None
    stop: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        """Raises: RequestError for a value out of range, naming it."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        counts = ("top_k", "priority", "n", "max_tokens", "min_tokens", "seed", "logprobs", "prompt_logprobs")
        for name in counts:
            value, optional = getattr(self, name), name in ("seed", "logprobs", "prompt_logprobs")
            if not (isinstance(value, Integral) or (optional and value is None)) or isinstance(value, bool):
                raise RequestError(f"{name}={value!r} must be an integer{' or None' if optional else ''}")
        checks = (
            ("temperature", self.temperature, 0 <= self.temperature < math.inf, "a finite number >= 0"),
            ("top_k", self.top_k, self.top_k >= -1, ">= -1 (0 and -1 mean off)"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]"),
            ("n", self.n, self.n >= 1, ">= 1"),
            ("max_tokens", self.max_tokens, self.max_tokens >= 1, ">= 1"),
            (
                "min_tokens",
                self.min_tokens,
                0 <= self.min_tokens <= self.max_tokens,
                f"0 to {self.max_tokens} (max_tokens)",
            ),
            ("stop", stop, all(stop), "non-empty strings"),
            *(
                (name, value, value is None or value >= 0, "None or >= 0")
                for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs))
            ),
        )
        for name, value, ok, allowed in checks:
            if not ok:
                raise RequestError(f"{name}={value!r} is out of range: it must be {allowed}")

    @property
    def choosy(self) -> bool:
        """Whether more than the arg-max is wanted, be it a random choice or logprobs."""
        return self.temperature > 0 or self.logprobs is not None


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probabilities (natural, of the unmodified logits) at one position.

    Attributes:
        token_id: the token that is there.
        logprob: its own.
        top: pairs of id and log-probability of the likeliest tokens, in falling order.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, eq=False)
class Request:
    """One request while the engine has it. Compared by identity; `id` is the caller's.

    With `n > 1` each output is a request of its own to all parts of the engine: a *sample*. The first one leads; the
    others begin when its prompt has been computed, so that they can share the blocks.

    Attributes:
        id: the caller's name for it.
        prompt_ids, prompt: the prompt, never changed, and its text if it was given as one.
        params, seed: what was asked for, and the seed of its random numbers where `params` has none too.
        stop_ids: all ids that end it, those of the model included.
        detokenizer: turns its tokens into text, where there is a tokenizer.
        logprobs: of the output so far, if asked for.
        output_ids: tokens generated so far whose values the host knows. While the request runs, the engine's
            `RequestTable` holds them; they come back here when it leaves its row (end, preemption).
        limit, limit_reason: most tokens, prompt included, this request may reach, and what set that.
        row: its row in the `RequestTable` while it runs, else -1.
        cached_tokens, preemptions: prompt tokens that were found in the cache; how often it was put back.
        finish_reason: why it ended, or None.
        stream: whether every step that yields a token yields a `RequestOutput`.
        prompt_logprobs: those that have been computed, of the first tokens of the prompt; none of the very first.
        told: characters of its text that outputs have reported.
        over: its end has been reported, too.
        number: counts requests as they arrive.
        index: which of the n samples it is.
        samples, unborn: all n of them, if n > 1; those that have not begun.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    limit: int
    limit_reason: FinishReason
    stop_ids: tuple[int, ...]
    prompt: str | None = None
    stream: bool = True
    detokenizer: Detokenizer | None = None
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob | None] = field(default_factory=lambda: [None])
    row: int = -1
    cached_tokens: int = 0
    preemptions: int = 0
    told: int = 0
    over: bool = False
    finish_reason: FinishReason | None = None
    number: int = 0
    index: int = 0
    samples: list[Request] = field(default_factory=list)
    unborn: list[Request] = field(default_factory=list)

    @property
    def scored(self) -> bool:
        """Whether log-probabilities of its prompt are still to be computed. The leader does it for all samples."""
        wanted = self.params.prompt_logprobs is not None and self.leader is self
        return wanted and len(self.prompt_logprobs) < len(self.prompt_ids)

    @property
    def leader(self) -> Request:
        """The sample that computes the prompt."""
        return self.samples[0] if self.samples else self

    @property
    def unfinished(self) -> list[Request]:
        """Samples that have begun and not ended; asked of the leader."""
        return [r for r in self.samples or (self,) if r.finish_reason is None and r not in self.unborn]

    @property
    def watched(self) -> bool:
        """Whether each of its tokens must be looked at."""
        return self.stream or bool(self.params.stop) or self.params.logprobs is not None or bool(self.unborn)

    @property
    def length(self) -> int:
        """Tokens known on the host, prompt included (exact while the request is not running)."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def text(self) -> str:
        """Text that may be shown so far; empty without a tokenizer."""
        return self.detokenizer.text if self.detokenizer is not None else ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string has appeared."""
        return self.detokenizer is not None and self.detokenizer.stopped

    def read(self, token: int) -> None:
        """Turn one more token into text."""
        if self.detokenizer is not None:
            self.detokenizer.add((token,), may_stop=self.detokenizer.num_tokens + 1 >= self.params.min_tokens)

    def read_rest(self) -> None:
        """At the end: turn what has not been read into text, except the stop id that ended it."""
        if self.detokenizer is not None:
            ends = self.finish_reason == "stop" and not self.stopped
            self.detokenizer.add(self.output_ids[self.detokenizer.num_tokens : len(self.output_ids) - ends])
            self.detokenizer.finish()

    def forget_unread(self) -> None:
        """After a step that broke off: keep no token that was taken in but not looked at. It will come again."""
        if self.params.logprobs is not None:
            del self.output_ids[len(self.logprobs) :]
        if self.detokenizer is not None and self.watched:
            del self.output_ids[self.detokenizer.num_tokens :]
            del self.logprobs[self.detokenizer.num_tokens :]

    @property
    def due(self) -> FinishReason | None:
        """Why a request that has not been ended is to end with the tokens it has, or None."""
        last = self.output_ids[-1:] if len(self.output_ids) >= self.params.min_tokens else []
        if self.stopped or set(last) & set(self.stop_ids):
            return "stop"
        return self.limit_reason if self.length >= self.limit else None

    @property
    def delta(self) -> str:
        """Text that no output has reported yet."""
        return self.text[self.told :]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """What one sample of a request has generated so far.

    Attributes:
        text: without stop strings, and without special tokens unless they were asked for.
        token_ids: all of them, the id that ended it included.
        finish_reason: why it ended, or None while it has not.
        logprobs: one entry a token, or None if nobody asked.
        index: which of the n samples it is.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[Logprob, ...] | None = None
    index: int = 0

    @classmethod
    def of(cls, request: Request) -> CompletionOutput:
        """What `request` has now."""
        return cls(
            text=request.text,
            token_ids=tuple(request.output_ids),
            finish_reason=request.finish_reason,
            logprobs=tuple(request.logprobs) if request.params.logprobs is not None else None,
            index=request.index,
        )


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request as its caller sees it: after each of its steps when streaming, and once at its end.

    With `n > 1` a streamed output holds the one sample that has a new token, or has ended; the last holds all of them.

    Attributes:
        request_id: the caller's name for it.
        prompt, prompt_token_ids: the text, if it was given as one, and its ids.
        outputs: one sample, or in the last output all of them.
        finished: the request has ended, all samples of it.
        prompt_logprobs: of each prompt token, None of the first; complete when the first token comes. None if nobody
            asked.
        delta: text that is new since the last output; the deltas of a request, or of each sample, join to its final
            text. The output that holds all of several samples brings nothing new.
        cached_tokens: prompt tokens whose K and V were already in the cache.
        preemptions: how often it was put back and recomputed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    delta: str = ""
    prompt_logprobs: tuple[Logprob | None, ...] | None = None
    cached_tokens: int = 0
    preemptions: int = 0

    @classmethod
    def of(cls, request: Request) -> RequestOutput:
        """What there is to report of one sample, and of a request that has no more than one."""
        finished = request.finish_reason is not None and not request.samples
        return cls._of(request, (request,), finished, request.delta)

    @classmethod
    def last(cls, leader: Request) -> RequestOutput:
        """The last report of a request."""
        return cls._of(leader, leader.samples, True, "") if leader.samples else cls.of(leader)

    @classmethod
    def _of(cls, request: Request, samples: Sequence[Request], finished: bool, delta: str) -> RequestOutput:
        wanted = request.params.prompt_logprobs
        return cls(
            request_id=request.id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_ids,
            outputs=tuple(CompletionOutput.of(sample) for sample in samples),
            finished=finished,
            delta=delta,
            prompt_logprobs=None if wanted is None else tuple(request.leader.prompt_logprobs),
            cached_tokens=request.leader.cached_tokens,
            preemptions=sum(sample.preemptions for sample in samples),
        )
