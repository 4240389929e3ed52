"""One run as one page, which needs nothing beside itself: no network, no script."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nanofw.measure import contention
from nanofw.measure.bottleneck import amount
from nanofw.report import plots
from nanofw.report.read import Record, by_label


def page(record: Record) -> str:
    """The page of a record, light or dark as the reader's system is."""
    drawn, roofline, points = plots.curves(record), record["roofline"], by_label(record)
    return render(
        "page.html.jinja",
        model=record["points"][0]["model"] if record["points"] else "no model",
        machine=machine_line(record),
        notices=notices(record),
        sentences=[_sentence(label, found) for label, found in points.items() if found],
        wide=safe(plots.svg(plots.scaling(drawn, roofline), "scaling")),
        narrow=safe(plots.svg(plots.scaling(drawn, roofline, wide=False), "scaling-narrow")),
        roof=_roof(record["roof"]),
        explained=[_explained(label, found) for label, found in record["explained"].items() if found],
        tables=[_table(label, found) for label, found in points.items()],
        laws=[{"plugin": plugin} | law for plugin, laws in record["laws"].items() for law in laws],
        ran=list(_ran(record)),
        notes=[n for c in record["combinations"].values() for n in c["notes"]],
        facts=[*_facts(record["settings"]), *_facts(_telemetry(record["telemetry"]))],
    )


def render(template: str, **values: Any) -> str:
    """A template of this package, with everything escaped that is not said to be safe."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("nanofw.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(values)


def safe(markup: str) -> Any:
    """Markup that we made ourselves, and is to be put in as it is."""
    from markupsafe import Markup

    return Markup(markup)


def machine_line(record: Record) -> str:
    """The machine that a record is of."""
    from nanofw.measure.machine import summary

    return summary(record["machine"])


def notices(record: Record) -> list[str]:
    """What makes the times of a run doubtful; none if all is well."""
    found, telemetry = contention.notices(record["waited"]), record["telemetry"]
    if not telemetry:
        return found
    found += [
        f"{telemetry['name']} ran below its clocks in {number} of {telemetry['samples']} samples: {reason}"
        for reason, number in telemetry["throttled"].items()
    ]
    if telemetry["other_processes"]:
        found.append(f"{telemetry['name']} was shared: other processes on it: {telemetry['other_processes']}")
    return found


def _sentence(label: str, points: list[dict[str, Any]]) -> str:
    first, last = points[0], points[-1]
    if first is last:
        return f"{label}: batch {first['batch']} gives {_number(first['tok_s']['median'])} tok/s"
    more = last["speedup"]["median"]
    return f"{label}: batch {last['batch']} gives {more:.1f}x the throughput of batch {first['batch']}"


def _roof(roof: dict[str, Any] | None) -> str:
    if not roof:
        return ""
    return f"{amount(roof['read_bandwidth'])}/s read, {roof['flops'] / 1e9:,.0f} GFLOP/s in {roof['dtype']}, measured"


def _explained(label: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    on_gpu, base, last = found[0]["device_ms"] is not None, found[0], found[-1]
    head = ["batch", "step", *(["GPU"] if on_gpu else []), "speed-up", "host", "calls", "python", "kernels", "reads"]
    rows = [
        [
            str(b["batch"]),
            f"{b['wall_ms']:,.3g} ms",
            *([f"{b['device_ms']:,.3g} ms"] if on_gpu else []),
            f"{b['batch'] / base['batch'] * base['wall_ms'] / b['wall_ms']:.1f}x",
            f"{b['host_share']:.0%}",
            *(f"{b['counts'][name]:,}" for name in ("aten_calls", "python_calls", "launches", "host_reads")),
            amount(b["bytes"]),
            f"{b['bandwidth_share']:.1%}",
            f"{b['floor_ms']:.3g} ms",
            b["bound"],
        ]
        for b in found
    ]
    kinds: dict[str, dict[str, Any]] = {b["bottleneck"]: b for b in found}  # the last of each kind
    return {
        "label": label,
        "batch": last["batch"],
        "head": [*head, "bytes", "bandwidth", "floor", "bound by"],
        "rows": rows,
        "sentences": [f"Batch {b['batch']}: {b['sentence']}" for b in kinds.values()],
        "costs": [
            {"name": c["name"], "width": round(100 * min(c["share"], 1), 1), "share": f"{c['share']:.0%}"}
            for c in last["costs"]
        ],
        "growth": "; ".join(f"{counter} = {fit}" for counter, fit in last["growth"].items() if fit != "0"),
    }


def _table(label: str, points: list[dict[str, Any]]) -> dict[str, Any]:
    rows = [
        [
            str(p["batch"]),
            f"{p['total_s']['median']:,.2f} s",
            f"{_number(p['tok_s']['median'])} tok/s",
            f"{p['tokens']:,}",
            f"{p['speedup']['median']:.1f}x",
            f"{_number(p['decode_tok_s']['median'])} tok/s",
            f"{p['decode_ms']['median']:,.2f} ms",
            f"{_number(p['prefill_tok_s']['median'])} tok/s",
        ]
        for p in points
    ]
    head = ["batch", "total", "throughput", "tokens", "speed-up", "decode", "per step", "prefill"]
    return {"label": label, "head": head, "rows": rows}


def _ran(record: Record) -> Iterator[dict[str, str]]:
    for label, combination in record["combinations"].items():
        for kind, r in combination["resolved"].items():
            yield {
                "label": label,
                "kind": kind,
                "plugin": f"{r['name']} ({r['distribution']} {r['version']})",
                "path": r["path"],
            }


def _telemetry(telemetry: dict[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (telemetry or {}).items() if isinstance(value, dict) and "median" in value}


def _facts(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield name, ", ".join(f"{key} {number:,.4g}" for key, number in value.items())
        else:
            yield name.replace("_", " "), ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
