"""What `nanofw report` prints: the tables of one run, or two runs side by side."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from nanofw.cli import bench_view
from nanofw.measure.records import Point
from nanofw.report.compare import compare, how, interval, verdict
from nanofw.report.page import machine_line
from nanofw.report.read import Record, by_label


def one(record: Record) -> Iterator[str | Table]:
    """A table for each combination, and the sentences."""
    points = {label: [Point.read(p) for p in found] for label, found in by_label(record).items()}
    if record["points"]:
        yield f"{record['points'][0]['model']} on {machine_line(record)}"
    for label, found in points.items():
        yield bench_view.table(label, found)
    yield "\n" + "; ".join(bench_view.sentence(label, found) for label, found in points.items() if found) + "."


def two(first: Record, second: Record, names: tuple[str, str]) -> Iterator[str | Table]:
    """What differs, the ratios, what only one of them has, and the verdict."""
    found = compare(first, second)
    if found.differs:
        table = Table(title="what differs", title_justify="left", title_style="bold", box=None, header_style="bold")
        for name in ("", *names):
            table.add_column(name)
        for row in found.differs:
            table.add_row(*row)
        yield table
    if found.ratios:
        table = Table(title="\nratios", title_justify="left", title_style="bold", box=None, header_style="bold")
        table.add_column("combination")
        for name in ("batch", "figure", *names, "ratio", "interval", ""):
            table.add_column(name, justify="right")
        for r in found.ratios:
            style = {"faster": "green", "slower": "red", "": "dim"}[r.verdict]
            figures = (f"{r.before:,.0f} tok/s", f"{r.now:,.0f} tok/s", f"{r.ratio:.3f}x", interval(r))
            table.add_row(r.label, str(r.batch), r.figure, *figures, r.verdict, style=style)
        yield table
        yield how(found)
    yield from found.missing
    yield from (f"note: {doubt}" for doubt in found.doubts)
    yield verdict(found)
