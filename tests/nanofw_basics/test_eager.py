"""The eager runner: steps in order, tokens fed on the device, nothing hidden in its report."""

import pytest
import torch

from nanofw import Config, SamplingParams
from nanofw.build import build_engine
from nanofw.testing.audited import audited_engine, context_model
from nanofw.testing.null import NullModel, NullSource


@pytest.fixture
def engine(host):
    return audited_engine(host)


def tokens(engine):
    return {o.request_id: list(o.outputs[0].token_ids) for o in engine.run() if o.finished}


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


def test_nothing_is_recorded_for_gradients(host):
    """Logits come from a model with weights that want gradients; the step keeps no graph of them."""
    kept = []
    source = NullSource()
    model = NullModel(source)
    model._logits.requires_grad_()
    forward = model.forward

    def watched(*args):
        kept.append(forward(*args))
        return kept[-1]

    model.forward = watched
    engine = build_engine(Config(device="cpu", kv_blocks=8), host, source, model)
    engine.add("x", [1, 2, 3], SamplingParams(temperature=0, max_tokens=2))
    assert len(tokens(engine)["x"]) == 2
    assert all(logits.grad_fn is None and logits.is_inference() for logits in kept)


def test_an_error_of_the_model_is_its_own(host):
    """Not caught, not renamed: the traceback leads to the plugin."""
    source = NullSource()
    model = NullModel(source)

    def broken(*args):
        raise torch.OutOfMemoryError("no memory")

    model.forward = broken
    engine = build_engine(Config(device="cpu", kv_blocks=8), host, source, model)
    engine.add("x", [1, 2, 3])
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        engine.step()
