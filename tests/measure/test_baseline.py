"""Runs against baselines, on recorded files: nothing here is timed."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanofw.errors import ConfigError
from nanofw.measure import baseline, contention
from nanofw.measure.accept import accept
from nanofw.measure.judged import judged

RECORDED = Path(__file__).parent / "recorded"
"""Written by pytest-benchmark 5.3.1 under the gate; other cases are made of these by changing one thing."""
DECODE, SHARE = "test_decode.py::test_decode[16]", "test_share.py::test_share"


@pytest.fixture
def run():
    return json.loads((RECORDED / "cpu.json").read_text())


@pytest.fixture
def folder(tmp_path, run):
    """A folder of baselines that holds the recorded run."""
    (tmp_path / "cpu.json").write_text(json.dumps(run))
    return tmp_path


def machine(run):
    return run["machine_info"]["nanofw"]


def bench(run, key):
    return next(b for b in run["benchmarks"] if b["key"] == key)


def judge(run, folder, **given):
    return baseline.judge(run, baseline.choose(folder, machine(run), run["nanofw"].get("waited")), **given)


def slower(run, key, factor):
    for field in ("min", "max", "mean", "median"):
        bench(run, key)["stats"][field] *= factor


def set_figure(run, key, name, median, best=None):
    bench(run, key)["extra_info"][name] = median
    bench(run, key)["extra_info"]["best"][name] = median if best is None else best


def test_no_baseline_is_said_and_is_no_failure(run, tmp_path):
    verdict = judge(run, tmp_path)
    assert verdict.status == "no baseline"
    assert "no baseline for a CPU" in verdict.basis
    assert not verdict.failures


def test_the_same_run_passes(run, folder):
    verdict = judge(run, folder)
    assert (verdict.status, verdict.compared, verdict.notes) == ("passed", 3, [])
    assert "same machine" in verdict.basis


@pytest.mark.parametrize(("factor", "status"), [(1.19, "passed"), (1.21, "failed"), (0.5, "passed")])
def test_times_count_on_the_same_machine(run, folder, factor, status):
    slower(run, DECODE, factor)
    verdict = judge(run, folder)
    assert verdict.status == status
    if status == "failed":
        assert verdict.failures == [f"{DECODE}: time 4.84 ms, baseline 4 ms: worse by 21%, the limit is 20%"]
    assert any(note.startswith(f"better: {DECODE}") for note in verdict.notes) == (factor < 0.8)


def test_load_that_leaves_the_fastest_round_alone_is_no_regression(run, folder):
    bench(run, DECODE)["stats"]["median"] *= 3
    assert judge(run, folder).status == "passed"
    bench(run, DECODE)["stats"]["min"] *= 3
    assert judge(run, folder).status == "failed"


def test_load_that_leaves_the_best_round_alone_is_no_lower_speed_up(run, folder):
    set_figure(run, DECODE, "speedup", 3.0, best=5.5)
    assert judge(run, folder).status == "passed"
    set_figure(run, DECODE, "speedup", 3.0, best=5.0)
    assert judge(run, folder).failures == [
        f"{DECODE}: speedup 3, baseline 6: worse by 50% and 17% (median and best round), the limit is 15%"
    ]


@pytest.mark.parametrize(("now", "then"), [(0.06, 0.0), (0.0, 0.06), (0.5, None)])
def test_times_of_a_busy_machine_do_not_count(run, folder, now, then):
    slower(run, DECODE, 3)
    run["nanofw"]["waited"] = 0.05
    assert judge(run, folder).status == "failed"
    base = json.loads((folder / "cpu.json").read_text())
    base["nanofw"]["waited"], run["nanofw"]["waited"] = then, now
    (folder / "cpu.json").write_text(json.dumps(base))
    verdict = judge(run, folder)
    assert verdict.status == "passed"
    assert "same machine, but busy (" in verdict.basis
    assert f"waited for a processor in {max(now, then or 0):.0%} of its time" in verdict.basis
    set_figure(run, DECODE, "speedup", 1.0)
    assert judge(run, folder).status == "failed"


@pytest.mark.parametrize("key", ["cpu", "cores", "threads", "torch", "triton", "python"])
def test_times_do_not_count_on_another_machine(run, folder, key):
    machine(run)[key] = "other"
    slower(run, DECODE, 100)
    verdict = judge(run, folder)
    assert verdict.status == "passed"
    assert "another machine" in verdict.basis
    assert "other" in verdict.basis
    assert verdict.compared == 2  # the third records no ratio, exponent or count


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize(
    ("key", "figure", "fine", "worse"),
    [
        (DECODE, "speedup", 5.1, 5.09),  # gain: 15 % of 6
        (DECODE, "exponent", 0.5, 0.51),  # 0.15 more than 0.35
        (SHARE, "share", 0.229, 0.231),  # cost: 15 % of 0.2
        (SHARE, "steps", 63, 65),  # count: 64, none more
    ],
)
def test_ratios_exponents_and_counts_hold_anywhere(run, folder, key, figure, fine, worse, same):
    if not same:
        machine(run)["torch"] = "other"
    set_figure(run, key, figure, fine)
    assert judge(run, folder).status == "passed"
    set_figure(run, key, figure, worse)
    verdict = judge(run, folder)
    assert verdict.status == "failed"
    (failure,) = verdict.failures
    assert failure.startswith(f"{key}: {figure} {worse}, baseline")


def test_limits_of_one_benchmark(run, folder):
    bench(run, DECODE)["limits"] = {"time": 0.6, "speedup": None}
    set_figure(run, DECODE, "speedup", 0.1)
    slower(run, DECODE, 1.59)
    assert judge(run, folder).status == "passed"
    slower(run, DECODE, 1.1)
    assert "the limit is 60%" in judge(run, folder).failures[0]


def test_a_limit_for_a_figure_that_is_not_there(run, folder):
    bench(run, DECODE)["limits"] = {"spedup": 0.5}
    (failure,) = judge(run, folder).failures
    assert "'spedup'" in failure
    assert "time, speedup, exponent" in failure


def test_removed_and_renamed_benchmarks_fail(run, folder):
    bench(run, DECODE)["key"] = "test_decode.py::test_new[16]"
    verdict = judge(run, folder)
    assert verdict.failures == [f"{DECODE}: removed or renamed; the baseline has it, no test by this name exists"]
    assert verdict.notes == ["not in the baseline yet: test_decode.py::test_new[16]"]


def test_a_part_of_the_set_is_not_searched_for_removed_ones(run, folder):
    run["benchmarks"] = [bench(run, DECODE)]
    verdict = judge(run, folder, part="-k decode")
    assert (verdict.status, verdict.compared) == ("passed", 1)
    assert "only a part of the set was run (-k decode)" in verdict.notes[-1]


def test_a_skipped_benchmark_is_told_and_not_removed(run, folder):
    run["benchmarks"] = [b for b in run["benchmarks"] if b["key"] != DECODE]
    verdict = judge(run, folder, unmeasured={DECODE})
    assert verdict.status == "passed"
    assert verdict.notes == [f"in the baseline, not measured here: {DECODE}"]


def test_a_figure_that_is_no_longer_recorded_fails(run, folder):
    del bench(run, DECODE)["extra_info"]["judged"]["speedup"]
    assert judge(run, folder).failures == [f"{DECODE}: speedup is in the baseline and no longer recorded"]


def test_repeats_of_a_test_are_judged_together(run, folder):
    for factor in (3, 3, 1):  # with the first, four runs; the median of medians is twice as long
        again = copy.deepcopy(bench(run, DECODE))
        again["stats"]["median"] *= factor
        run["benchmarks"].append(again)
    record = baseline.records(run)[DECODE]
    assert record.median == pytest.approx(0.008)
    assert record.fastest == bench(run, DECODE)["stats"]["min"]
    assert judge(run, folder).status == "passed"


def test_a_count_of_nothing_and_a_cost_of_nothing(run, folder):
    base = json.loads((folder / "cpu.json").read_text())
    for name in ("share", "steps"):
        set_figure(base, SHARE, name, 0)
        set_figure(run, SHARE, name, 0)
    (folder / "cpu.json").write_text(json.dumps(base))
    assert judge(run, folder).status == "passed"
    set_figure(run, SHARE, "share", 0.001)
    set_figure(run, SHARE, "steps", 1)
    assert len(judge(run, folder).failures) == 2


def test_the_most_similar_baseline_is_chosen(run, tmp_path):
    def write(name, **changes):
        other = copy.deepcopy(run)
        machine(other).update(changes)
        (tmp_path / name).write_text(json.dumps(other))

    gpu = {"name": "Some GPU", "driver": "1"}
    write("a.json", cpu="Another CPU")
    write("b.json", torch="1", triton="1", python="1")
    write("c.json", gpu=gpu)
    here = machine(run)
    assert baseline.choose(tmp_path, here).file.name == "b.json"  # the device counts more than versions
    write("d.json")
    assert baseline.choose(tmp_path, here).file.name == "d.json"
    assert baseline.choose(tmp_path, here).times
    on_gpu = baseline.choose(tmp_path, here | {"gpu": gpu | {"driver": "2"}})
    assert (on_gpu.file.name, on_gpu.times) == ("c.json", False)
    assert "driver 1, here 2" in on_gpu.why


def test_a_gpu_is_not_compared_with_a_cpu(run, folder):
    machine(run)["gpu"] = {"name": "Some GPU", "driver": "1"}
    verdict = judge(run, folder)
    assert (verdict.status, "no baseline for a GPU" in verdict.basis) == ("no baseline", True)


def test_names_of_files(run):
    assert baseline.slug(machine(run)) == "intel-xeon-processor-2-cores-1-threads"
    assert baseline.slug(machine(run) | {"gpu": {"name": "NVIDIA H200", "driver": "1"}}) == "nvidia-h200"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"machine_info": {}}', '{"machine_info": {"nanofw": {"gpu": null}}}']
)
def test_a_file_that_is_no_run_is_named(run, tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json"):
        baseline.choose(tmp_path, machine(run))


class TestAccept:
    """Only a run that passed becomes a baseline."""

    def write(self, tmp_path, run, **changes):
        run["nanofw"].update(changes)
        file = tmp_path / "run.json"
        file.write_text(json.dumps(run))
        return file

    def test_a_passing_run_is_promoted(self, run, tmp_path):
        bench(run, DECODE)["stats"]["data"] = [0.004]
        for status in ("passed", "no baseline"):
            target = accept(self.write(tmp_path, run, status=status), tmp_path / "baselines")
        assert target == tmp_path / "baselines" / "intel-xeon-processor-2-cores-1-threads.json"
        text = target.read_text()
        assert "data" not in bench(json.loads(text), DECODE)["stats"]
        assert sum('"key"' in line for line in text.splitlines()) == len(run["benchmarks"])  # one line each
        assert judge(run, target.parent).status == "passed"

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"status": "failed", "failures": ["x: worse", "y: worse"]}, r"failed the gate .* x: worse \(and 1 more\)"),
            ({"status": "not judged", "basis": "--quick measures less"}, "was not judged .* --quick measures less"),
            ({"part": "3 were deselected"}, r"a part of the set \(3 were deselected\)"),
        ],
    )
    def test_others_are_refused_with_the_reason(self, run, tmp_path, changes, words):
        with pytest.raises(ConfigError, match=words):
            accept(self.write(tmp_path, run, **changes), tmp_path / "baselines")
        assert not (tmp_path / "baselines").exists()

    def test_a_run_of_nothing_is_refused(self, run, tmp_path):
        with pytest.raises(ConfigError, match="holds no benchmark"):
            accept(self.write(tmp_path, run | {"benchmarks": []}), tmp_path)

    def test_files_that_cannot_be_read_or_written(self, run, tmp_path):
        with pytest.raises(ConfigError, match=r"cannot read .*nosuch\.json"):
            accept(tmp_path / "nosuch.json", tmp_path)
        file = self.write(tmp_path, run)
        with pytest.raises(ConfigError, match="cannot write"):
            accept(file, file)


def test_waiting_for_a_processor_is_a_share_of_the_time_since(tmp_path, monkeypatch):
    file = tmp_path / "schedstat"
    monkeypatch.setattr(contention, "_SCHEDULED", file)
    assert contention.Contention().waited is None
    file.write_text("1000 500 7\n")
    since = contention.Contention()
    assert since.waited == 0.0
    file.write_text("1300 600 9\n")
    assert since.waited == 0.25
    file.write_text("something else")
    assert since.waited is None


def test_judged_figures():
    fixture = SimpleNamespace(fullname="t", extra_info={})
    judged(fixture, "gain", speedup=[3.0, 5.0, 4.0])
    judged(fixture, "count", steps=4)
    judged(fixture, "exponent", exponent=(0.5, 0.25))
    assert fixture.extra_info == {
        "speedup": 4.0,
        "steps": 4,
        "exponent": 0.375,
        "judged": {"speedup": "gain", "steps": "count", "exponent": "exponent"},
        "best": {"speedup": 5.0, "steps": 4, "exponent": 0.25},
    }
    with pytest.raises(ConfigError, match="did you mean 'gain'"):
        judged(fixture, "gains", x=1)
    for value in (float("nan"), [], [1.0, float("inf")]):
        with pytest.raises(ConfigError, match="x of t must be finite, got"):
            judged(fixture, "cost", x=value)
