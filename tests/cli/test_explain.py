"""`nanofw explain`: what it says and writes. No test here looks at how long anything took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SMALL = ("--model", "dummy:tiny", "--prompt-tokens", "40", "--output-tokens", "32")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from nanofw.measure import explain, roofline

    monkeypatch.setenv("NANOFW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(explain, "ROUNDS", 1)
    monkeypatch.setattr(explain, "LONGEST_S", 0.02)
    monkeypatch.setattr(explain, "overheads", lambda device: (1.0, 1.0))  # the host accounts for all
    monkeypatch.setattr(roofline, "READ_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(roofline, "MATMUL_SIZE", {"cpu": 64})


def test_the_story_of_two_attentions(nanofw: Any) -> None:
    both = ("--attention", "naive-gather,vectorized-gather")
    ran = nanofw("explain", *SMALL, *both, "--batch-sizes", "1,2", "--json", "o.json")
    assert ran.code == 0
    assert ran.err == "wrote o.json\n"
    report = json.loads(Path("o.json").read_text())
    assert set(report) == {"format", "machine", "roof", "telemetry", "waited", "combinations"}
    naive, vectorized = (report["combinations"][name] for name in ("naive-gather", "vectorized-gather"))
    assert [b["batch"] for b in naive] == [1, 2]
    assert {b["context"] for b in naive} == {56}  # the middle of the output
    assert {b["bottleneck"] for b in naive} == {"loop"}
    assert "loop" not in {b["bottleneck"] for b in vectorized}
    assert naive[1]["sentence"] in ran.out
    assert f"aten_calls = {naive[1]['growth']['aten_calls']}" in ran.out
    assert "B*ctx small copies" in ran.out
    assert "bandwidth" in ran.out
    for breakdown in naive:
        assert breakdown["costs"][0]["name"] in ran.out
        assert breakdown["device_ms"] is None


def test_one_request_at_a_time_is_explained_too(nanofw: Any) -> None:
    ran = nanofw("explain", *SMALL, "--attention", "vectorized-gather", "--batch-sizes", "1", "--max-num-seqs", "1")
    assert ran.code == 0
    assert "batch 1: " in ran.out


def test_what_it_refuses(nanofw: Any) -> None:
    assert "at least 16" in nanofw("explain", "--output-tokens", "4").error_line
    assert "numbers from 1 up" in nanofw("explain", "--batch-sizes", "x").error_line
    assert "cannot write" in nanofw("explain", "--json", "no/such/folder.json").error_line
