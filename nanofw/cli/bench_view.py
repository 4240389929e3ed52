"""What `nanofw bench` shows: a live line while it measures, then a table and a sentence for each combination."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

if TYPE_CHECKING:
    from nanofw.measure.records import Point
    from nanofw.measure.sweep import Progress


@contextmanager
def live(quiet: bool, rounds: int) -> Iterator[Callable[[Progress], None] | None]:
    """A function to be told of progress, which draws it; None where nobody looks on (no terminal, or `quiet`).

    It draws only when told, between runs and inside long ones: a thread that redraws would disturb what is measured.
    """
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (BarColumn(bar_width=24), TextColumn("{task.description}"), TimeRemainingColumn())
    with Bar(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task("")

        def watch(progress: Progress) -> None:
            where = f"round {progress.round}/{rounds}" if progress.round else "warm-up"
            text = f"{where}  {progress.engine}  batch {progress.batch}"
            if progress.prefill_tok_s is not None:
                text += f"  prefill {progress.prefill_tok_s:,.0f} tok/s"
            if progress.decode_tok_s is not None:
                text += f"  decode {progress.decode_tok_s:,.0f} tok/s"
            bar.update(task, description=text, completed=progress.done, total=progress.total)
            bar.refresh()

        yield watch


def table(label: str, points: Sequence[Point]) -> Table:
    """One combination: a row a batch size, medians over the rounds."""
    result = Table(title=f"\n{label}", title_justify="left", title_style="bold", box=None, header_style="bold")
    for name in ("batch", "total", "throughput", "tokens", "speed-up", "decode", "per step", "prefill"):
        result.add_column(name, justify="right")
    for p in points:
        result.add_row(
            str(p.batch),
            f"{p.total_s.median:,.2f} s",
            f"{_number(p.tok_s.median)} tok/s",
            f"{p.tokens:,}",
            f"{p.speedup.median:.1f}x",
            f"{_number(p.decode_tok_s.median)} tok/s",
            f"{p.decode_ms.median:,.2f} ms",
            f"{_number(p.prefill_tok_s.median)} tok/s",
        )
    return result


def sentence(label: str, points: Sequence[Point]) -> str:
    """The result in words: how much more the largest batch gives than the smallest."""
    first, last = points[0], points[-1]
    if first is last:
        return f"{label}: batch {first.batch} gives {_number(first.tok_s.median)} tok/s"
    return f"{label}: batch {last.batch} gives {last.speedup.median:.1f}x the throughput of batch {first.batch}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
