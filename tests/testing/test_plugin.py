"""What the pytest plugin does to test classes: known failures by name, and nothing that slows other people's runs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from nanofw.component import KINDS
from nanofw.scaffold import STARTERS
from nanofw.testing.session import SUITES

pytest_plugins = ["pytester"]

CLASS = """
import pytest

class TestIt:
    xfail = {table}

    @pytest.mark.parametrize("case", ["fp16-d80", "fp16-d256-b1", "fp16-d256-b16", "fp32-d256-b1"])
    def test_decode(self, case):
        assert "fp16-d256" not in case

    def test_other(self):
        pass
"""
SUITE = """
from hypothesis import strategies as st
from nanofw.testing.suite import Suite, cases, drawn

class Numbers(Suite):
    @drawn(lambda suite: st.integers(suite.backend, suite.backend + 9))
    def test_drawn(self, case):
        assert self.backend <= case <= self.backend + 9

    @cases(lambda suite: range(suite.backend))
    def test_cases(self, case):
        assert case < self.backend

class TestOne(Numbers):
    backend = 2

class TestOther(Numbers):
    backend = 3

class TestThin(Numbers):
    backend, thin = 5, 2
"""


@pytest.fixture
def run(pytester: pytest.Pytester) -> Any:
    """Run pytest on a test file of these contents."""

    def call(text: str, *args: str) -> pytest.RunResult:
        pytester.makepyfile(text)
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-rA", *args)

    return call


def test_a_run_of_pytest_does_not_wait_for_torch() -> None:
    heavy = "{'torch', 'numpy', 'transformers', 'triton', 'hypothesis'}"
    code = f"import sys, nanofw.testing.plugin; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_without_a_table_what_fails_fails(run: Any) -> None:
    run(CLASS.format(table="{}")).assert_outcomes(passed=3, failed=2)


def test_known_failures_are_expected_with_their_reason(run: Any) -> None:
    result = run(CLASS.format(table="{'test_decode[fp16-d256-*]': 'no room for it'}"))
    result.assert_outcomes(passed=3, xfailed=2)
    result.stdout.fnmatch_lines(["XFAIL *test_decode?fp16-d256-b16? - no room for it"])


def test_a_known_failure_that_passes_fails(run: Any) -> None:
    result = run(CLASS.format(table="{'test_decode[fp16-*]': 'why'}"))
    result.assert_outcomes(passed=2, xfailed=2, failed=1)
    result.stdout.fnmatch_lines(["*XPASS(strict)*why*"])


@pytest.mark.parametrize(
    "glob", ["test_decode[fp64-*]", "test_decode[fp16-d25]", "test_deco", "test_decode[fp16-d256-b?"]
)
def test_an_entry_that_matches_nothing_fails(run: Any, glob: str) -> None:
    """The whole name has to fit, and brackets are meant as they are."""
    result = run(CLASS.format(table=f"{{'test_decode[fp16-d256-*]': 'why', {glob!r}: 'stale'}}"))
    result.assert_outcomes(passed=3, xfailed=2, failed=1)
    result.stdout.fnmatch_lines([f"*{glob.replace('[', '?').replace('*', '?')}* matches no test of TestIt*"])


@pytest.mark.parametrize("kind", KINDS)
def test_every_suite_knows_the_table(run: Any, kind: Any) -> None:
    text = f"""
        from nanofw.testing import {SUITES[kind]}
        from nanofw.plugins import PluginHost

        class TestIt({SUITES[kind]}):
            backend = PluginHost.load().get({kind!r}, {STARTERS[kind].plain!r}).load()
            xfail = {{"test_no_such_check": "stale", "test_count_laws[[]*": "brackets are no set"}}
    """
    result = run(text, "-k", "xfail")
    result.stdout.fnmatch_lines(["*xfail?test_no_such_check? matches no test of TestIt*"])
    result.assert_outcomes(failed=2, deselected=result.parseoutcomes()["deselected"])


def test_a_class_that_names_no_plugin_says_so(run: Any) -> None:
    result = run("from nanofw.testing.sampler_suite import SamplerSuite\nclass TestIt(SamplerSuite):\n    pass\n")
    result.stdout.fnmatch_lines(["*TestIt does not say what to judge: give it the plugin's class*"])


def test_classes_that_inherit_a_check_draw_and_count_for_themselves(run: Any) -> None:
    """Hypothesis refuses one test that two classes inherit; each has its own, within its own bounds."""
    result = run(SUITE)
    result.assert_outcomes(passed=3 + 2 + 3 + 3)
    result.stdout.fnmatch_lines(["PASSED *TestThin::test_cases?4?"])


def test_checks_can_be_called_without_pytest() -> None:
    names: dict[str, Any] = {}
    exec(SUITE, names)
    found = dict(names["TestOther"].checks())
    assert list(found) == ["test_cases[0]", "test_cases[1]", "test_cases[2]", "test_drawn"]
    for check in found.values():
        check()
    names["TestOther"].backend = 2
    with pytest.raises(AssertionError):
        found["test_cases[2]"]()
