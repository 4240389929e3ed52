"""Faults planted into the continuous scheduler: the suite must find each, and say why."""

import numpy as np
import pytest
from hypothesis import Phase

from nanofw.scheduler import Schedule
from nanofw.testing import SchedulerSuite
from nanofw.testing.planted import Faults
from nanofw_basics.continuous import ContinuousScheduler
from nanofw_basics.waiting import WaitingLine

faults = Faults(SchedulerSuite, phases=(Phase.generate,), max_examples=2000)


@faults.plant("test_lives_of_requests*", "a token was not reported")
class LosesTokens(ContinuousScheduler):
    """A request that is put back forgets its last token (transformers#43150)."""

    def retract(self, request):
        super().retract(request)
        del request.output_ids[-1:]


@faults.plant("test_any_budget_gives_the_same_tokens*", "2 tokens in a step")
class Overspends(ContinuousScheduler):
    """Takes a token more than the step may have."""

    def _within_budget(self, needs):
        given = super()._within_budget(needs)
        return np.where(given < needs, given + 1, given)


@faults.plant("test_200_requests_give_everything_back", "brings none of 192 requests forward")
class KeepsTheDead(ContinuousScheduler):
    """Does not forget requests that ended."""

    def update(self, finished):
        pass


@faults.plant(
    "test_small_pools_give_the_same_tokens*", "no progress: scheduler 'under-test' brings none of 2 requests forward"
)
class DropsThePutBack(ContinuousScheduler):
    """A request that is put back is never run again (vllm#16832)."""

    def schedule(self):
        made = super().schedule()
        for request in made.preempted if made is not None else ():
            self.waiting.leave(request)
        return made


@faults.plant("test_oldest_request_does_not_starve", "still unfinished after 300 steps")
class RunsNewcomersFirst(ContinuousScheduler):
    """The oldest request is the first to be put back and the last to come in (vllm#39734)."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.waiting = WaitingLine(lambda request: (-request.number,))

    def _schedule_running(self):
        self.running.reverse()
        self._rows = self.rows_of(self.running)
        try:
            return super()._schedule_running()
        finally:
            self.running.reverse()
            self._rows = self.rows_of(self.running)


@faults.plant("test_any_budget_gives_the_same_tokens*", "tokens skipped or computed twice")
class SkipsTokens(ContinuousScheduler):
    """Declares a prompt's first token computed without computing it."""

    def admit(self, request):
        row = super().admit(request)
        if self.table.length[row] > 3:
            self.table.computed[row] += 1
        return row


@faults.plant("test_any_budget_gives_the_same_tokens*", "a request is twice in a step")
class NamesARowTwice(ContinuousScheduler):
    """A request stands in one step twice."""

    def schedule(self):
        made = super().schedule()
        if made is None or self.limits.max_batch_tokens <= made.num_tokens.sum():
            return made
        return Schedule(np.append(made.rows, made.rows[:1]), np.append(made.num_tokens, 1), made.preempted)


@faults.plant("test_long_prompt_does_not_stop_the_others", "the request in decode was left out of a step")
class PrefillFirst(ContinuousScheduler):
    """Who decodes waits for the prompts of others."""

    def _within_budget(self, needs):
        return super()._within_budget(np.where((needs > 1).any() & (needs == 1), 0, needs))


@faults.plant("test_abort_at_any_moment*", "KeyError: '1'")
class KeepsTheAborted(ContinuousScheduler):
    """An aborted request stays in the queue."""

    def abort(self, request):
        self._leave([request])


@faults.plant("test_small_pools_give_the_same_tokens[64-*", "put back although there was room")
class PutsBackWithoutNeed(ContinuousScheduler):
    """Puts the youngest back now and then, although there is room."""

    def schedule(self):
        if len(self.running) > 2 and self.table.computed.sum() % 7 == 0:
            victim = self.running[-1]
            self.retract(victim)
            victim.preemptions += 1
            self._leave([victim])
            self.waiting.join(victim)
        return super().schedule()


@faults.plant("test_a_cache_that_raises*", "a request is twice in a step")
class ClearsHalf(ContinuousScheduler):
    """After a call that broke off, some requests still count as running."""

    def clear(self):
        self.waiting.clear()


@faults.plant("test_common_beginnings*", "no progress|unfinished after")
class ForgetsWhoWaits(ContinuousScheduler):
    """Whoever waits for a beginning that is being computed is not put back into the line."""

    def _admit_waiting(self, rows, num_tokens):
        self.waiting.join = lambda request: None
        try:
            return super()._admit_waiting(rows, num_tokens)
        finally:
            del self.waiting.join


@faults.plant("test_memory_does_not_grow", "objects are left of each request")
class CountsByName(ContinuousScheduler):
    """Keeps a number for each request that it has ever seen."""

    def add(self, request):
        self.seen = {**getattr(self, "seen", {}), request.number: len(request.prompt_ids)}
        super().add(request)


@pytest.mark.parametrize("fault", faults, ids=str)
def test_is_found(fault):
    fault.must_be_found()
