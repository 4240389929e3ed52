"""The engine: requests in, tokens out, one step at a time.

`step` reads like the flow: schedule, pack, submit; then, `depth` steps later, wait, take the tokens in, report. At
depth 0 each step is waited for at once. At depth 1 the next step is planned and started while one runs: lengths are
known ahead, values are not, and tokens that turn out to lie past a request's end are dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nanofw.batch import Step, pack
from nanofw.blame import blame
from nanofw.errors import EngineError, RequestError
from nanofw.events import EngineCreated, RequestFinished, StepFinished
from nanofw.intake import check, make
from nanofw.recovery import put_back
from nanofw.request import FinishReason, Request, RequestOutput, SamplingParams
from nanofw.scheduler import Schedule, Scheduler

if TYPE_CHECKING:
    from nanofw.batch import Scoring
    from nanofw.kv_cache import KVCache
    from nanofw.runner import HostSampled, Pending, Runner
    from nanofw.table import IntArray, RequestTable, TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """A step that has been submitted and not yet waited for."""

    step: Step
    pending: Pending
    preempted: int
    started: float


@dataclass(frozen=True, slots=True)
class Resolved:
    """Which plugin really serves a kind, and the path it takes where that can vary.

    Attributes:
        name: what it is selected by.
        distribution, version: what installed it.
        path: which of several ways it takes, or "".
        batch_invariant: of attention, model and sampler, whether they declare it on this device.
    """

    name: str
    distribution: str
    version: str
    path: str = ""
    batch_invariant: bool | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Engine:
    """Requests, and the parts that serve them. Built by `nanofw.build.build_engine`.

    Attributes:
        scheduler, kv_cache, runner: its parts; the runner has the others in `runner.parts`.
        table: the running requests.
        max_model_len: most tokens a request may reach, prompt included.
        vocab_size: V, ids are below it.
        eos_token_ids: ids that end a request unless it ignores them.
        tokenizer: of transformers, or None.
        depth: steps in flight beyond the one that is waited for, 0 or 1.
        seed: of requests that bring none.
        plugins: by kind, what was chosen; `resolved` also knows the runner's path.
        notes: what was chosen on the user's behalf, in sentences.
        observers: by hook, the caller that tells all observers, or None.
        requests: the unfinished ones, by id.
    """

    scheduler: Scheduler
    kv_cache: KVCache
    runner: Runner
    table: RequestTable
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    tokenizer: Any = None
    depth: int = 0
    seed: int = 0
    plugins: dict[str, Resolved] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    observers: dict[str, Callable[..., Any] | None] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    _in_flight: deque[InFlight] = field(default_factory=deque)
    _ready: list[RequestOutput] = field(default_factory=list)
    _news: deque[tuple[str, object]] = field(default_factory=deque)
    _added: int = 0
    _steps: int = 0
    _fruitless: int = 0
    _torn: bool = False  # a call broke off, and not everybody has been put back

    def __post_init__(self) -> None:
        self._note("nanofw_engine_created", EngineCreated(self))
        self._tell()

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished, a step is in flight, or an output waits to be returned."""
        return bool(self.requests or self._in_flight or self._ready)

    @property
    def resolved(self) -> dict[str, Resolved]:
        """By kind, which plugin really runs, and by which path."""
        return self.plugins | {"runner": replace(self.plugins["runner"], path=self.runner.report.path)}

    @property
    def batch_invariant(self) -> bool:
        """Whether a request gets the same bits alone and in any company, as attention, model and sampler all declare.

        As long as the same pieces of it are computed: a prompt that is cut by the budget of a step, found in the cache,
        or put back and computed again, is another computation, and may round otherwise.
        """
        return all(part.batch_invariant for part in self.plugins.values() if part.batch_invariant is not None)

    def add(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        prompt: str | None = None,
        stream: bool = True,
    ) -> Request:
        """Queue a request.

        Args:
            request_id: the caller's name for it, free again once it has finished.
            prompt_ids: token ids, at least one.
            params: how to sample and when to stop.
            prompt: its text, only carried along.
            stream: report it after every step that gives it a token, not only at its end.

        Raises:
            RequestError: the id is in use; the prompt is empty, holds an id outside the vocabulary, or is too long for
                the model or the KV cache; stop strings without a tokenizer. Nothing else is affected.
            Exception: whatever a plugin raises, with a note that names it. The request has not been added then.
        """
        params = params or SamplingParams()
        self._mend()
        self.check(prompt_ids, params)
        if request_id in self.requests:
            raise RequestError(f"request id {request_id!r} is in use by an unfinished request; choose another")
        request = make(self, request_id, prompt_ids, params, number=self._added, prompt=prompt, stream=stream)
        self._added += params.n
        try:
            self.scheduler.add(request)
            self.requests[request_id] = request
        except BaseException as error:
            self.requests.pop(request_id, None)
            self._broke_off(error, f"when request {request_id!r} was added")
            raise
        return request

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Whether a request could be served. Raises: RequestError that says why not."""
        check(self, prompt_ids, params)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, waiting or running. Returns what it had generated; None for an id that is not live.

        Raises:
            Exception: whatever a plugin raises, with a note that names it. The request goes on then, as all others do.
        """
        self._mend()
        request = self.requests.get(request_id)
        if request is None:
            return None
        try:
            output = self._abort(request)
        except BaseException as error:
            self._broke_off(error, f"when request {request_id!r} was aborted")
            raise
        self._tell()
        return output

    def _abort(self, request: Request) -> RequestOutput:
        for sample in request.unfinished:
            self._release(sample)
            self.scheduler.abort(sample)
        # Called by an observer, in the middle of a step: what the step was about to report is part of this output.
        late = [o for o in self._ready if o.request_id == request.id and not o.finished]
        request.told -= sum(len(o.delta) for o in late)
        self._ready = [o for o in self._ready if o not in late]
        ending = request.unfinished + request.unborn
        request.unborn = []
        for sample in ending:
            sample.finish_reason = "abort"
        for sample in ending:
            sample.read_rest()
        output = RequestOutput.last(request)
        self._forget(request, output)
        return output

    def step(self) -> list[RequestOutput]:
        """Advance by one step.

        Returns:
            Outputs of requests that ended, and of streaming ones that got a token. None while a prompt is
            part-way, and while the first steps are put in flight.

        Raises:
            EngineError: requests wait, nothing is in flight, and the scheduler schedules nothing.
            Exception: whatever a plugin raises, with a note that names it. All requests are then put back with the
                tokens they have, and may go on with the next call. An error of an observer changes nothing, and the
                outputs of its step come with the next call.
        """
        self._mend()
        try:
            self._step()
        except BaseException as error:  # Ctrl-C too
            self._broke_off(error, f"in step {self._steps}")
            raise
        self._tell()
        ready, self._ready = self._ready, []
        return ready

    def run(self) -> Iterator[RequestOutput]:
        """Step until nothing is left to do, yielding outputs as they come."""
        while self.has_work:
            yield from self.step()

    def _step(self) -> None:
        started = time.perf_counter()
        schedule = self.scheduler.schedule() if self.requests else None
        if schedule is not None:
            step = self._advance(schedule)
            self._in_flight.append(InFlight(step, self.runner.submit(step), len(schedule.preempted), started))
            if len(self._in_flight) <= self.depth:
                return
        if self._in_flight:
            self._collect(self._in_flight.popleft())
        else:
            self._stalled_if(bool(self.requests) and not self._ready)

    def _advance(self, schedule: Schedule) -> Step:
        """Pack the step, and promise a token to each request that computes its last known or promised one."""
        table, rows = self.table, schedule.rows
        step = pack(table, rows, schedule.num_tokens, self.kv_cache.block_table, self.kv_cache.block_size)
        table.computed[rows] = step.seq_lens
        table.length[rows] += step.emits
        return step

    def _collect(self, flight: InFlight) -> None:
        """Take a step's tokens in; end the requests that are done; have outputs ready."""
        sampled, step, table = flight.pending.wait(), flight.step, self.table
        live = table.ticket[step.rows] == step.tickets  # the others ended or were put back while the step ran
        self.kv_cache.commit(step.rows[live], step.seq_lens[live], self._tokens_of)
        if step.scoring is not None and sampled.scores is not None:
            self._score(step.scoring, sampled.scores, step.rows[live])
        counts = (live & step.emits).nonzero()[0]
        rows, tokens = step.rows[counts], sampled.tokens[counts]
        known = table.known[rows]
        table.tokens[rows, known] = tokens
        table.known[rows] = known + 1

        stopped = (table.stop_ids[rows] == tokens[:, None]).any(axis=1) & (known >= table.least[rows] - 1)
        at_limit = known >= table.last[rows]
        finished: list[Request] = []
        for i in (stopped | at_limit | table.watched[rows]).nonzero()[0]:  # the rest needs no look
            request: Request = table.requests[rows[i]]
            if request.params.logprobs is not None:
                request.logprobs.append(sampled.logprob(int(counts[i]), request.params.logprobs))
            if table.watched[rows[i]] and not stopped[i]:
                request.read(int(tokens[i]))
            if request.unborn:
                self._begin_others(request)
            if stopped[i] or request.stopped or at_limit[i]:
                self._release(request)
                finished.append(request)
                self._finish(request, "stop" if stopped[i] or request.stopped else request.limit_reason)
            elif request.stream:
                request.output_ids = table.output_ids(request.row, len(request.prompt_ids))
                self._report(request, RequestOutput.of(request))
        self.scheduler.update(finished)
        self._after(flight, len(rows))

    def _score(self, scoring: Scoring, scores: HostSampled, live: IntArray) -> None:
        """Hand prompt log-probabilities to their requests; those of a prompt computed again are there already."""
        for i in np.isin(scoring.rows, live).nonzero()[0]:
            request = self.table.requests[scoring.rows[i]]
            if len(request.prompt_logprobs) == scoring.positions[i]:
                request.prompt_logprobs.append(scores.logprob(int(i), request.params.prompt_logprobs))
        self.table.scored[live] = [request.scored for request in self.table.requests[live]]

    def _report(self, request: Request, output: RequestOutput) -> None:
        """Have an output of one sample ready."""
        self._ready.append(output)
        request.told = len(output.outputs[0].text)

    def _release(self, request: Request) -> None:
        """Give back the request's row and blocks, if it has them."""
        if request.row >= 0:
            self.kv_cache.free(self.table.close(request))

    def _begin_others(self, leader: Request) -> None:
        """The prompt has been computed: the other samples may begin."""
        for sample in leader.unborn:
            self.scheduler.add(sample)
        leader.unborn = []
        self.table.watched[leader.row] = leader.watched

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """End one sample, and the request if it was the last."""
        request.finish_reason = reason
        request.read_rest()
        if request.samples and request.stream:
            self._report(request, RequestOutput.of(request))
        request.over = True
        leader = request.leader
        if not (leader.unborn or leader.unfinished):
            output = RequestOutput.last(leader)
            self._ready.append(output)
            self._forget(leader, output)

    def _forget(self, leader: Request, output: RequestOutput) -> None:
        del self.requests[leader.id]
        self._note("nanofw_request_finished", RequestFinished(output))

    def _broke_off(self, error: BaseException, where: str) -> None:
        """Say which plugin raised, and put all requests back."""
        if note := blame(error, self._parts(), self.plugins):
            error.add_note(f"{note} {where}; all requests are put back and may go on with the next call")
        self._torn = True
        self._mend()

    def _mend(self) -> None:
        """Put all requests back if a call broke off. What fails in here is begun anew by the next call."""
        if not self._torn:
            return
        try:
            put_back(self)
        except BaseException as error:
            if note := blame(error, self._parts(), self.plugins):
                error.add_note(f"{note} when all requests were put back; the next call tries again")
            raise
        self._torn = False

    def _after(self, flight: InFlight, generated: int) -> None:
        """Count the step, note it for observers, and notice when steps no longer bring anybody forward."""
        self._fruitless = 0 if generated else self._fruitless + 1
        if self.observers.get("nanofw_step_finished"):
            step = flight.step
            event = StepFinished(
                index=self._steps,
                num_requests=step.num_requests,
                num_tokens=step.num_tokens,
                num_generated=generated,
                num_preempted=flight.preempted,
                started=flight.started,
                finished=time.perf_counter(),
            )
            self._note("nanofw_step_finished", event)
        self._steps += 1
        # The longest honest stretch without a token is one request's prefill at one token a step, one after another.
        self._stalled_if(self._fruitless > self.max_model_len * (len(self.requests) + 1))

    def _stalled_if(self, stalled: bool) -> None:
        if stalled:
            name = self.plugins["scheduler"].name if "scheduler" in self.plugins else type(self.scheduler).__name__
            raise EngineError(
                f"no progress: scheduler {name!r} brings none of {len(self.requests)} requests forward "
                f"({self.scheduler.num_waiting} waiting, {self.kv_cache.free_blocks} of "
                f"{self.kv_cache.num_blocks - 1} blocks free)"
            )

    def _tokens_of(self, row: int) -> TokenIds:
        return self.table.tokens[row, : self.table.known[row]]

    def _parts(self) -> dict[str, object]:
        parts = self.runner.parts
        mine: dict[str, object] = {"scheduler": self.scheduler, "kv_cache": self.kv_cache, "runner": self.runner}
        return mine | {"model": parts.model, "attention": parts.attention, "sampler": parts.sampler}

    def _note(self, hook: str, event: object) -> None:
        if self.observers.get(hook):
            self._news.append((hook, event))

    def _tell(self) -> None:
        """Tell observers what was noted. They may raise, or add and abort requests: all is in order here."""
        while self._news:
            hook, event = self._news.popleft()
            if observe := self.observers.get(hook):
                observe(event=event)
