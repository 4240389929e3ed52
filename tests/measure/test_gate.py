"""The gate and the replay inside real runs of pytest and pytest-benchmark. Times are made up, nothing is measured."""

from __future__ import annotations

import gc
import json
import re

import pytest

from nanofw.errors import ConfigError
from nanofw.measure.accept import accept
from nanofw.measure.gate import EXIT_CODE

pytest_plugins = ["pytester"]

CONFTEST = """
from pathlib import Path
from nanofw.measure import gate

def pytest_configure(config):
    gate.enable(config, Path(__file__).parent)
"""
BENCHMARKS = """
import pytest
from nanofw.measure.judged import judged

@pytest.mark.parametrize("batch", [1, 16])
def test_decode(replay, batch):
    replay([0.1 * {factor}, 0.2 * {factor}, 0.30000000000000004 * {factor}], tok_s=batch * 1000.0)
    judged(replay.benchmark, "gain", speedup=batch / 4 * {gain})

@pytest.mark.gate(time=5.0)
def test_{name}(replay):
    replay([0.5 * {factor}] * 3)
"""
COUNTS = re.compile(r"^=+ (\d+ (passed|failed|skipped|deselected)(, )?)+ in [\d.]+s =+$")


@pytest.fixture
def project(pytester, monkeypatch):
    """A project with a folder of benchmarks; call it to change them."""
    monkeypatch.setattr("nanofw.measure.contention._SCHEDULED", pytester.path / "unknown")  # however busy it is now
    monkeypatch.setattr("pytest_benchmark.plugin.get_cpu_info", lambda: {"count": 1})  # asking takes seconds
    pytester.makepyprojecttoml('[tool.pytest.ini_options]\nfilterwarnings = ["error"]\naddopts = "-p no:cacheprovider"')
    folder = pytester.mkdir("benchmarks")
    (folder / "conftest.py").write_text(CONFTEST)

    def write(factor=1, gain=1, name="prefill"):
        (folder / "test_it.py").write_text(BENCHMARKS.format(factor=factor, gain=gain, name=name))

    write()
    gc.freeze()  # each run of pytest collects garbage, and need not look through all that is imported here
    yield write
    gc.unfreeze()


@pytest.fixture
def run(pytester, project):
    """Run pytest there; the counts line must come last, whatever happens."""

    def call(*args, named="benchmarks"):
        result = pytester.runpytest_inprocess(named, *args)
        assert COUNTS.match(result.outlines[-1]), result.outlines[-5:]
        return result

    return call


@pytest.fixture(scope="module")
def first_run():
    """What a first run keeps: filled by the first test that needs it."""
    return {}


@pytest.fixture
def accepted(pytester, run, first_run):
    """A first run, made the baseline."""
    kept = pytester.path / ".benchmarks/last-run.json"
    if not first_run:
        assert run().ret == 0
        first_run["json"] = kept.read_text()
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(first_run["json"])
    return accept(kept, pytester.path / "benchmarks/baselines")


def test_without_a_baseline(run, pytester):
    result = run()
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "*benchmarks, own columns*",
            "*median *speed-up *exponent *tok/s *bandwidth*",
            "test_decode?1?*200.000 ms *0.25x * 1,000*",
            "*gate*",
            "no baseline for a * in benchmarks/baselines: nothing is compared",
            "gate: no baseline yet. What can become one: this run, by nanofw bench accept",
            "*3 passed in *",
        ]
    )
    assert json.loads((pytester.path / ".benchmarks/last-run.json").read_text())["nanofw"]["status"] == "no baseline"


def test_the_same_again_passes(run, accepted):
    result = run()
    assert result.ret == 0
    result.stdout.fnmatch_lines(["baseline *, same machine: *", "gate passed: 3 benchmarks compared"])


def test_slower_fails_with_a_code_of_its_own_and_cannot_be_accepted(run, project, pytester, accepted):
    project(factor=1.5)
    result = run()
    assert result.ret == EXIT_CODE
    result.stdout.fnmatch_lines(
        [
            "WORSE test_it.py::test_decode?1?: time 300 ms, baseline 200 ms: worse by 50%, the limit is 20%",
            "WORSE test_it.py::test_decode?16?: *",
            "gate failed: 2 findings in 3 compared benchmarks*",
        ]
    )
    with pytest.raises(ConfigError, match="failed the gate"):
        accept(pytester.path / ".benchmarks/last-run.json", accepted.parent)
    assert run().ret == EXIT_CODE  # a run that regressed did not become what the next is compared with


