"""`nanofw report`, and the pages and pictures of `nanofw bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SMALL = ("--model", "dummy:tiny", "--prompt-tokens", "20", "--output-tokens", "16", "--rounds", "2")
RECORDED = Path(__file__).parents[1] / "report" / "recorded.json"


@pytest.fixture
def runs() -> tuple[str, str]:
    """Two files with the same run, the second twice as fast."""
    record = json.loads(RECORDED.read_text())
    Path("before.json").write_text(json.dumps(record))
    for point in record["points"]:
        for name in ("tok_s", "decode_tok_s", "prefill_tok_s"):
            point[name] = {"median": 9 * point[name]["median"], "rounds": [9 * r for r in point[name]["rounds"]]}
    Path("after.json").write_text(json.dumps(record))
    return "before.json", "after.json"


def test_bench_writes_page_picture_and_record(nanofw: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from nanofw.measure import explain, roofline

    monkeypatch.setenv("NANOFW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(explain, "ROUNDS", 1)
    monkeypatch.setattr(roofline, "READ_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(roofline, "MATMUL_SIZE", {"cpu": 64})
    files = ("--html", "o.html", "--png", "o.png", "--json", "o.json")
    ran = nanofw("bench", *SMALL, "--attention", "vectorized-gather", "--batch-sizes", "1,2", *files)
    assert ran.code == 0
    assert ran.err == "wrote o.json\nwrote o.html\nwrote o.png\n"
    record = json.loads(Path("o.json").read_text())
    assert [p["batch"] for p in record["roofline"]] == [1, 2]
    assert [b["batch"] for b in record["explained"]["vectorized-gather"]] == [1, 2]
    kinds = {"model", "attention", "kv_cache", "scheduler", "runner", "sampler"}
    assert {plugin.split()[0] for plugin in record["laws"]} == kinds
    assert all(laws for laws in record["laws"].values())
    text = Path("o.html").read_text()
    assert record["explained"]["vectorized-gather"][-1]["sentence"].partition(" (")[0][:60] in text
    assert Path("o.png").read_bytes().startswith(b"\x89PNG")
    assert nanofw("report", "o.json", "--html", "again.html").code == 0
    assert Path("again.html").read_text() == text


def test_one_run(nanofw: Any, runs: tuple[str, str]) -> None:
    ran = nanofw("report", runs[0])
    assert ran.code == 0
    assert "naive-gather: batch 16 gives " in ran.out
    assert ran.err == ""


def test_two_runs(nanofw: Any, runs: tuple[str, str]) -> None:
    ran = nanofw("report", *runs, "--html", "o.html", "--png", "o.png")
    assert ran.code == 0
    assert "9.000x" in ran.out
    assert ran.out.rstrip().endswith("faster (9.00x to 9.00x).")
    assert "what differs" not in ran.out
    assert "before" in Path("o.html").read_text()
    assert Path("o.png").stat().st_size > 10_000


def test_what_it_refuses(nanofw: Any, runs: tuple[str, str]) -> None:
    assert "takes one file or two, got 3" in nanofw("report", *runs, runs[0]).error_line
    assert "cannot read no.json" in nanofw("report", "no.json").error_line
    assert "cannot write" in nanofw("report", runs[0], "--html", "no/such.html").error_line
    assert not Path("no").exists()


def test_missing_packages_are_told_before_anything_is_measured(
    nanofw: Any, runs: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from nanofw.report import read

    monkeypatch.setattr(read.importlib.util, "find_spec", lambda name: None)
    for command in (("report", runs[0]), ("bench", *SMALL)):
        line = nanofw(*command, "--html", "o.html").error_line
        assert "reports need jinja2, matplotlib: pip install 'nanofw[report]'" in line
        assert "jinja2" not in nanofw(*command, "--png", "o.png").error_line
