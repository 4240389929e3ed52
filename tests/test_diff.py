"""Where two sets of plugins part: faults planted in one layer are named by step, layer and margin."""

from __future__ import annotations

import math

import pytest
import torch

from nanofw import PluginHost, SamplingParams, hookimpl
from nanofw.attention import Prologue
from nanofw.config import Config
from nanofw.diff import Call, Recorder, compare
from nanofw.errors import EngineError
from nanofw.weights import resolve
from nanofw_basics.transformers_model import TransformersModel
from nanofw_gather.vectorized import VectorizedGather

LAYER = 1
PROMPTS = [list(range(40, 57)), list(range(100, 133))]


def fault(change):
    """An attention that is wrong in one layer: `change(out, kv, batch, q)` makes its output."""

    class Faulty(VectorizedGather):
        def attend(self, q, kv, batch):
            out = super().attend(q, kv, batch)
            return change(out, kv, batch, q) if kv.index == LAYER else out

    return Faulty


def decode_only(out, kv, batch, q):
    return out * 1.3 if batch.max_query_len == 1 else out


def not_finite(out, kv, batch, q):
    return torch.full_like(out, math.nan)


FAULTS = {
    "scaled": fault(lambda out, kv, batch, q: out * 1.2),
    "heads": fault(lambda out, kv, batch, q: out.roll(1, dims=1)),
    "decode": fault(decode_only),
    "nan": fault(not_finite),
}


class LastBit(VectorizedGather):
    """Every output is off by its last bit."""

    def attend(self, q, kv, batch):
        return super().attend(q, kv, batch) * (1 + torch.finfo(q.dtype).eps / 2)


class PackedGather(VectorizedGather):
    """Right as separate tensors, wrong as the kernel that takes them packed."""

    def forward_packed(self, qkv, prologue, kv, batch):
        out = super().forward_packed(qkv, prologue, kv, batch)
        return out * 1.2 if kv.index == LAYER else out


class PackedModel(TransformersModel):
    """Hands q, k and v to the attention in one tensor, as fused models do."""

    def forward(self, batch, attention, kv):
        return super().forward(batch, Packs(attention), kv)


class WrongModel(TransformersModel):
    """Another value projection in one layer."""

    def __init__(self, *args):
        super().__init__(*args)
        self.module.model.layers[LAYER].self_attn.v_proj.weight.mul_(1.5)


class Packs:
    def __init__(self, attention):
        self.attention = attention

    def forward(self, q, k, v, kv, batch):
        same = Prologue(cos=torch.ones(2048, q.shape[-1]), sin=torch.zeros(2048, q.shape[-1]))
        packed = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
        return self.attention.forward_packed(packed, same, kv, batch).view_as(q)


class Plugin:
    nanofw_api = (1, 0)

    @hookimpl
    def nanofw_register_attention(self, register):
        for name, attention in FAULTS.items():
            register(name, attention)
        register("last bit", LastBit)
        register("packed", PackedGather)

    @hookimpl
    def nanofw_register_model(self, register):
        register("packs", PackedModel)
        register("wrong", WrongModel)


@pytest.fixture(scope="module")
def wrong_host():
    host = PluginHost.load(only=("basics", "gather"))
    host.register(Plugin())
    return host


@pytest.fixture
def diff(wrong_host):
    def run(a, b, name="dummy:tiny", max_tokens=12, **common):
        settings = {"model": name, "device": "cpu", "dtype": "float32", "kv_blocks": 64, "max_num_seqs": 4} | common
        first, second = (Config.build(settings, {"attention": "vectorized-gather"} | s) for s in (a, b))
        return compare(first, second, wrong_host, resolve(name), PROMPTS, max_tokens)

    return run


@pytest.mark.parametrize("name", ["dummy:tiny", "dummy:gemma-tiny"])
def test_equal(diff, name):
    report = diff({}, {"attention": "naive-gather", "scheduler": "static"}, name)
    assert report.equal
    assert (report.prompts, report.differ, report.divergence) == (2, 0, None)
    assert report.tokens > 2
    assert report.resolved_a["attention"].name == "vectorized-gather"
    assert report.resolved_b["attention"].name == "naive-gather"


@pytest.mark.parametrize("other", ["vectorized-gather", "naive-gather"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_one_layer_is_named(diff, name, other):
    report = diff({"attention": other}, {"attention": name})
    assert not report.equal
    found = report.divergence
    assert found.token_a != found.token_b
    layer = found.layer
    assert (layer.what, layer.layer) == ("attention", LAYER)
    assert layer.replay == ("decode" if name == "decode" else "prefill")
    assert layer.error_a <= layer.allowed
    assert not layer.error_b <= layer.allowed
    assert found.margin_a > 0
    if name != "nan":
        assert found.margin_b > 0


def test_either_side_may_be_the_wrong_one(diff):
    layer = diff({"attention": "heads"}, {}).divergence.layer
    assert (layer.what, layer.layer) == ("attention", LAYER)
    assert layer.error_a > layer.allowed >= layer.error_b


def test_step_and_margin_are_those_of_the_first_token_that_differs(diff, llm):
    """Told by hand: the first prompt that differs, its first differing token, and the lead of the likeliest there."""
    found = diff({}, {"attention": "scaled"}).divergence
    right = llm("dummy:tiny")
    expected = right.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12, logprobs=2))
    entry = expected[found.prompt].outputs[0].logprobs[found.step]
    assert entry.token_id == found.token_a
    assert found.margin_a == pytest.approx(entry.top[0][1] - entry.top[1][1], abs=1e-4)


def test_one_that_ends_earlier_has_no_token_there(diff):
    report = diff({}, {"max_model_len": 40})
    found = report.divergence
    assert report.differ == 1
    assert (found.prompt, found.step, found.token_b, found.layer) == (1, 40 - len(PROMPTS[1]), None, None)
    assert found.token_a is not None
    assert found.margin_a == found.margin_b


@pytest.mark.parametrize("attention", ["vectorized-gather", "naive-gather"])
def test_a_model_that_feeds_a_layer_otherwise_is_told_from_its_attention(diff, attention):
    layer = diff({}, {"model_impl": "wrong", "attention": attention}).divergence.layer
    assert (layer.what, layer.layer, layer.replay) == ("model", LAYER, "prefill")
    assert layer.error_b > layer.allowed


def test_packed_kernels_are_the_ones_that_are_judged(diff):
    assert diff({"model_impl": "packs"}, {"model_impl": "packs", "attention": "naive-gather"}).equal
    assert diff({}, {"model_impl": "packs"}).equal
    report = diff({"model_impl": "packs"}, {"model_impl": "packs", "attention": "packed"})
    layer = report.divergence.layer
    assert (layer.what, layer.layer) == ("attention", LAYER)
    assert layer.error_a <= layer.allowed < layer.error_b


def test_rounding_alone_blames_no_layer(diff):
    """In bfloat16 two right attentions part sooner or later; every layer is within what rounding explains."""
    found = diff({}, {"attention": "last bit"}, max_tokens=64, dtype="bfloat16").divergence
    assert found.step > 0
    assert found.layer is None
    assert found.margin_a < 0.1


def test_different_steps_cannot_be_compared(llm):
    attention = llm("dummy:tiny").engine.runner.parts.attention
    recorder = Recorder(attention)
    spec = attention.spec.layers[0]
    q = torch.zeros(3, spec.num_heads, spec.head_size)
    recorder.start([Call(1, spec, 0, q, q, q, None, q)])
    kv = llm("dummy:tiny").engine.kv_cache.layers[0]
    with pytest.raises(EngineError, match="different steps"):
        recorder.forward(q, q, q, kv, None)
