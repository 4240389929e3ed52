"""What `nanofw explain` shows of one combination: a row a batch size, the largest costs, and the reason in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from nanofw.measure.bottleneck import amount

if TYPE_CHECKING:
    from nanofw.measure.explain import Breakdown


def table(label: str, found: Sequence[Breakdown]) -> Table:
    """Times, counts and bytes of a decode step."""
    result = Table(title=f"\n{label}", title_justify="left", title_style="bold", box=None, header_style="bold")
    on_gpu = found[0].device_ms is not None
    names = ("batch", "step", *(["GPU"] if on_gpu else []), "speed-up", "host", "calls", "python", "kernels", "reads")
    for name in (*names, "bytes", "bandwidth", "floor", "bound by"):
        result.add_column(name, justify="right")
    base = found[0]
    for b in found:
        counts = b.counts
        result.add_row(
            str(b.batch),
            f"{b.wall_ms:,.3g} ms",
            *([f"{b.device_ms:,.3g} ms"] if b.device_ms is not None else []),
            f"{b.batch / base.batch * base.wall_ms / b.wall_ms:.1f}x",
            f"{b.host_share:.0%}",
            f"{counts.aten_calls:,}",
            f"{counts.python_calls:,}",
            f"{counts.launches:,}",
            f"{counts.host_reads:,}",
            amount(b.bytes),
            f"{b.bandwidth_share:.1%}",
            f"{b.floor_ms:.3g} ms",
            b.bound,
        )
    return result


def costs(found: Breakdown) -> Table:
    """The largest costs at one batch size."""
    result = Table(title=f"largest costs at batch {found.batch}", title_justify="left", box=None, header_style="bold")
    result.add_column("operation")
    for name in ("share", "time a step", "calls a step"):
        result.add_column(name, justify="right")
    for cost in found.costs:
        result.add_row(cost.name[:60], f"{cost.share:.0%}", f"{cost.ms:,.3g} ms", f"{cost.calls:,.0f}")
    return result


def growth(found: Breakdown) -> list[str]:
    """With what the counts grow, a line each; those that are flat at nothing are left out."""
    return [f"{counter} = {fit}" for counter, fit in found.growth.items() if fit != "0"]


def sentences(found: Sequence[Breakdown]) -> list[str]:
    """Why, once for each run of batch sizes with the same bottleneck: at the largest of them."""
    told: list[str] = []
    start = 0
    for i, b in enumerate(found):
        if i + 1 < len(found) and found[i + 1].bottleneck == b.bottleneck:
            continue
        sizes = f"{found[start].batch} to {b.batch}" if start < i else f"{b.batch}"
        at = f" (here at {b.batch})" if start < i else ""
        told.append(f"batch {sizes}{at}: {b.sentence}")
        start = i + 1
    return told
