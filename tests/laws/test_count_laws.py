"""The gate: every shipped plugin keeps the count laws that it declares, and naive gathering is found to grow."""

import re

import pytest
import torch

from nanofw import CountLaw, PluginHost
from nanofw.attention import AttentionSpec
from nanofw.component import KINDS
from nanofw.errors import PluginError
from nanofw.kv_cache import LayerSpec
from nanofw.measure.counters import Counts, count
from nanofw.measure.fit import Fit
from nanofw.testing.laws import judge, judge_counts

HOST = PluginHost.load()
SHIPPED = sorted((s.kind, s.name) for s in HOST.statuses() if s.distribution == "nanofw" and s.kind in KINDS)


@pytest.mark.parametrize(("kind", "name"), SHIPPED, ids=["-".join(pair) for pair in SHIPPED])
def test_shipped_plugins_keep_their_laws(kind, name):
    try:
        component = HOST.get(kind, name).load()
    except PluginError as error:
        pytest.skip(str(error))
    verdicts = judge(component)
    assert {v.law.counter for v in verdicts} >= {"aten_calls", "launches", "host_reads", "python_calls"}
    broken = [v.text for v in verdicts if not v.holds]
    assert not broken, "\n".join(broken)


def test_naive_gathering_grows_with_every_token():
    """The detector works: two indexings for the key of each token, and two for its value."""
    component = HOST.get("attention", "naive-gather").load()
    aten = next(v for v in judge(component) if v.law.counter == "aten_calls")
    assert aten.law.grows_with == ("B", "B*ctx")
    assert re.fullmatch(r"aten_calls = \d+ \+ \d+ B \+ 4 B ctx", aten.text)


def test_bfloat16_in_the_interpreter_is_refused_with_its_reason():
    pytest.importorskip("triton")
    attention = HOST.get("attention", "triton-paged").load()
    layer = LayerSpec(4, 2, 64, 0.125)
    reasons = attention.validate(AttentionSpec((layer,), torch.bfloat16, torch.device("cpu"), 16))
    assert any("bfloat16" in reason and "interpreter" in reason for reason in reasons)


def grid(of):
    """Counts over a small grid: `of(B, ctx)` operations each."""
    return {(b, s): Counts(aten_calls=of(b, s)) for b in (2, 3, 5, 8) for s in (64, 128, 192)}


@pytest.mark.parametrize(
    ("of", "grown", "text"),
    [
        (lambda b, s: 31, (), "aten_calls = 31"),
        (lambda b, s: 31 + 37 * b, ("B",), "aten_calls = 31 + 37 B"),
        (lambda b, s: 31 + 37 * b + 7 * b * s, ("B", "B*ctx"), "aten_calls = 31 + 37 B + 7 B ctx"),
        (lambda b, s: 5 + 2 * b * s, ("B*ctx",), "aten_calls = 5 + 2 B ctx"),
        (lambda b, s: 5 + b * s // 16, ("B*ctx",), "aten_calls = 5 + 0.0625 B ctx"),
        (lambda b, s: 31 + (s > 64), (), None),  # a merge kernel from some context on
        (lambda b, s: 31 + (b > 3), (), None),  # a sorted table from some batch on
    ],
)
def test_the_fit_finds_what_is_there(of, grown, text):
    fit = Fit.of("aten_calls", grid(of))
    assert tuple(term for term in ("B", "B*ctx") if fit.grows_with(term)) == grown
    assert text is None or str(fit) == text


def test_a_broken_law_says_what_was_found_and_what_to_do():
    (verdict,) = judge_counts([CountLaw("aten_calls")], grid(lambda b, s: 31 + 37 * b + 7 * b * s))
    assert not verdict.holds
    assert verdict.text.startswith(
        "aten_calls = 31 + 37 B + 7 B ctx; declared slope in B: 0; declared slope in B ctx: 0."
    )
    assert """declare CountLaw("aten_calls", grows_with=('B', 'B*ctx'))""" in verdict.text
    (verdict,) = judge_counts([CountLaw("aten_calls", grows_with=("B*ctx",))], grid(lambda b, s: 31))
    assert "declared: grows with B*ctx, which it does not. It is better than it promises" in verdict.text


def test_counts_are_of_what_a_call_does():
    a, b, rows = torch.zeros(4, 8), torch.ones(4, 8), torch.tensor([0, 2])

    def work():
        a.add_(b)  # 128 bytes
        a[:, :2]  # a view: a call that writes nothing
        torch.empty(1000)  # nor does memory that nobody fills
        a.index_put_((rows,), b[0])  # 64 bytes, not the whole of a
        a.sum().item()  # 4 bytes, and a read
        return a.tolist()  # a read

    found = count(work)
    assert found.bytes_written == 128 + 64 + 4
    assert found.host_reads == 2
    assert found.python_calls == 1
    assert found.launches == 0


def test_laws_that_say_nothing_are_refused():
    with pytest.raises(ValueError, match=r"counter must be one of aten_calls, .*, got 'steps'"):
        CountLaw("steps")
    with pytest.raises(ValueError, match=r"grows_with takes B and B\*ctx, got 'ctx'"):
        CountLaw("launches", grows_with=("ctx",))
