"""A suite run on one plugin inside this process, by pytest itself, with nothing written and nothing printed.

pytest collects files; here it gets one that holds nothing (`py.typed`), and a collector that puts a test class there.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pytest

import nanofw.testing
from nanofw.component import Component, Kind

SUITES: dict[Kind, str] = {
    "attention": "AttentionSuite",
    "kv_cache": "KVCacheSuite",
    "scheduler": "SchedulerSuite",
    "runner": "RunnerSuite",
    "model": "ModelSuite",
    "sampler": "SamplerSuite",
}
"""By kind, the suite in `nanofw.testing` that judges it."""

DECLARED: dict[Kind, tuple[str, ...]] = {
    "kv_cache": ("shares_prefixes", "max_blocks"),
    "scheduler": ("mixes", "preempts"),
}
"""By kind, class attributes of a plugin that its suite has to know, under the same names."""

JUDGED_APART = "test_count_laws"
"""The check of a suite that is no part of being right: `nanofw.testing.laws` gives its verdicts in words."""

_ANCHOR = Path(nanofw.__file__).with_name("py.typed")
_PLUGINS = ("nanofw.testing.plugin", "_hypothesis_pytestplugin")


@dataclass(frozen=True, slots=True)
class Failure:
    """A check that failed.

    Attributes:
        check: its test id.
        message: what it said.
        where: the plugin's own line if the fault was raised in or below it, else the check's.
        purpose: what it is for.
    """

    check: str
    message: str
    where: str
    purpose: str


@dataclass(slots=True)
class Outcome:
    """What a suite found.

    Attributes:
        passed: how many checks did.
        failures: those that did not, in the order of the run.
        skipped: how many were, by reason.
    """

    passed: int = 0
    failures: list[Failure] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)


def run_suite(
    kind: Kind,
    backend: type[Component],
    options: Mapping[str, Any],
    watch: Callable[[int, int], None] = lambda done, of: None,
) -> Outcome:
    """Run all checks of a kind's suite on a class, but those of its cost.

    Args:
        kind, backend, options: the plugin, and its options as a user would set them.
        watch: told after each check how many are done, of how many.

    Raises:
        RuntimeError: pytest could not run, or found no check; says what it said.
    """
    plugin = _Session(kind, backend, options, watch)
    with _pytest_left_alone():
        # No configuration, cache or terminal: what pytest does in the folder at hand is none of our business.
        arguments = ["-c", os.devnull, f"--rootdir={_ANCHOR.parent}", "-p", "no:cacheprovider", "-p", "no:terminal"]
        arguments += [f"-p{name}" for name in _PLUGINS]
        status = pytest.main([*arguments, "-Wignore", "--hypothesis-seed=0", str(_ANCHOR)], plugins=[plugin])
    if plugin.broken or status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"the suite of {backend.__name__} could not run: {plugin.broken or status}")
    return plugin.outcome


class _Session:
    """The pytest plugin of one run."""

    def __init__(
        self, kind: Kind, backend: type[Component], options: Mapping[str, Any], watch: Callable[[int, int], None]
    ) -> None:
        self._kind, self._backend, self._options, self._watch = kind, backend, options, watch
        self._purposes: dict[str, str] = {}
        self._done = 0
        self.outcome, self.broken = Outcome(), ""

    def pytest_collect_file(self, file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        """Put the test class where there is an empty file."""
        if file_path != _ANCHOR:
            return None
        module = _InMemory.from_parent(parent, path=file_path)
        suite = getattr(nanofw.testing, SUITES[self._kind])  # imported here: pytest rewrites its assertions
        said = {name: getattr(self._backend, name) for name in DECLARED.get(self._kind, ())}
        attributes = {"backend": self._backend, "options": dict(self._options)}
        attributes |= {name: value for name, value in said.items() if value is not None}
        module.given = type(f"Test{self._backend.__name__}", (suite,), attributes)
        return module

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out what is judged apart, put the plainest checks first, and remember what each is for.

        pytest begins with the class that is inherited last; a suite names first what the others build on.
        """
        items[:] = [item for item in items if not item.name.startswith(JUDGED_APART)]
        items.sort(key=_group)
        for item in items:
            doc = getattr(item.obj, "__doc__", None) if isinstance(item, pytest.Function) else None
            self._purposes[item.nodeid] = " ".join((doc or "").partition("\n\n")[0].split())

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A suite that cannot be collected."""
        if report.failed:
            self.broken = str(report.longrepr)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count, and keep what failed."""
        name = report.nodeid.rpartition("::")[2]
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.outcome.skipped[reason.removeprefix("Skipped: ")] += 1
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash else str(report.longrepr)
            where = _where(report, self._backend)
            self.outcome.failures.append(Failure(name, message, where, self._purposes.get(report.nodeid, "")))
        elif report.when == "call":
            self.outcome.passed += 1
        if report.when == "teardown":
            self._done += 1
            self._watch(self._done, len(self._purposes))


def _group(item: pytest.Item) -> int:
    """Which of the suite's classes a check is of, in the order in which the suite names them."""
    cls = getattr(item, "cls", None)
    suite = cls.__mro__[1:] if cls else ()  # the class of this run has copies of checks that draw their cases
    name = getattr(item, "originalname", item.name)
    return next((i for i, base in enumerate(suite) if name in vars(base)), len(suite))


def _where(report: pytest.TestReport, backend: type[Component]) -> str:
    """Where to look for a failure."""
    entries = getattr(getattr(report.longrepr, "reprtraceback", None), "reprentries", ())
    places = [entry.reprfileloc for entry in entries if getattr(entry, "reprfileloc", None)]
    own = Path(getattr(sys.modules.get(backend.__module__), "__file__", None) or os.devnull).resolve()
    mine = [place for place in places if Path(place.path).resolve() == own]
    found = next(iter(mine[-1:] or places[:1]), None)
    return f"{found.path}:{found.lineno}" if found else ""


class _InMemory(pytest.Module):
    """A module that holds one class and was never a file."""

    given: type[Any]

    def _getobj(self) -> ModuleType:
        module = ModuleType("nanofw_check")
        setattr(module, self.given.__name__, self.given)
        return module


@contextmanager
def _pytest_left_alone() -> Iterator[None]:
    """Nothing that the environment says to pytest, and no plugin beside ours: they print, time, and run in parallel.

    What Hypothesis remembers of a run is gone with it.
    """
    with TemporaryDirectory() as memory:
        ours = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTEST_PLUGINS": ""}
        ours["HYPOTHESIS_STORAGE_DIRECTORY"] = memory
        with _environment(ours):
            yield


@contextmanager
def _environment(ours: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
