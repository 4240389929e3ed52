"""Pictures of a scaling experiment: throughput against batch, both axes logarithmic.

On such axes a straight line is a power of the batch: parallel to "ideal" is linear scaling, level is none. The roofline
bends where the contexts weigh as much as the weights.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nanofw.report.read import Record, by_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT = "#1c1c1e", "#8a8a8f"
"""Of text and lines. In a page they follow its colours."""
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Told apart by people who see colours differently too (Okabe and Ito, Color Universal Design, 2008)."""
MARKERS = "osD^vP"


@dataclass(frozen=True, slots=True)
class Curve:
    """Decode throughput of one combination: tokens a second by batch size, with the lowest and highest round."""

    label: str
    batches: Sequence[int]
    median: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def curves(record: Record, name: str = "") -> list[Curve]:
    """Of a record; `name` is put before each label."""
    found = []
    for label, points in by_label(record).items():
        rates = [p["decode_tok_s"] for p in points]
        rounds = [r["rounds"] for r in rates]
        batches, medians = [p["batch"] for p in points], [r["median"] for r in rates]
        found.append(Curve(f"{name}{label}", batches, medians, list(map(min, rounds)), list(map(max, rounds))))
    return found


def scaling(drawn: Sequence[Curve], roofline: Sequence[dict[str, float]] = (), wide: bool = True) -> Figure:
    """The picture.

    Args:
        drawn: curves, in the order of their colours.
        roofline: points with `batch` and `tok_s`, none for none.
        wide: 16 cm, for a paper or a screen; else narrow, for a phone.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure = Figure(figsize=(6.4, 4.2) if wide else (4.0, 4.4), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    batches = sorted({batch for curve in drawn for batch in curve.batches})
    ends: list[tuple[float, str, str]] = []
    if roofline:
        xs, ys = [p["batch"] for p in roofline], [p["tok_s"] for p in roofline]
        axes.plot(xs, ys, color=INK, linewidth=1.2)
        ends.append((ys[-1], "roofline", INK))
    for i, curve in enumerate(drawn):
        color, marker = SERIES[i % len(SERIES)], MARKERS[i // len(SERIES) % len(MARKERS)]
        axes.fill_between(curve.batches, curve.low, curve.high, color=color, alpha=0.18, linewidth=0)
        axes.plot(curve.batches, curve.median, color=color, marker=marker, markersize=4.5, linewidth=1.8)
        ends.append((curve.median[-1], curve.label, color))
    if drawn and len(batches) > 1:
        best = max(drawn, key=lambda curve: curve.median[0])
        ideal = [best.median[0] * batch / best.batches[0] for batch in batches]
        axes.plot(batches, ideal, color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
        ends.append((ideal[-1], "ideal", FAINT))
    axes.xaxis.set_major_locator(FixedLocator(batches))
    axes.xaxis.set_minor_locator(NullLocator())
    plain = FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    axes.xaxis.set_major_formatter(plain)
    axes.yaxis.set_major_formatter(plain)
    axes.set_xlabel("requests in the batch")
    axes.set_title("decode, tokens a second", loc="left", fontsize=10, color=INK)
    axes.grid(True, which="major", color=FAINT, alpha=0.25, linewidth=0.6)
    axes.tick_params(which="both", color=FAINT, labelcolor=INK, labelsize=9)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(FAINT)
    axes.xaxis.label.set_color(INK)
    axes.set_ymargin(0.08)
    _name_the_ends(axes, ends, batches[-1], wide)
    return figure


def _name_the_ends(axes: Axes, ends: list[tuple[float, str, str]], last: float, wide: bool) -> None:
    """Each line's name at its right end, moved apart where they would overlap. On a phone they stand above."""
    if not wide:
        from matplotlib.lines import Line2D

        lines = [Line2D([], [], color=color, linewidth=2, label=label) for _, label, color in ends]
        above = {"loc": "lower left", "bbox_to_anchor": (0, 1.06)}
        axes.legend(handles=lines, fontsize=8, frameon=False, labelcolor=INK, **above)
        return
    low, high = axes.get_ylim()
    span, places = _log(high) - _log(low), sorted(ends, key=lambda end: end[0])
    heights: list[float] = []
    for value, _, _ in places:
        height = (_log(value) - _log(low)) / span
        heights.append(max(height, heights[-1] + 0.058) if heights else height)
    for i in range(len(heights)):
        heights[i] = min(heights[i], 1.0 - 0.058 * (len(heights) - 1 - i))
    for (_, label, color), height in zip(places, heights, strict=True):
        text = label if len(label) <= 34 else f"{label[:33]}…"
        axes.annotate(
            text, (1.02, height), xycoords="axes fraction", color=color, fontsize=9, va="center", annotation_clip=False
        )


def _log(value: float) -> float:
    return math.log10(max(value, 1e-12))


def svg(figure: Figure, name: str) -> str:
    """The picture as an element of a page: its text is text, and its ink follows the page's colours.

    Args:
        name: unlike that of any other picture in the page; its inner names are made from it.
    """
    import matplotlib as mpl

    out = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    found = out.getvalue()
    found = found[found.index("<svg") :]
    found = re.sub(r"<metadata>.*?</metadata>", "", found, flags=re.DOTALL)
    found = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", found)
    found = re.sub(r"font: [^;\"]*?px [^;\"]*", lambda m: re.sub(r"px .*", "px var(--font)", m[0]), found)
    found = found.replace(INK, "var(--ink)").replace(FAINT, "var(--faint)")
    for i, color in enumerate(SERIES):
        found = found.replace(color, f"var(--series-{i})")
    return found.replace("<svg", f'<svg role="img" aria-label="{name}"', 1)


def png(figure: Figure, file: Path) -> None:
    """Write it at 300 dots an inch, on white: for a paper."""
    figure.savefig(file, format="png", dpi=300, facecolor="white")
