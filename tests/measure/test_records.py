"""From runs to records: medians, ratios within a round, and a report that JSON can hold."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from nanofw.config import Config
from nanofw.measure import machine, records
from nanofw.measure.records import Measured
from nanofw.measure.sweep import Run

CONFIG = Config(model="dummy:tiny", attention="naive-gather", device="cpu", dtype="float32")


def run(batch, total_s):
    return Run(batch, 10 * batch, 7 * batch, batch, 0, total_s, total_s / 4, 9 * batch, 9)


def test_points_are_medians_with_their_rounds():
    small, large = records.points(CONFIG, {4: [run(4, s) for s in (3, 2, 8)], 1: [run(1, s) for s in (1, 1, 4)]})
    assert (small.batch, large.batch) == (1, 4)
    assert (large.model, large.attention, large.model_impl) == ("dummy:tiny", "naive-gather", "transformers")
    assert (large.prompt_tokens, large.tokens, large.cached_tokens) == (28, 40, 4)
    assert large.total_s == Measured(3, (3, 2, 8))
    assert large.tok_s == Measured(40 / 3, (40 / 3, 20, 5))
    assert large.decode_tok_s.rounds == tuple(36 / (0.75 * s) for s in (3, 2, 8))
    assert large.decode_ms.rounds == tuple(1000 * 0.75 * s / 9 for s in (3, 2, 8))
    assert large.prefill_tok_s.rounds == tuple(24 / (s / 4) for s in (3, 2, 8))
    assert small.speedup == Measured(1, (1, 1, 1))


def test_what_disturbs_a_round_leaves_its_ratio_alone():
    """In the third round everything took three times as long: the ratio of that round does not show it."""
    _, large = records.points(CONFIG, {1: [run(1, s) for s in (1, 1, 3)], 4: [run(4, s) for s in (2, 2, 6)]})
    assert large.speedup.rounds == pytest.approx((2, 2, 2))


def test_speedup_is_over_the_smallest_batch():
    _, large = records.points(CONFIG, {8: [run(8, 2)], 2: [run(2, 1)]})
    assert large.speedup.median == pytest.approx(2)


def test_report_survives_json(llm):
    engine = llm("dummy:tiny", attention="naive-gather").engine
    engine.runner.report.fallbacks["too many tokens"] = 3
    ran = records.ran(engine)
    found = records.points(CONFIG, {1: [run(1, 1)]})
    report = records.report(machine.describe(), {"rounds": 1}, {"naive-gather": ran}, found)
    assert report["format"] == records.FORMAT
    read = json.loads(json.dumps(report))
    assert read["points"] == [json.loads(json.dumps(asdict(p))) for p in found]
    assert read["points"][0]["total_s"] == {"median": 1, "rounds": [1]}
    assert read["combinations"]["naive-gather"]["fallbacks"] == {"too many tokens": 3}
    resolved = read["combinations"]["naive-gather"]["resolved"]
    assert resolved["attention"] == {
        "name": "naive-gather",
        "distribution": "nanofw",
        "version": resolved["attention"]["version"],
        "path": "",
        "batch_invariant": True,
    }
    assert resolved["runner"]["path"] == "eager"
