"""Both schedulers: the shipped suite, and faults it must find."""

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import Phase

from nanofw.errors import EngineError
from nanofw.scheduler import Schedule
from nanofw.testing.scheduler_suite import SchedulerSuite
from nanofw_basics.continuous import ContinuousScheduler
from nanofw_basics.static import StaticScheduler
from nanofw_basics.waiting import WaitingLine


class TestContinuous(SchedulerSuite):
    backend = ContinuousScheduler


class TestShortestFirst(SchedulerSuite):
    backend = ContinuousScheduler
    options: ClassVar = {"order": "shortest", "victim": "least-lost"}


class TestReserving(SchedulerSuite):
    backend = ContinuousScheduler
    options: ClassVar = {"order": "priority", "admission": "reserve"}
    preempts = False


class TestStatic(SchedulerSuite):
    backend = StaticScheduler
    mixes = False
    preempts = False


class LosesTokens(ContinuousScheduler):
    """A request that is put back forgets its last token (transformers#43150)."""

    def retract(self, request):
        super().retract(request)
        del request.output_ids[-1:]


class Overspends(ContinuousScheduler):
    """Takes a token more than the step may have."""

    def _within_budget(self, needs):
        given = super()._within_budget(needs)
        return np.where(given < needs, given + 1, given)


class KeepsTheDead(ContinuousScheduler):
    """Does not forget requests that ended."""

    def update(self, finished):
        pass


class DropsThePutBack(ContinuousScheduler):
    """A request that is put back is never run again (vllm#16832)."""

    def schedule(self):
        made = super().schedule()
        for request in made.preempted if made is not None else ():
            self.waiting.leave(request)
        return made


class RunsNewcomersFirst(ContinuousScheduler):
    """The oldest request is the first to be put back and the last to come in."""

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


class SkipsTokens(ContinuousScheduler):
    """Declares a prompt's first token computed without computing it."""

    def admit(self, request):
        row = super().admit(request)
        if self.table.length[row] > 3:
            self.table.computed[row] += 1
        return row


class FillsRowsTwice(ContinuousScheduler):
    """Names a request twice in one step."""

    def schedule(self):
        made = super().schedule()
        if made is None or self.limits.max_batch_tokens <= made.num_tokens.sum():
            return made
        return Schedule(np.append(made.rows, made.rows[:1]), np.append(made.num_tokens, 1), made.preempted)


FAULTS = [LosesTokens, Overspends, KeepsTheDead, DropsThePutBack, SkipsTokens, FillsRowsTwice]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("depth", [0, 1])
def test_the_suite_finds(fault, depth):
    suite = type("Suite", (SchedulerSuite,), {"backend": fault, "phases": (Phase.generate,), "max_examples": 2000})()
    with pytest.raises(Exception):  # noqa: B017, PT011 (how a broken scheduler ends is its own affair)
        suite.test_lives_of_requests(depth)


def test_the_suite_finds_starvation():
    suite = type("Suite", (SchedulerSuite,), {"backend": RunsNewcomersFirst})()
    with pytest.raises(pytest.fail.Exception, match="still unfinished"):
        suite.test_oldest_request_does_not_starve()


class Stalls(ContinuousScheduler):
    def schedule(self):
        return None


def test_a_scheduler_that_stalls_is_named():
    engine = type("Suite", (SchedulerSuite,), {"backend": Stalls}).engine()
    engine.add("x", [1, 2, 3])
    with pytest.raises(EngineError, match="no progress: scheduler 'under-test' brings none of 1 requests forward"):
        engine.step()


class WorksInVain(ContinuousScheduler):
    """Puts everybody back before each step, so a prompt longer than the budget never gets through (vllm#39734 b)."""

    def schedule(self):
        for request in list(self.running):
            self.retract(request)
            self._leave([request])
            self.waiting.join(request)
        return super().schedule()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_scheduler_that_works_in_vain_is_named(depth):
    suite = type("Suite", (SchedulerSuite,), {"backend": WorksInVain})
    engine = suite.engine(max_batch_tokens=4, max_model_len=32, steps_in_flight=depth)
    engine.add("x", list(range(10)))
    with pytest.raises(EngineError, match="no progress: scheduler 'under-test' brings none of 1 requests forward"):
        list(engine.run())
