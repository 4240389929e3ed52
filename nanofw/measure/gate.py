"""The gate: a pytest plugin that compares a run of benchmarks with its committed baseline.

In the `conftest.py` of a folder of benchmarks, ours or yours, whose baselines are in its subfolder `baselines`:

    from nanofw.measure import gate

    def pytest_configure(config):
        gate.enable(config, Path(__file__).parent)

What it has of its own, because pytest-benchmark's comparison cannot do it: it fails when a benchmark was removed or
renamed, knows on which machines times mean anything, has limits for each benchmark, fails after the terminal summary
with an exit code of its own (`EXIT_CODE`), and marks a saved run with its verdict, so that a regression cannot become
the next baseline (`nanofw bench accept`).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from nanofw.measure import baseline, gate_view, replay
from nanofw.measure.baseline import Verdict
from nanofw.measure.contention import Contention
from nanofw.measure.machine import describe

EXIT_CODE = 10
"""All tests passed, and the gate failed. pytest itself uses 0 to 5."""
NAME = "nanofw-gate"
LAST_RUN = Path(".benchmarks", "last-run.json")
"""Where each run is kept with its verdict, from pytest's root folder on. pytest-benchmark's own files are numbered."""


def enable(config: pytest.Config, folder: Path) -> Gate | None:
    """Judge the benchmarks below `folder` against `folder/baselines`, and provide the fixture `replay`.

    Returns:
        The gate; None in a worker of xdist, which measures nothing.

    Raises:
        pytest.UsageError: another folder is judged in this session already.
    """
    if hasattr(config, "workerinput"):
        return None
    if other := config.pluginmanager.get_plugin(NAME):
        raise pytest.UsageError(f"one gate a session: {other.folder} is judged already; run {folder} by itself")
    config.addinivalue_line("markers", "gate(time=..., FIGURE=...): limits of this benchmark; None: not judged.")
    if not config.pluginmanager.has_plugin(replay.__name__):
        config.pluginmanager.register(replay, replay.__name__)
    gate = Gate(config, folder.resolve())
    config.pluginmanager.register(gate, NAME)
    return gate


class Gate:
    """Collects what it takes to judge, judges once all benchmarks ran, and reports.

    Attributes:
        folder: of the benchmarks.
        reduced: why this run measures something else than the baseline does ("--quick"): then nothing is judged.
    """

    def __init__(self, config: pytest.Config, folder: Path) -> None:
        self.folder = folder
        self.reduced: str | None = None
        self._config = config
        self._keys: dict[str, str] = {}
        self._limits: dict[str, dict[str, float | None]] = {}
        self._contention = Contention()
        self._waited: float | None = None
        self._left_out = self._tests = self._finished = 0
        self._session: pytest.Session | None = None
        self._run: dict[str, Any] | None = None
        self._verdict: Verdict | None = None

    @property
    def _benchmarks(self) -> Any:
        """pytest-benchmark's session, or None without that plugin."""
        return self._config.pluginmanager.get_plugin("pytest-benchmark")

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Count what -k and its kin leave out."""
        self._left_out += sum(self._is_ours(item) for item in items)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note which benchmarks there are."""
        self._session, self._tests, self._contention = session, len(session.items), Contention()
        for item in filter(self._is_ours, session.items):
            _, separator, test = item.nodeid.partition("::")
            self._keys[item.nodeid] = f"{item.path.relative_to(self.folder).as_posix()}{separator}{test}"
            self._limits[item.nodeid] = _limits(item)

    def pytest_runtest_logfinish(self) -> None:
        """Count the tests that ran."""
        self._finished += 1

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_machine_info(self, machine_info: dict[str, Any]) -> None:
        """Describe the machine. Called once or twice a session, and says the same each time.

        What differs from run to run on one machine goes: pytest-benchmark warns where two descriptions differ.
        """
        machine_info.pop("node", None)
        for volatile in ("hz_actual", "hz_actual_friendly", "flags"):
            machine_info.get("cpu", {}).pop(volatile, None)
        machine_info["nanofw"] = describe()

    @pytest.hookimpl(wrapper=True, optionalhook=True)
    def pytest_benchmark_compare_machine_info(
        self, benchmarksession: Any, machine_info: dict[str, Any], compared_benchmark: dict[str, Any]
    ) -> Generator[None, Any, Any]:
        """Say in a line what differs about the machine of the compared run, instead of all that is known of both.

        pytest-benchmark's own warning ends the session where warnings are errors, or where its storage is outside the
        working directory.
        """
        there = compared_benchmark["machine_info"].get("nanofw")
        other = baseline.differences(machine_info["nanofw"], there) if there else ["a run without the gate"]
        if other:
            benchmarksession.logger.info(f"Compared with another machine: {'; '.join(other)}", newline=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return (yield)
            except ValueError:  # the warning names its storage relative to the working directory
                return None

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_json(self, output_json: dict[str, Any]) -> None:
        """Add keys, limits and the verdict to what is about to be saved. Called once for each file."""
        for bench in output_json["benchmarks"]:
            if bench["fullname"] in self._keys:
                bench["key"], bench["limits"] = self._keys[bench["fullname"]], self._limits[bench["fullname"]]
        if self._verdict is None:
            self._waited = self._contention.waited
            self._verdict = self._judge(output_json)
        output_json["nanofw"] = {
            "status": self._verdict.status,
            "basis": self._verdict.basis,
            "failures": list(self._verdict.failures),
            "part": self._part(),
            "waited": self._waited,
        }

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Judge, keep the run, and set the exit code. pytest-benchmark has finished when this is called."""
        bench, config = self._benchmarks, self._config
        if bench is None or self._session is None or config.option.collectonly:
            return
        commit = config.hook.pytest_benchmark_generate_commit_info(config=config)
        config.hook.pytest_benchmark_update_commit_info(config=config, commit_info=commit)
        self._run = config.hook.pytest_benchmark_generate_json(
            config=config,
            benchmarks=bench.benchmarks,
            include_data=False,
            machine_info=bench.get_machine_info(),
            commit_info=commit,
        )
        config.hook.pytest_benchmark_update_json(config=config, benchmarks=bench.benchmarks, output_json=self._run)
        if self._verdict is not None and self._verdict.status != "not judged":
            file = config.rootpath / LAST_RUN
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(self._run), encoding="utf-8")
        if self._verdict is not None and self._verdict.status == "failed" and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = EXIT_CODE

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Our columns and the verdict, after pytest-benchmark's tables; pytest's counts follow."""
        if self._verdict is None or self._run is None:
            return
        gate_view.show(terminalreporter, self._run, self._verdict, EXIT_CODE)

    def _judge(self, run: dict[str, Any]) -> Verdict:
        if reason := self._unjudged():
            return Verdict("not judged", f"{reason}: nothing is compared")
        measured = {bench["fullname"] for bench in run["benchmarks"]}
        unmeasured = {key for nodeid, key in self._keys.items() if nodeid not in measured}
        choice = baseline.choose(self.folder / "baselines", run["machine_info"]["nanofw"], self._waited)
        verdict = baseline.judge(run, choice, unmeasured, self._part())
        if (file := self._compared()) is not None:
            here = run["machine_info"]["nanofw"]
            choice = baseline.against(file, baseline.read(file), here, self._waited, f"--benchmark-compare {file.name}")
            verdict = _both(verdict, baseline.judge(run, choice, unmeasured, self._part()))
        if self._session is not None and self._session.testsfailed:
            failures = [f"{self._session.testsfailed} tests failed", *verdict.failures]
            return Verdict("failed", verdict.basis, failures, verdict.notes, verdict.compared)
        return verdict

    def _compared(self) -> Path | None:
        """The run that --benchmark-compare names by its file, if it was made under a gate."""
        named = self._config.getoption("benchmark_compare")
        file = Path(self._config.invocation_params.dir, named) if isinstance(named, str) else None
        if file is None or not file.is_file() or '"nanofw"' not in file.read_text(encoding="utf-8"):
            return None
        return file

    def _unjudged(self) -> str | None:
        bench = self._benchmarks
        if self.reduced:
            return f"{self.reduced} measures less than the baseline does"
        if bench.disabled or bench.skip:
            return "benchmarks are off (--benchmark-disable, --benchmark-skip, or xdist, which disables them)"
        return None

    def _part(self) -> str | None:
        """Why this run is only a part of the set, or None if it is all of it."""
        paths = [Path(self._config.invocation_params.dir, arg).resolve() for arg in self._config.args]
        if not any(path == self.folder or path in self.folder.parents for path in paths):
            return f"not the whole folder {self.folder.name} was named"
        if self._left_out:
            return f"{self._left_out} were deselected"
        for option in ("ignore", "ignore_glob", "lf"):  # these leave out files before anything in them is collected
            if self._config.getoption(option, None):
                return f"--{option.replace('_', '-')}"
        if self._finished < self._tests:
            return f"stopped after {self._finished} of {self._tests} tests"
        return None

    def _is_ours(self, item: pytest.Item) -> bool:
        return "benchmark" in getattr(item, "fixturenames", ()) and item.path.is_relative_to(self.folder)


def _both(committed: Verdict, named: Verdict) -> Verdict:
    """What both comparisons say. Only the committed baseline can let a run pass; either can fail it."""
    return Verdict(
        "failed" if named.status == "failed" else committed.status,
        f"{committed.basis}\n{named.basis}",
        list(dict.fromkeys((*committed.failures, *named.failures))),
        list(dict.fromkeys((*committed.notes, *named.notes))),
        max(committed.compared, named.compared),
    )


def _limits(item: pytest.Item) -> dict[str, float | None]:
    """The limits of a test's `gate` markers, the nearest one first."""
    limits: dict[str, float | None] = {}
    for marker in _far_to_near(item.iter_markers("gate")):
        if marker.args:
            raise pytest.UsageError(f"{item.nodeid}: gate takes limits by name, such as gate(time=0.5)")
        limits.update(marker.kwargs)
    for name, limit in limits.items():
        if limit is not None and not (isinstance(limit, (int, float)) and limit >= 0):
            raise pytest.UsageError(
                f"{item.nodeid}: the limit {name} must be a number from 0 up, or None; got {limit!r}"
            )
    return limits


def _far_to_near(markers: Iterable[pytest.Mark]) -> Iterable[pytest.Mark]:
    return reversed(list(markers))
