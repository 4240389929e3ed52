"""The same bits for a request alone and in any company: who declares it has it, and an engine of such parts too."""

from typing import ClassVar

import pytest

from nanofw import LLM, SamplingParams
from nanofw.testing import AttentionSuite
from nanofw.testing.model_invariance import ModelInvariance
from nanofw_basics.transformers_model import TransformersModel
from nanofw_gather.naive import NaiveGather

MODELS = ("dummy:tiny", "dummy:gemma3-tiny", "dummy:smollm2-tiny")


class TestOneByOne(ModelInvariance):
    backend = TransformersModel
    options: ClassVar = {"batch_invariant": True}
    models = MODELS


class CountsItsCompany(TransformersModel):
    """Declares it, and rounds by the number of rows."""

    def forward(self, batch, attention, kv):
        logits = super().forward(batch, attention, kv)
        return logits + batch.num_requests - batch.num_requests


class AttendsByItsCompany(NaiveGather):
    """The same for an attention, which inherits what it declares."""

    def attend(self, q, kv, batch):
        return super().attend(q, kv, batch) + batch.num_requests - batch.num_requests


def test_an_attention_that_declares_it_and_is_not():
    suite = type("Suite", (AttentionSuite,), {"backend": AttendsByItsCompany})
    checks = dict(suite.checks("test_company_changes_no_bit"))

    def run():
        for check in checks.values():
            check()

    with pytest.raises(AssertionError, match=r"alone and in company: .* values have other bits"):
        run()


def checks(plugin, options):
    suite = type("Suite", (ModelInvariance,), {"backend": plugin, "options": options, "models": MODELS[:1]})
    return [check for _, check in suite.checks()]


def test_a_model_that_declares_it_and_is_not():
    (check,) = checks(CountsItsCompany, {"batch_invariant": True})
    with pytest.raises(AssertionError, match="other bits than alone"):
        check()


def test_a_model_that_does_not_declare_it():
    (check,) = checks(TransformersModel, {})
    with pytest.raises(pytest.skip.Exception, match="TransformersModel does not declare batch invariance on cpu"):
        check()


@pytest.mark.parametrize(
    ("attention", "model", "sampler", "expected"),
    [
        ("naive-gather", True, "default", True),
        ("naive-gather", False, "default", False),
        ("vectorized-gather", True, "default", False),
    ],
)
def test_the_engine_has_it_if_all_three_have_it(host, attention, model, sampler, expected):
    engine = build(host, attention=attention, options={"model": {"batch_invariant": model}}, sampler=sampler).engine
    assert engine.batch_invariant is expected
    assert engine.resolved["model"].path == ("requests one by one" if model else "")
    declared = {kind: part.batch_invariant for kind, part in engine.resolved.items()}
    assert declared == {
        "model": model,
        "attention": attention == "naive-gather",
        "sampler": True,
        "kv_cache": None,
        "scheduler": None,
        "runner": None,
    }


def build(host, **settings):
    return LLM("dummy:tiny", host=host, device="cpu", dtype="float32", kv_blocks=256, **settings)


@pytest.mark.parametrize("depth", [0, 1])
def test_end_to_end(host, depth):
    """Sampled tokens and their log-probabilities, whoever comes and goes meanwhile."""
    llm = build(host, attention="naive-gather", steps_in_flight=depth, options={"model": {"batch_invariant": True}})
    prompts = [[(7 * i + j) % 250 for j in range(1 + 5 * i)] for i in range(7)]
    how = [
        SamplingParams(temperature=i % 3 / 2, top_p=0.9, seed=i, max_tokens=3 + 4 * i % 9, logprobs=20, ignore_eos=True)
        for i in range(7)
    ]
    assert llm.engine.batch_invariant
    alone = [llm.generate([tokens], params)[0].outputs for tokens, params in zip(prompts, how, strict=True)]
    assert [o.outputs for o in llm.generate(prompts, how)] == alone
