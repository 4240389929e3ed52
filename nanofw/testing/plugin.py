"""The pytest plugin of the suites: readable assertions in `nanofw.testing`, and `xfail` tables on test classes.

Loaded by pytest in every run where nanofw is installed, so it imports nothing heavy.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Generator, Mapping
from typing import Any

import pytest

import nanofw.testing

# Only modules that are not imported yet can be rewritten; the package itself is.
pytest.register_assert_rewrite(
    *(f"nanofw.testing.{m.name}" for m in pkgutil.iter_modules(nanofw.testing.__path__) if m.name != "plugin")
)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Mark what a class's `xfail` table names, and add a failing test for each entry that matches nothing.

    The table maps a glob over test ids to a reason. In a glob only `*` and `?` are special, since ids hold brackets.
    """
    report = yield
    if not isinstance(collector, pytest.Class) or report.outcome != "passed":
        return report
    table = getattr(collector.obj, "xfail", None)
    if not isinstance(table, Mapping):
        return report
    for glob, reason in table.items():
        matching = [item for item in report.result if isinstance(item, pytest.Item) and matches(glob, item.name)]
        for item in matching:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
        if not matching:
            report.result.append(StaleXfail.from_parent(collector, name=f"xfail[{glob}]"))
    return report


def matches(glob: str, name: str) -> bool:
    """Whether the whole of `name` fits `glob`."""
    pattern = "".join({"*": ".*", "?": "."}.get(char, re.escape(char)) for char in glob)
    return re.fullmatch(pattern, name) is not None


class StaleXfail(pytest.Item):
    """Fails: an entry of an `xfail` table that names no test hides nothing and should go."""

    def runtest(self) -> None:
        """Fail."""
        pytest.fail(f"{self.name} matches no test of {self.parent.name if self.parent else '?'}", pytrace=False)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Where the report says it is."""
        return self.path, None, self.name
