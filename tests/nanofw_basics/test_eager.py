"""The eager runner: the suite of runners, and more steps in flight than any other runner must take."""

import pytest

from nanofw import SamplingParams
from nanofw.testing import RunnerSuite
from nanofw.testing.audited import audited_engine, context_model
from nanofw_basics.eager import EagerRunner


@pytest.fixture
def engine(host):
    return audited_engine(host)


def tokens(engine):
    return {o.request_id: list(o.outputs[0].token_ids) for o in engine.run() if o.finished}


class TestEager(RunnerSuite):
    backend = EagerRunner
    rows = 5


def test_submitted_before_the_last_one_is_waited_for(host):
    """Ten steps in flight at once: each gets its input token from the step before, on the device."""
    engine = audited_engine(host)
    engine.depth = 10  # deeper than the settings allow: nothing but the runner keeps the order
    engine.add("x", [1, 2, 3], SamplingParams(temperature=0, max_tokens=30))
    engine.add("y", [4], SamplingParams(temperature=0, max_tokens=7))
    assert tokens(engine) == {"x": context_model().greedy([1, 2, 3], 30), "y": context_model().greedy([4], 7)}


def test_a_pending_result_can_wait(host):
    """Results are the step's own: a later step does not change what an earlier one will give."""
    engine = audited_engine(host)
    runner, pending = engine.runner, []
    submit = runner.submit

    def late(step):
        pending.append(submit(step))
        return pending[-1]

    runner.submit = late
    engine.depth = 5
    engine.add("x", [1, 2, 3], SamplingParams(temperature=0, max_tokens=5))
    for _ in range(5):
        engine.step()
    assert [int(p.wait().tokens[0]) for p in pending] == context_model().greedy([1, 2, 3], 5)


def test_the_report(engine):
    engine.add("x", [1, 2, 3], SamplingParams(temperature=0, max_tokens=5))
    tokens(engine)
    assert (engine.runner.report.path, engine.runner.report.steps, engine.runner.report.fallbacks) == ("eager", 5, {})
