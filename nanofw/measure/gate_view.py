"""What the gate prints: the columns that pytest-benchmark's table has no room for, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from nanofw.measure.baseline import Verdict

COLUMNS: Mapping[str, tuple[str, str]] = {
    "speedup": ("speed-up", "{:.2f}x"),
    "exponent": ("exponent", "{:.2f}"),
    "tok_s": ("tok/s", "{:,.0f}"),
    "bandwidth_share": ("bandwidth", "{:.1%}"),
}
"""Keys of `extra_info` that have a column: its title, and how a value is shown."""


def show(terminal: pytest.TerminalReporter, run: Mapping[str, Any], verdict: Verdict, exit_code: int) -> None:
    """Print both. What is wrong comes last, right above pytest's own counts."""
    if rows := table(run):
        terminal.section("benchmarks, own columns")
        for row in rows:
            terminal.write_line(row)
    terminal.section("gate")
    terminal.write_line(verdict.basis)
    for note in verdict.notes:
        terminal.write_line(note)
    for failure in verdict.failures:
        terminal.write_line(f"WORSE {failure}", red=True)
    terminal.write_line(closing(verdict, run["nanofw"]["part"], exit_code), bold=True)


def closing(verdict: Verdict, part: str | None, exit_code: int) -> str:
    """The verdict in a line. `part` says why the run is not of the whole set, if it is not."""
    if verdict.status == "failed":
        return (
            f"gate failed: {len(verdict.failures)} findings in {verdict.compared} compared benchmarks (exit code "
            f"{exit_code} if all tests passed). A change that is meant: docs/how-to/benchmarks.md, Accept"
        )
    if verdict.status == "passed":
        return f"gate passed: {verdict.compared} benchmarks compared"
    if verdict.status == "no baseline":
        how = f"a run of the whole set ({part})" if part else "this run, by nanofw bench accept"
        return f"gate: no baseline yet. What can become one: {how}"
    return "gate: not judged"


def table(run: Mapping[str, Any]) -> list[str]:
    """Lines of the table of own columns, or none if no benchmark has any."""
    shown = [bench for bench in run["benchmarks"] if COLUMNS.keys() & bench["extra_info"].keys()]
    if not shown:
        return []
    lines = [("", "median", *(title for title, _ in COLUMNS.values()))]
    for bench in shown:
        info = bench["extra_info"]
        values = (form.format(info[key]) if key in info else "" for key, (_, form) in COLUMNS.items())
        lines.append((bench["name"], f"{bench['stats']['median'] * 1e3:,.3f} ms", *values))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return [
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    ]
