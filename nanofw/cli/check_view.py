"""How a verdict on a plugin looks: one page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from nanofw.testing.verdict import Ruling, Verdict

SHOWN = 5
"""Failed checks, and reasons of skipped ones, that are shown."""


@contextmanager
def progress(plugin: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr while the suite runs, gone afterwards; none where nobody looks on (no terminal, or `quiet`)."""
    columns = (TextColumn(f"checking {plugin}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def show(console: Console, verdict: Verdict) -> None:
    """Print it."""
    console.print(f"{verdict.plugin}: {verdict.kind}, {verdict.cls}", style="bold", soft_wrap=True)
    page = Table.grid(padding=(0, 2))
    page.add_column(style="bold", no_wrap=True)
    page.add_column()
    rows = (
        ("right?", _right(verdict)),
        ("laws?", _laws(verdict.laws, "not judged" if verdict.notes else "no count law is declared")),
        ("scaling?", _laws(verdict.scaling, _why_not_timed(verdict))),
        ("", [Text(note, style="yellow") for note in verdict.notes]),
        ("what next", [Text(verdict.next_step)]),
    )
    for title, lines in rows:
        for number, line in enumerate(lines):
            page.add_row("" if number else title, line)
    console.print(page)


def _right(verdict: Verdict) -> Iterator[Text]:
    failed, skipped = len(verdict.failures), sum(verdict.skipped.values())
    counts = f"{verdict.passed} checks passed, {failed} failed, {skipped} skipped"
    yield Text.assemble(("yes" if verdict.right else "no", "green" if verdict.right else "red"), f": {counts}")
    cases = Counter(failure.check.partition("[")[0] for failure in verdict.failures)
    for name in list(cases)[:SHOWN]:
        first = next(failure for failure in verdict.failures if failure.check.partition("[")[0] == name)
        others = cases[name] - 1
        more = f" and {others} more case{'s' if others > 1 else ''}" if others else ""
        yield Text(f"{first.check}{more}", style="red")
        yield Text(f"  {_first_line(first.message)}")
        yield Text(f"  {first.where}", style="dim")
    if len(cases) > SHOWN:
        yield Text(f"and {len(cases) - SHOWN} other checks: {', '.join(list(cases)[SHOWN:])}", style="red")
    for reason, count in list(verdict.skipped.items())[:SHOWN]:
        yield Text(f"{count} skipped: {_first_line(reason)}", style="dim")
    if len(verdict.skipped) > SHOWN:
        yield Text(f"and {len(verdict.skipped) - SHOWN} other reasons to skip", style="dim")


def _laws(rulings: Sequence[Ruling], none: str) -> Iterator[Text]:
    if not rulings:
        yield Text(none, style="dim")
    for ruling in rulings:
        yield Text.assemble(
            ("holds  " if ruling.holds else "broken ", "green" if ruling.holds else "red"), ruling.found
        )


def _why_not_timed(verdict: Verdict) -> str:
    if not verdict.right:
        return "not timed: a wrong plugin is fast for free"
    return "not judged" if verdict.notes else "no scaling law is declared"


def _first_line(message: str) -> str:
    return message.removeprefix("AssertionError: ").partition("\n")[0]
