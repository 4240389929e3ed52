"""Where a step's time goes: each planted fault is found by what it does, and no time is looked at."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from nanofw.attention import Attention
from nanofw.measure import explain as module
from nanofw.measure.explain import explain, growth, overheads
from nanofw.measure.roofline import Roof
from nanofw.testing.laws import COUNTED, host_with

ROOF = Roof("cpu", "float32", read_bandwidth=1e10, flops=1e11)


class Loops(Attention):
    """One request after another, one token after another, and asks for each length."""

    def attend(self, q, kv, batch):
        out, start = torch.zeros_like(q), 0
        for row, n in zip(range(len(batch.block_table)), batch.query_lens_host, strict=True):
            length = int(batch.seq_lens[row].item())
            places = range(length)
            k, v = (
                torch.stack([c[batch.block_table[row, i // kv.block_size], i % kv.block_size] for i in places], 1)
                for c in (kv.key, kv.value)
            )
            causal = torch.ones(n, length, dtype=torch.bool).tril(length - n)
            out[start : start + n] = scaled_dot_product_attention(
                q[start : start + n].transpose(0, 1), k, v, causal, scale=kv.spec.scale, enable_gqa=True
            ).transpose(0, 1)
            start += n
        return out


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(module, "ROUNDS", 1)
    monkeypatch.setattr(module, "LONGEST_S", 0.02)


@pytest.fixture
def found(llm):
    """What is found of an engine, by (attention, batch)."""

    def look(attention, batch, host=None, context=64):
        engine = llm(attention=attention, max_num_seqs=8, max_model_len=128, **({"host": host} if host else {})).engine
        found = explain(engine, batch, context, ROOF, growth(engine, context))
        assert not engine.has_work
        return found

    return look


@pytest.fixture
def _host_alone(monkeypatch):
    """The host accounts for all of a step, whatever this machine does meanwhile."""
    monkeypatch.setattr(module, "overheads", lambda device: (1.0, 1.0))


@pytest.mark.usefixtures("_host_alone")
def test_the_experiment_is_explained_from_its_counts(found):
    it = found("naive-gather", 4)
    assert it.bottleneck == "loop"
    assert it.growth["aten_calls"].endswith(" B ctx")
    assert f"{it.counts.aten_calls:,} calls to torch" in it.sentence
    assert "B*ctx small copies" in it.sentence


def test_one_gather_for_all_is_no_loop(found):
    it = found("vectorized-gather", 4)
    assert it.bottleneck in ("copies", "work")
    assert " B" not in it.growth["aten_calls"]
    assert it.growth["bytes_written"].endswith(" B ctx")


@pytest.mark.usefixtures("_host_alone")
def test_a_plugin_is_judged_by_what_it_does_and_not_by_its_name(found):
    it = found(COUNTED, 4, host_with("attention", Loops))
    assert it.bottleneck == "loop"
    # The tokens of the step; in each of three layers every length, and a block id for K and for V of every token.
    assert it.growth["host_reads"] == "1 + 3 B + 6 B ctx"


def test_numbers_fit_together(found):
    it = found("vectorized-gather", 2)
    assert it.wall_ms > 0
    assert it.device_ms is None
    assert 0 < it.host_share <= 1
    assert it.bandwidth == pytest.approx(it.bytes / it.wall_ms * 1e3)
    assert it.bandwidth_share == pytest.approx(it.bandwidth / ROOF.read_bandwidth)
    assert it.floor_ms == pytest.approx(it.bytes / ROOF.read_bandwidth * 1e3)
    assert len(it.costs) == 5
    assert [c.ms for c in it.costs] == sorted((c.ms for c in it.costs), reverse=True)
    assert sum(c.share for c in it.costs) <= 1
    for cost in it.costs:
        assert math.isclose(cost.ms, cost.share * it.wall_ms, rel_tol=1e-6)


def test_an_engine_too_small_to_see_growth_claims_none(llm):
    assert growth(llm(max_num_seqs=1, max_model_len=128).engine, 64) == {}
    assert growth(llm(max_num_seqs=8, max_model_len=30).engine, 16) == {}


def test_overheads():
    smallest, call = overheads(torch.device("cpu"))
    assert 0 < call < smallest < 1e-3
