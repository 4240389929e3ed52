"""What observers are told, and that an observer may act on it."""

import time

import pytest

import nanofw
from nanofw import PluginHost, SamplingParams
from nanofw.testing.audited import audited_engine, audited_steps, context_model, nothing_left, prompt


class Observer:
    """Keeps every event; `act` runs at the end of each request."""

    nanofw_api = nanofw.API

    def __init__(self, act=lambda output: None):
        self.created, self.steps, self.ended, self.act = [], [], [], act

    @nanofw.hookimpl
    def nanofw_engine_created(self, event):
        self.created.append(event)

    @nanofw.hookimpl
    def nanofw_step_finished(self, event):
        self.steps.append(event)

    @nanofw.hookimpl
    def nanofw_request_finished(self, event):
        self.ended.append(event)
        self.act(event.output)


def observed(observer, **settings):
    host = PluginHost.load(only=("basics", "gather"))
    host.register(observer, "observer")
    return audited_engine(host, **settings)


def greedy(count):
    return SamplingParams(temperature=0, max_tokens=count)


def test_engine_created():
    """Once for each engine, when all of it is there."""
    observer = Observer()
    engines = [observed(observer)]
    assert [e.engine for e in observer.created] == engines
    assert observer.created[0].engine.kv_cache.free_blocks == 64


@pytest.mark.parametrize("depth", [0, 1])
def test_step_finished(depth):
    """Numbers of each step: its requests, its tokens, those that counted, those put back, and when."""
    observer, before = Observer(), time.perf_counter()
    engine = observed(
        observer, steps_in_flight=depth, kv_blocks=5, max_batch_tokens=8, options={"kv_cache": {"block_size": 4}}
    )
    for i in range(3):
        engine.add(str(i), prompt(5 + i, i), greedy(8))
    outputs = list(engine.run())
    steps = audited_steps(engine)
    assert [e.index for e in observer.steps] == list(range(len(steps)))
    assert [e.num_requests for e in observer.steps] == [s.num_requests for s in steps]
    assert [e.num_tokens for e in observer.steps] == [s.num_tokens for s in steps]
    assert sum(e.num_generated for e in observer.steps) == len(outputs) == 3 * 8
    preempted = sum(o.preemptions for o in outputs if o.finished)
    assert sum(e.num_preempted for e in observer.steps) == preempted > 0
    times = [t for e in observer.steps for t in (e.started, e.finished)]
    assert before < min(times)
    assert max(times) < time.perf_counter()
    assert all(e.started < e.finished for e in observer.steps)
    assert [e.finished for e in observer.steps] == sorted(e.finished for e in observer.steps)


@pytest.mark.parametrize("depth", [0, 1])
def test_request_finished(depth):
    """Once for each request, whatever the reason, with the output that the caller gets."""
    observer = Observer()
    engine = observed(observer, steps_in_flight=depth, max_model_len=20)
    engine.add("length", [1], greedy(4))
    engine.add("context", prompt(18, 0), greedy(9))
    engine.add("abort", [2], greedy(9))
    engine.step(), engine.step()
    aborted = engine.abort("abort")
    outputs = [aborted, *(o for o in engine.run() if o.finished)]
    told = {e.output.request_id: e.output for e in observer.ended}
    assert len(told) == len(observer.ended) == 3
    assert {o.request_id: o for o in outputs} | told == told, "the same outputs"
    assert {key: o.outputs[0].finish_reason for key, o in told.items()} == {
        "length": "length",
        "context": "context",
        "abort": "abort",
    }


@pytest.mark.parametrize("depth", [0, 1])
def test_an_observer_may_add_and_abort(depth):
    """At the end of a request: the engine is in order, so the next one can be added and another one aborted."""

    def act(output):
        if output.request_id == "first":
            engine.abort("second")
            engine.add("first", [7, 8], greedy(3))

    observer = Observer(lambda output: act(output) if len(observer.ended) == 1 else None)
    engine = observed(observer, steps_in_flight=depth)
    engine.add("first", [1, 2], greedy(3))
    engine.add("second", [3, 4], greedy(20))
    engine.add("third", [5, 6], greedy(9))
    last = {o.request_id: list(o.outputs[0].token_ids) for o in engine.run() if o.finished}
    assert last["third"] == context_model().greedy([5, 6], 9)
    assert last["first"] == context_model().greedy([7, 8], 3)
    assert [e.output.request_id for e in observer.ended] == ["first", "second", "first", "third"]
    nothing_left(engine)


@pytest.mark.parametrize("depth", [0, 1])
def test_an_observer_that_raises(depth):
    """Its error reaches the caller, and the engine goes on: no output is lost, nothing is computed again."""

    def act(output):
        if output.request_id == "first":
            raise OSError("disk full")

    engine = observed(Observer(act), steps_in_flight=depth)
    engine.add("first", [1, 2], greedy(3))
    engine.add("second", [3, 4], greedy(9))
    with pytest.raises(OSError, match="disk full"):
        list(engine.run())
    found = {o.request_id: o for o in engine.run() if o.finished}
    assert list(found["first"].outputs[0].token_ids) == context_model().greedy([1, 2], 3)
    assert list(found["second"].outputs[0].token_ids) == context_model().greedy([3, 4], 9)
    assert not any(o.preemptions for o in found.values())
    nothing_left(engine)


def test_events_wait_for_an_observer_that_raises():
    """Two requests end in one step, and the first report fails: the second one comes with the next call."""

    def act(output):
        if output.request_id == "first":
            raise OSError("disk full")

    observer = Observer(act)
    engine = observed(observer)
    engine.add("first", [1, 2], greedy(1))
    engine.add("second", [3, 4], greedy(1))
    with pytest.raises(OSError, match="disk full"):
        engine.step()
    assert [e.output.request_id for e in observer.ended] == ["first"]
    assert {o.request_id for o in engine.step()} == {"first", "second"}
    assert [e.output.request_id for e in observer.ended] == ["first", "second"]
    assert not engine.has_work


def test_aborted_from_an_observer_with_an_output_ready():
    """What the step was about to report of a request is in the output of its abort, and nothing comes after."""

    def act(output):
        if output.request_id == "first":
            aborted.append(engine.abort("second"))

    aborted = []
    engine = observed(Observer(act))
    engine.add("first", [1, 2], greedy(2))
    engine.add("second", [3, 4], greedy(9))
    outputs = [engine.step(), engine.step()]
    assert [[o.request_id for o in step] for step in outputs] == [["first", "second"], ["first"]]
    assert list(aborted[0].outputs[0].token_ids) == context_model().greedy([3, 4], 2)
    assert not engine.has_work