def test_on_another_machine_only_ratios_count(run, project, accepted):
    base = json.loads(accepted.read_text())
    base["machine_info"]["nanofw"]["torch"] = "0.0"
    accepted.write_text(json.dumps(base))
    project(factor=100)
    result = run()
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*another machine (torch 0.0, here *): only ratios, exponents and counts, no times"])
    project(factor=0.01, gain=0.5)
    result = run()
    assert result.ret == EXIT_CODE
    result.stdout.fnmatch_lines(["WORSE test_it.py::test_decode?16?: speedup 2, baseline 4: worse by 50%*"])


def test_renamed_fails_in_a_run_of_all_of_them(run, project, accepted):
    project(name="chunked_prefill")
    result = run()
    assert result.ret == EXIT_CODE
    result.stdout.fnmatch_lines(["WORSE test_it.py::test_prefill: removed or renamed*"])


@pytest.mark.parametrize(
    ("args", "named", "why"),
    [
        (("-k", "decode"), "benchmarks", "1 were deselected"),
        (("--ignore=benchmarks/test_more.py",), "benchmarks", "--ignore"),
        ((), "benchmarks/test_it.py", "not the whole folder benchmarks was named"),
        ((), "benchmarks/test_it.py::test_decode", "not the whole folder benchmarks was named"),
    ],
)
def test_a_part_of_them_is_judged_and_said_to_be_a_part(run, project, pytester, accepted, args, named, why):
    base = json.loads(accepted.read_text())
    base["benchmarks"].append(base["benchmarks"][0] | {"key": "test_more.py::test_more"})
    accepted.write_text(json.dumps(base))
    result = run(*args, named=named)
    assert result.ret == 0
    result.stdout.fnmatch_lines([f"only a part of the set was run ({why}):*", "gate passed: *"])
    with pytest.raises(ConfigError, match="a part of the set"):
        accept(pytester.path / ".benchmarks/last-run.json", accepted.parent)
    project(factor=2)
    assert run(*args, named=named).ret == EXIT_CODE


def test_the_last_failures_are_a_part(run, pytester, accepted):
    pytester.makepyprojecttoml("[tool.pytest.ini_options]\n")  # with pytest's cache
    (pytester.path / "benchmarks/test_bad.py").write_text("def test_bad(replay):\n    replay([1])\n    assert False\n")
    run()
    result = run("--lf")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["only a part of the set was run (--lf):*", "WORSE 1 tests failed"])
    result.stdout.no_fnmatch_line("*removed or renamed;*")


def test_another_rootdir_renames_nothing(run, pytester, accepted):
    for rootdir in ("benchmarks", pytester.mkdir("elsewhere")):
        result = run(f"--rootdir={rootdir}")
        result.stdout.fnmatch_lines(["gate passed: 3 benchmarks compared"])


def test_a_failing_test_keeps_its_code_and_fails_the_gate(run, pytester, accepted):
    (pytester.path / "benchmarks/test_bad.py").write_text("def test_bad(replay):\n    replay([1])\n    assert False\n")
    result = run()
    assert result.ret == 1
    result.stdout.fnmatch_lines(["WORSE 1 tests failed"])
    with pytest.raises(ConfigError, match="1 tests failed"):
        accept(pytester.path / ".benchmarks/last-run.json", accepted.parent)


def test_a_skipped_benchmark_is_named(run, pytester, accepted):
    file = pytester.path / "benchmarks/test_it.py"
    file.write_text(file.read_text().replace("@pytest.mark.gate(time=5.0)", "@pytest.mark.skip"))
    result = run()
    assert result.ret == 0
    result.stdout.fnmatch_lines(["in the baseline, not measured here: test_it.py::test_prefill"])


@pytest.mark.parametrize("option", ["--benchmark-disable", "--benchmark-skip"])
def test_benchmarks_that_are_off_are_not_judged(run, accepted, option):
    result = run(option)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["benchmarks are off *: nothing is compared", "gate: not judged"])


def test_a_reduced_run_is_not_judged(run, pytester, accepted):
    enable = "gate.enable(config, Path(__file__).parent)"
    (pytester.path / "benchmarks/conftest.py").write_text(CONFTEST.replace(enable, f'{enable}.reduced = "--quick"'))
    result = run()
    assert result.ret == 0
    result.stdout.fnmatch_lines(["--quick measures less than the baseline does: nothing is compared"])


