"""Both schedulers: the shipped suite, and what is said of one that gets nowhere."""

from typing import ClassVar

import pytest

from nanofw.errors import EngineError
from nanofw.testing.scheduler_suite import SchedulerSuite
from nanofw_basics.continuous import ContinuousScheduler
from nanofw_basics.static import StaticScheduler


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
