"""Random lives of requests without end: an engine in every kind of weather, each output compared with what it must be.

    pytest benchmarks/test_soak.py -s      # 10^5 events for each combination

Events are what happens to requests: they are added, aborted, put back, find a prefix in the cache, and end. Steps are
not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from nanofw.engine import Engine
from nanofw.events import RequestFinished
from nanofw.request import RequestOutput, SamplingParams
from nanofw.testing.audited import Auditor, prompt
from nanofw.testing.ledger import Ledger

FAMILIES = 5
"""Prompts of one family are prefixes of one text, with endings of their own or not."""

SPELL = 60
"""Steps before the weather changes."""


class Broken(Exception):
    """Raised on purpose in the middle of a step."""


@dataclass(slots=True)
class Weather:
    """What happens between two steps: requests added on average, and chances of an abort and of a failure."""

    added: float
    abort: float
    failure: float


WEATHER = (Weather(0.2, 0.01, 0.0), Weather(2.0, 0.02, 0.0), Weather(0.5, 0.3, 0.0), Weather(0.5, 0.05, 0.05))


@dataclass(slots=True)
class Soak:
    """Runs an engine with a `ContextModel` through random events.

    Attributes:
        engine: made by `audited_engine`, best cramped.
        seed: of all that is random.
        longest: tokens of the longest prompt.
        waiting: requests that may queue up.
        check_every: steps between two looks at the books; the cache's own check is costly.
        counts: events by kind.
    """

    engine: Engine
    seed: int = 0
    longest: int = 40
    waiting: int = 40
    check_every: int = 10
    counts: dict[str, int] = field(default_factory=dict)
    ledger: Ledger = field(init=False)
    _draw: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.engine, one_by_one=False)  # failures are among the events
        self._draw = np.random.default_rng(self.seed)
        assert isinstance(self.engine.runner, Auditor)
        self.engine.runner.keep = False
        self.engine.observers["nanofw_request_finished"] = self._ended

    @property
    def events(self) -> int:
        """Events so far."""
        return sum(self.counts.values())

    def run(self, events: int) -> None:
        """Go on until there were so many events, then let all end, and see that nothing is left."""
        steps = 0
        while self.events < events:
            weather = WEATHER[steps // SPELL % len(WEATHER)]
            for _ in range(self._draw.poisson(weather.added)):
                self._add()
            if self._chance(weather.abort):
                self._abort()
            self._step(self._chance(weather.failure))
            steps += 1
            if steps % self.check_every == 0:
                self.ledger.balance()
        self.ledger.finish(bound=100 * (self.waiting + 10) * self.longest)

    def _add(self) -> None:
        if len(self.engine.requests) >= self.waiting:
            return
        draw = self._draw
        length, family = int(draw.integers(1, self.longest + 1)), int(draw.integers(FAMILIES))
        tokens = prompt(self.longest, family)[:length]
        if self._chance(0.5):
            tokens[-1 - length // 4 :] = prompt(1 + length // 4, int(draw.integers(2**31)))
        least = int(draw.integers(16)) if self._chance(0.2) else 0
        params = SamplingParams(
            temperature=float(self._chance(0.2)),
            seed=int(draw.integers(2**31)),
            n=int(draw.integers(2, 5)) if self._chance(0.1) else 1,
            max_tokens=int(draw.integers(max(least, 1), 16)),
            min_tokens=least,
            ignore_eos=self._chance(0.5),
            logprobs=2 if self._chance(0.05) else None,
            prompt_logprobs=1 if self._chance(0.05) else None,
        )
        name = next(str(i) for i in range(self.waiting + 1) if str(i) not in self.ledger.unfinished)
        self.ledger.add(name, tokens, params, stream=self._chance(0.5))
        self._count("added")
        self._count("forked", params.n - 1)

    def _abort(self) -> None:
        if live := list(self.engine.requests):
            self.ledger.abort(live[int(self._draw.integers(len(live)))])

    def _step(self, fails: bool) -> None:
        if not fails:
            self.ledger.step()
            return
        # The runner is told to fail at its next step: after the scheduler has planned it.
        submit = self.engine.runner.submit

        def broken(*_: object) -> None:
            raise Broken

        self.engine.runner.submit = broken  # type: ignore[assignment, method-assign]
        try:
            self.ledger.step()
        except Broken:
            self._count("failed")
        finally:
            self.engine.runner.submit = submit  # type: ignore[method-assign]

    def _ended(self, *, event: RequestFinished) -> None:
        """Observes ends; now and then another request is aborted from in here."""
        output: RequestOutput = event.output
        reason = output.outputs[0].finish_reason
        self._count("aborted" if reason == "abort" else "ended")
        self._count("put back", output.preemptions)
        self._count("found in the cache", bool(output.cached_tokens))
        if reason != "abort" and self._chance(0.02):
            self._abort()

    def _chance(self, probability: float) -> bool:
        return bool(self._draw.random() < probability)

    def _count(self, kind: str, times: int = 1) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + times