def test_replayed_samples_are_exact_and_known_to_pytest_benchmark(run, pytester, accepted):
    result = run("--benchmark-json=run.json", "--benchmark-save=x", "--benchmark-save-data")
    assert result.ret == 0
    saved = next(pytester.path.glob(".benchmarks/*/0001_x.json"))
    for file in (pytester.path / "run.json", saved):
        written = json.loads(file.read_text())
        assert written["nanofw"]["status"] == "passed"
        found = {b["name"]: b for b in written["benchmarks"]}
        assert found["test_decode[1]"]["stats"]["data"] == [0.1, 0.2, 0.30000000000000004]
        assert found["test_decode[1]"]["options"]["timer"] == "replay"
        assert found["test_decode[16]"]["extra_info"]["tok_s"] == 16_000
    compared = pytester.run("pytest-benchmark", "compare", "run.json", saved)
    compared.stdout.fnmatch_lines(["test_decode?1? (*run)*100.0000*"])


def test_compare_survives_a_file_of_another_machine(run, project, pytester):
    run("--benchmark-json=run.json")
    other = json.loads((pytester.path / "run.json").read_text())
    other["machine_info"]["nanofw"]["torch"] = "0.0"
    (pytester.path / "other.json").write_text(json.dumps(other))
    project(factor=2)
    for extra in ((), (f"--benchmark-storage={pytester.path.parent / 'storage'}",)):
        result = run("--benchmark-compare=other.json", *extra)
        assert result.ret == 0
        result.stdout.fnmatch_lines(["test_decode?1? (NOW)*200.0000*(2.0*"])
        result.stderr.fnmatch_lines(["Compared with another machine: torch 0.0, here *"])


def test_a_run_named_for_comparison_judges_too(run, project, pytester):
    """What pytest-benchmark shows, the gate judges: slower, gone, and without a baseline of its own."""
    run("--benchmark-json=before.json")
    result = run("--benchmark-compare=before.json")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["no baseline for a *", "--benchmark-compare before.json, same machine: *", "gate: no baseline yet*"]
    )
    project(factor=2, name="chunked_prefill")
    result = run("--benchmark-compare=before.json")
    assert result.ret == EXIT_CODE
    result.stdout.fnmatch_lines(
        [
            "WORSE test_it.py::test_decode?1?: time 400 ms, baseline 200 ms: worse by 100%*",
            "WORSE test_it.py::test_prefill: removed or renamed*",
        ]
    )
    with pytest.raises(ConfigError, match="failed the gate"):
        accept(pytester.path / ".benchmarks/last-run.json", pytester.path / "benchmarks/baselines")


def test_a_run_named_for_comparison_cannot_excuse_the_baseline(run, project, pytester, accepted):
    project(factor=2)
    assert run("--benchmark-json=slow.json").ret == EXIT_CODE
    assert run("--benchmark-compare=slow.json").ret == EXIT_CODE


def test_the_machine_is_described_the_same_each_time(run, pytester):
    run("--benchmark-json=a.json")
    run("--benchmark-json=b.json", "--benchmark-save=x")
    a, b = (json.loads((pytester.path / name).read_text())["machine_info"] for name in ("a.json", "b.json"))
    assert a == b
    assert "node" not in a
    assert a["nanofw"]["torch"]


def test_replay_keeps_the_marker_of_its_test(run, pytester):
    (pytester.path / "benchmarks/test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.benchmark(group='mine')\n"
        "def test_a(replay):\n    replay([0.25])\n"
        "def test_late(benchmark, replay):\n"
        "    with pytest.raises(RuntimeError, match='ask for `replay` alone'):\n        replay([0.5])\n"
        "@pytest.mark.parametrize('samples', [[], [0.0], [float('nan')], [-1.0]])\n"
        "def test_no_times(replay, samples):\n"
        "    with pytest.raises(ValueError, match='samples must be times'):\n        replay(samples)\n"
        "    replay([1.0])\n"
    )
    result = run("--benchmark-json=run.json")
    assert result.ret == 0
    first = json.loads((pytester.path / "run.json").read_text())["benchmarks"][0]
    assert (first["group"], first["stats"]["data"]) == ("mine", [0.25])


@pytest.mark.parametrize(("marker", "words"), [("gate(0.5)", "by name"), ("gate(time='x')", "number from 0 up")])
def test_limits_that_mean_nothing(pytester, project, marker, words):
    (pytester.path / "benchmarks/test_it.py").write_text(
        f"import pytest\n@pytest.mark.{marker}\ndef test_a(replay):\n    replay([0.25])\n"
    )
    result = pytester.runpytest_inprocess("benchmarks")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert words in result.stderr.str()


def test_two_folders_cannot_be_judged_at_once(pytester, project):
    other = pytester.mkdir("others")
    (other / "conftest.py").write_text(CONFTEST)
    result = pytester.runpytest_inprocess("benchmarks", "others")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "one gate a session" in result.stderr.str()
