"""What each request must get, kept beside a running engine, and compared with every output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from nanofw.engine import Engine
from nanofw.request import CompletionOutput, RequestOutput, SamplingParams
from nanofw.testing.audited import context_model, nothing_left


@dataclass(slots=True)
class Expected:
    """All tokens that each sample of a request must end with, and how many have been reported."""

    tokens: list[list[int]]
    stream: bool
    seen: list[int]


@dataclass(slots=True)
class Ledger:
    """Adds requests to an engine with a `ContextModel`, and knows what must come of them.

    Attributes:
        engine: made by `audited_engine`.
        unfinished: what is expected, by request id.
        one_by_one: each token of a stream is reported on its own; not so when a call was interrupted.
        ended: how many samples ended, by reason.
    """

    engine: Engine
    unfinished: dict[str, Expected] = field(default_factory=dict)
    one_by_one: bool = True
    ended: dict[str, int] = field(default_factory=dict)

    def add(self, request_id: str, tokens: Sequence[int], params: SamplingParams, stream: bool = True) -> None:
        """Add a request to the engine. Sampled ones need a seed."""
        engine = self.engine
        room = min(params.max_tokens, engine.max_model_len - len(tokens), engine.kv_cache.capacity + 1 - len(tokens))
        ends = set(params.stop_token_ids) | set(() if params.ignore_eos else engine.eos_token_ids)
        expected = [
            context_model().generate(tokens, room, replace(params, seed=(params.seed or 0) + index), ends)
            for index in range(params.n)
        ]
        engine.add(request_id, tokens, params, stream=stream)
        self.unfinished[request_id] = Expected(expected, stream, [0] * params.n)

    def abort(self, request_id: str) -> None:
        """End a request now, whatever it is doing."""
        output = self.engine.abort(request_id)
        assert output is not None, f"request {request_id} was unknown to the engine"
        self.look([output])

    def step(self) -> None:
        """One step of the engine."""
        self.look(self.engine.step())

    def look(self, outputs: Iterable[RequestOutput]) -> None:
        """Compare outputs with what they must be."""
        for output in outputs:
            name = output.request_id
            expected = self.unfinished[name]
            assert output.finished or expected.stream, f"request {name}: reported, and nobody listens"
            assert len(output.outputs) == (len(expected.tokens) if output.finished else 1), f"request {name}: samples"
            if output.prompt_logprobs is not None and any(completion.token_ids for completion in output.outputs):
                known = [entry.token_id for entry in output.prompt_logprobs if entry is not None]
                assert known == list(output.prompt_token_ids[1:]), f"request {name}: prompt log-probabilities"
            for completion in output.outputs:
                self._look(name, expected, completion, output.finished)
            if output.finished:
                del self.unfinished[name]

    def _look(self, name: str, expected: Expected, completion: CompletionOutput, last: bool) -> None:
        all_tokens, seen = expected.tokens[completion.index], expected.seen[completion.index]
        tokens, reason = list(completion.token_ids), completion.finish_reason
        assert tokens == all_tokens[: len(tokens)], f"request {name}: wrong tokens"
        assert len(tokens) >= seen, f"request {name}: tokens were taken back"
        if self.one_by_one and not last:
            assert len(tokens) == seen + 1, f"request {name}: a token was not reported"
        assert not reason or reason == "abort" or tokens == all_tokens, f"request {name}: tokens are missing"
        assert reason or not last, f"request {name}: a sample did not end"
        expected.seen[completion.index] = len(tokens)
        if last:
            self.ended[str(reason)] = self.ended.get(str(reason), 0) + 1

    def balance(self) -> None:
        """Every sample that has begun waits or holds a row; blocks are whole."""
        engine = self.engine
        engine.kv_cache.check_integrity()
        running = engine.table.rows - engine.table.free_rows
        begun = sum(len(request.unfinished) for request in engine.requests.values())
        assert running + engine.scheduler.num_waiting == begun
        assert set(engine.requests) == set(self.unfinished)
        assert running <= engine.scheduler.limits.max_num_seqs

    def finish(self, bound: int) -> None:
        """All that is unfinished ends within `bound` steps, and nothing is left behind."""
        for _ in range(bound):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.unfinished, f"unfinished after {bound} steps: {sorted(self.unfinished)}"
        nothing_left(self.engine)
