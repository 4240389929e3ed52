"""The sentence of `nanofw explain`: from what was measured, in the order of the cure."""

from dataclasses import replace

import pytest

from nanofw.measure.bottleneck import Evidence, amount, bottleneck
from nanofw.measure.counters import Counts
from nanofw.measure.fit import Fit
from nanofw.measure.roofline import Floor

FLAT = {name: Fit(name, 100, 0, 0, (64, 128)) for name in ("aten_calls", "python_calls", "bytes_written")}
PLAIN = Evidence(
    wall_ms=10,
    host_share=0.1,
    counts=Counts(aten_calls=100, bytes_written=1000, host_reads=1, python_calls=200),
    fits=FLAT,
    floor=Floor(bytes=10**6, flops=10**6, ms=1, bound="memory"),
    layers=4,
    bandwidth_share=0.1,
    largest=("mm", 0.4),
)


def said(**changes):
    return bottleneck(replace(PLAIN, **changes))


def fits(**changed):
    return FLAT | {name: Fit(name, 31, *slopes, (64, 128)) for name, slopes in changed.items()}


def test_work_on_tokens_one_by_one():
    kind, text = said(host_share=0.9, fits=fits(aten_calls=(37, 7)), counts=Counts(aten_calls=12_345))
    assert kind == "loop"
    assert "12,345 calls to torch, 7 for each token of each context (aten_calls = 31 + 37 B + 7 B ctx)" in text
    assert "B*ctx small copies" in text
    assert "90%" in text
    assert "10.0% of the memory's bandwidth" in text


def test_work_on_requests_one_by_one():
    kind, text = said(host_share=0.9, fits=fits(aten_calls=(37, 0)))
    assert kind == "loop"
    assert "37 for each request (aten_calls = 31 + 37 B)" in text


def test_a_loop_of_python_that_torch_does_not_see():
    kind, text = said(host_share=0.9, fits=fits(python_calls=(5, 0)))
    assert kind == "loop"
    assert "200 calls of Python functions, 5 for each request" in text


def test_a_loop_that_the_step_does_not_wait_for_is_not_blamed():
    assert said(host_share=0.2, fits=fits(aten_calls=(37, 7)))[0] == "work"


def test_reads_by_the_host():
    kind, text = said(host_share=0.9, counts=replace(PLAIN.counts, host_reads=28))
    assert kind == "waits"
    assert "28 values" in text


def test_calls_whatever_the_batch():
    kind, text = said(host_share=0.8)
    assert kind == "calls"
    assert "100 calls to torch whatever the batch" in text
    assert "captured graph" in text


def test_copies():
    kind, text = said(fits=fits(bytes_written=(0, 512)), counts=replace(PLAIN.counts, bytes_written=3 * 10**6))
    assert kind == "copies"
    assert "3 MB, 3.0 times all it must read, 512 B for each token" in text


def test_copies_that_are_small_are_not_blamed():
    assert said(fits=fits(bytes_written=(0, 512)))[0] == "work"


@pytest.mark.parametrize(("bound", "word"), [("memory", "bandwidth"), ("compute", "matrix product")])
def test_near_the_floor(bound, word):
    kind, text = said(wall_ms=1.2, bandwidth_share=0.83, floor=replace(PLAIN.floor, bound=bound))
    assert kind == bound
    assert "83%" in text
    assert word in text


def test_none_of_these():
    kind, text = said()
    assert kind == "work"
    assert "mm with 40% of the step, which takes 10.0 times its floor of 1 ms (memory)" in text


def test_what_could_not_be_fitted_is_not_claimed():
    assert said(host_share=0.9, fits={})[0] == "calls"


@pytest.mark.parametrize(("size", "text"), [(3, "3 B"), (2500, "2.5 kB"), (7.04e6, "7.04 MB"), (1.2e9, "1.2 GB")])
def test_amount(size, text):
    assert amount(size) == text
