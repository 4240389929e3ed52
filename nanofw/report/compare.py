"""Two runs side by side: ratios with intervals, and first of all what else differs between them.

Rounds of two runs are not paired: the machine of one knows nothing of the other's bad moments. So the interval of a
ratio goes from the lowest that two of their rounds make to the highest. That is the interval which order statistics
give for each median, from the lowest round to the highest, at a confidence of 1 - 2^(1-n) for n rounds (Conover,
Practical Nonparametric Statistics, 1999, section 3.2), taken together. It is wide with few rounds, as it should be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nanofw.report import plots
from nanofw.report.page import notices, render, safe
from nanofw.report.read import Record, by_label

FIGURES = {"tok_s": "throughput", "decode_tok_s": "decode", "prefill_tok_s": "prefill"}


@dataclass(frozen=True, slots=True)
class Ratio:
    """What a run has of another's, at one point.

    Attributes:
        label, batch, figure: the point, and what was measured there.
        before, now: medians, in tokens a second. ratio: `now / before`.
        low, high: the interval of the ratio. confidence: that both medians lie in their intervals.
    """

    label: str
    batch: int
    figure: str
    before: float
    now: float
    ratio: float
    low: float
    high: float
    confidence: float

    @property
    def verdict(self) -> str:
        """Either "faster" or "slower", or empty where the interval holds 1."""
        return "faster" if self.low > 1 else "slower" if self.high < 1 else ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs.

    Attributes:
        ratios: of the points that both have.
        differs: name, and the values in the first and the second, of what else is not the same.
        missing: sentences about what only one of them has.
        doubts: sentences about what makes the times of either doubtful.
    """

    ratios: list[Ratio]
    differs: list[tuple[str, str, str]]
    missing: list[str]
    doubts: list[str]


def compare(first: Record, second: Record) -> Comparison:
    """The second against the first.

    Combinations are matched by label. If each has one only, these two are compared, whatever their labels.
    """
    before, now = by_label(first), by_label(second)
    pairs = [(label, label) for label in before if label in now]
    if len(before) == len(now) == 1 and not pairs:
        pairs = [(next(iter(before)), next(iter(now)))]
    ratios, missing = [], []
    for one, two in pairs:
        there = {p["batch"]: p for p in before[one]}
        here = {p["batch"]: p for p in now[two]}
        label = one if one == two else f"{two} against {one}"
        for batch in sorted(there.keys() & here.keys()):
            ratios += [_ratio(label, batch, figure, there[batch], here[batch]) for figure in FIGURES]
        for batch in sorted(there.keys() ^ here.keys()):
            missing.append(f"{label}: batch {batch} is only in the {'first' if batch in there else 'second'}")
    matched_one, matched_two = {one for one, _ in pairs}, {two for _, two in pairs}
    missing += [f"{label} is only in the first" for label in before if label not in matched_one]
    missing += [f"{label} is only in the second" for label in now if label not in matched_two]
    doubts = [
        f"{which}: {notice}" for which, record in (("first", first), ("second", second)) for notice in notices(record)
    ]
    return Comparison(ratios, list(_differs(first, second, pairs)), missing, doubts)


def _ratio(label: str, batch: int, figure: str, before: dict[str, Any], now: dict[str, Any]) -> Ratio:
    one, two = before[figure], now[figure]
    confidence = 1.0
    for rounds in (one["rounds"], two["rounds"]):
        confidence *= 1 - 2.0 ** (1 - len(rounds))
    return Ratio(
        label=label,
        batch=batch,
        figure=FIGURES[figure],
        before=one["median"],
        now=two["median"],
        ratio=two["median"] / one["median"],
        low=min(two["rounds"]) / max(one["rounds"]),
        high=max(two["rounds"]) / min(one["rounds"]),
        confidence=confidence,
    )


def _differs(first: Record, second: Record, pairs: list[tuple[str, str]]) -> Iterator[tuple[str, str, str]]:
    for part in ("machine", "settings"):
        for name in dict.fromkeys([*first[part], *second[part]]):
            a, b = first[part].get(name), second[part].get(name)
            if a != b:
                yield name.replace("_", " "), _plain(a), _plain(b)
    models = [sorted({p["model"] for p in record["points"]}) for record in (first, second)]
    if models[0] != models[1]:
        yield "model", _plain(models[0]), _plain(models[1])
    for one, two in pairs:
        old, new = first["combinations"][one]["resolved"], second["combinations"][two]["resolved"]
        for kind in dict.fromkeys([*old, *new]):
            a, b = (_plugin(resolved.get(kind)) for resolved in (old, new))
            if a != b:
                yield f"{kind} of {one}", a, b


def _plugin(resolved: dict[str, Any] | None) -> str:
    if resolved is None:
        return "none"
    path = f", {resolved['path']}" if resolved["path"] else ""
    return f"{resolved['name']} ({resolved['distribution']} {resolved['version']}{path})"


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {part}" for key, part in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def verdict(found: Comparison) -> str:
    """In words: how many points are faster or slower, and by how much."""
    if not found.ratios:
        return "The two have no point in common."
    told = []
    for word in ("faster", "slower"):
        if those := [r.ratio for r in found.ratios if r.verdict == word]:
            told.append(f"{len(those)} {word} ({min(those):.2f}x to {max(those):.2f}x)")
    same = sum(not r.verdict for r in found.ratios)
    told += [f"{same} not told apart"] if same else []
    return f"Of {len(found.ratios)} figures {', '.join(told)}."


def how(found: Comparison) -> str:
    """What the intervals are."""
    if not found.ratios:
        return ""
    return (
        "Tokens a second, second over first, medians; the interval spans the ratios of any two rounds "
        f"(confidence {min(r.confidence for r in found.ratios):.0%}; more rounds make it surer)."
    )


def page(first: Record, second: Record, names: tuple[str, str]) -> str:
    """Both on one page, under these names."""
    found = compare(first, second)
    drawn = [*plots.curves(first, f"{names[0]}: "), *plots.curves(second, f"{names[1]}: ")]
    rows = [
        {
            "cells": [r.label, r.batch, r.figure, _n(r.before), _n(r.now), f"{r.ratio:.3f}x", interval(r), r.verdict],
            "mark": {"faster": "holds", "slower": "broken", "": ""}[r.verdict],
        }
        for r in found.ratios
    ]
    return render(
        "compare.html.jinja",
        first=names[0],
        second=names[1],
        verdict=verdict(found),
        differs=found.differs,
        wide=safe(plots.svg(plots.scaling(drawn), "scaling")),
        narrow=safe(plots.svg(plots.scaling(drawn, wide=False), "scaling-narrow")),
        how=how(found),
        head=["combination", "batch", "figure", *names, "ratio", "interval", ""],
        rows=rows,
        missing=found.missing,
        doubts=found.doubts,
    )


def interval(ratio: Ratio) -> str:
    """As text."""
    return f"{ratio.low:.2f} to {ratio.high:.2f}"


def _n(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
