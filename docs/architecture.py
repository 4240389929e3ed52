"""Draw docs/architecture.svg from what the modules really import.

    python docs/architecture.py

Boxes and their places are chosen here; every arrow is an import that exists, and each that exists is there or follows
from two that are. A test holds the picture to that (tests/docs/test_architecture.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import grimp

PICTURE = Path(__file__).with_name("architecture.svg")
PLUGINS = ("nanofw_basics", "nanofw_gather", "nanofw_triton", "nanofw_cudagraph", "nanofw_fused")
EVERYWHERE = ("component", "errors", "events", "laws", "launch", "pdl", "progress", "cache_folder", "config", "options")
"""Modules that most others use and that use none in a box: they would only add arrows."""


@dataclass(frozen=True)
class Box:
    """A rectangle that stands for modules.

    Attributes:
        modules: what it holds, packages with all that is in them.
        says: one line below its name. x, y, width: its place.
        inside: the name of the box that is drawn around it.
    """

    modules: tuple[str, ...]
    says: str
    x: int
    y: int
    width: int
    height: int = 56
    inside: str | None = None


def _contract(number: int, name: str, *more: str) -> Box:
    modules = (f"nanofw.{name}", *(f"nanofw.{module}" for module in more))
    says = ("who computes", "slots, blocks", "a step, packed", "to the device", "layers", "over the cache", "tokens")
    return Box(modules, says[number], 32 + number * 112, 452, 104, inside="contracts")


BOXES: dict[str, Box] = {
    "command line": Box(("nanofw.cli", "nanofw.scaffold"), "generate, bench, explain, check, new", 20, 20, 300),
    "what judges": Box(
        ("nanofw.testing", "nanofw.measure", "nanofw.diff", "nanofw.report"),
        "testing: suites and laws; measure: counts and times; report: pages",
        460,
        20,
        480,
    ),
    "LLM": Box(("nanofw.llm",), "text in, text out", 20, 124, 300),
    "build": Box(("nanofw.build", "nanofw.capacity"), "names to one engine; how large the cache is", 20, 228, 300),
    "plugin host": Box(
        ("nanofw.plugins", "nanofw.hookspecs"),
        "finds plugins, before the loop begins",
        490,
        228,
        268,
    ),
    "engine": Box(
        (
            "nanofw.engine",
            "nanofw.intake",
            "nanofw.blame",
            "nanofw.recovery",
            "nanofw.table",
            "nanofw.request",
            "nanofw.text",
        ),
        "the loop: schedule, submit, take tokens in",
        20,
        332,
        300,
    ),
    "weights": Box(("nanofw.weights",), "checkpoints", 836, 452, 104),
    "contracts": Box((), "contracts, in the order of the flow", 20, 420, 796, 100),
    "scheduler": _contract(0, "scheduler"),
    "kv_cache": _contract(1, "kv_cache"),
    "batch": _contract(2, "batch"),
    "runner": _contract(3, "runner"),
    "model": _contract(4, "model"),
    "attention": _contract(5, "attention"),
    "sampler": _contract(6, "sampler", "draw"),
} | {
    name: Box((name,), says, 20 + number * 188, 600, 168)
    for number, (name, says) in enumerate(
        zip(
            PLUGINS,
            ("all that is plain", "naive, vectorized, flash", "paged kernels", "replays steps", "five kernels a layer"),
            strict=True,
        )
    )
}


def home(module: str) -> str | None:
    """The box that holds a module."""
    for name, box in BOXES.items():
        if any(module == held or module.startswith(f"{held}.") for held in box.modules):
            return name
    return None


def imports() -> dict[str, set[str]]:
    """Which boxes import which. Seen from above, the contracts are one box; a plugin implements single ones."""
    graph = grimp.build_graph("nanofw", *PLUGINS, exclude_type_checking_imports=True, cache_dir=None)
    found: dict[str, set[str]] = {}
    for module in graph.modules:
        importer = home(module)
        if importer is None or BOXES[importer].inside:
            continue
        for imported in map(home, graph.find_modules_directly_imported_by(module)):
            if imported is not None:
                seen = imported if importer in PLUGINS else BOXES[imported].inside or imported
                found.setdefault(importer, set()).add(seen)
        found.get(importer, set()).discard(importer)
    return found


def arrows(found: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """Those that do not follow from two others."""

    def reached(start: str) -> set[str]:
        there = set(found.get(start, ()))
        return there.union(*(reached(box) for box in there))

    kept = []
    for importer, direct in found.items():
        indirect = set().union(*(reached(box) for box in direct))
        kept += [(importer, box) for box in direct - indirect]
    return sorted(kept)


STYLE = """
text { font: 14px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #1c1c1e; }
.says { font-size: 11.5px; fill: #5c5c62; }
.paper { fill: #ffffff; } .box { fill: #f5f5f7; stroke: #b8b8c0; } .frame { fill: none; stroke: #b8b8c0; }
.contract { fill: #dcecf8; stroke: #0072b2; } .plugin { fill: #fbe7d6; stroke: #c04a00; }
.arrow { fill: none; stroke: #77777f; stroke-width: 1.3; marker-end: url(#head); } #head path { fill: #77777f; }
@media (prefers-color-scheme: dark) {
  text { fill: #ececf0; } .says { fill: #a8a8b0; }
  .paper { fill: #151518; } .box { fill: #1f1f24; stroke: #55555d; } .frame { stroke: #55555d; }
  .contract { fill: #12303f; stroke: #5db4f0; } .plugin { fill: #3d2413; stroke: #ff9a57; }
  .arrow { stroke: #9a9aa2; } #head path { fill: #9a9aa2; }
}
"""


def svg(drawn: list[tuple[str, str]]) -> str:
    """The picture of all boxes and these arrows."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 680" role="img" aria-labelledby="title">',
        '<title id="title">Modules of nanofw and what imports what</title>',
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z"/></marker></defs>',
        '<rect class="paper" width="960" height="680" rx="8"/>',
        *(_rectangle(name, box) for name, box in BOXES.items()),
        *(_arrow(BOXES[importer], BOXES[imported], importer, imported) for importer, imported in drawn),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _rectangle(name: str, box: Box) -> str:
    kind = "contract" if box.inside else "plugin" if name in PLUGINS else "box" if box.modules else "frame"
    rectangle = f'<rect class="{kind}" x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="6"/>'
    if not box.modules:
        return f'{rectangle}<text class="says" x="{box.x + 14}" y="{box.y + 20}">{box.says}</text>'
    middle = box.x + box.width / 2
    return (
        f'{rectangle}<text x="{middle:g}" y="{box.y + 24}" text-anchor="middle">{name}</text>'
        f'<text class="says" x="{middle:g}" y="{box.y + 42}" text-anchor="middle">{box.says}</text>'
    )


def _arrow(a: Box, b: Box, importer: str, imported: str) -> str:
    """Down or up where the boxes overlap, or to a plugin's contract; else out of one side and into the other's."""
    left, right = max(a.x, b.x), min(a.x + a.width, b.x + b.width)
    if importer in PLUGINS:
        x0, y0, x1, y1 = a.x + a.width // 2, a.y, b.x + b.width // 2, b.y + b.height + 2
        path = f"M{x0} {y0} C{x0} {(y0 + y1) // 2} {x1} {(y0 + y1) // 2} {x1} {y1}"
    elif left < right:
        path = f"M{(left + right) // 2} {a.y + a.height} V{b.y - 2}"
    elif a.y == b.y:
        path = f"M{a.x + a.width} {a.y + a.height // 2} H{b.x - 2}"
    elif a.x < b.x:
        x0, y0, x1 = a.x + a.width, a.y + a.height // 2, b.x + b.width // 3
        path = f"M{x0} {y0} C{(x0 + x1) // 2} {y0} {x1} {y0} {x1} {b.y - 2}"
    else:
        x0, y0, x1, y1 = a.x + 20, a.y + a.height, b.x + b.width + 2, b.y + 16
        path = f"M{x0} {y0} C{x0} {y1} {x0} {y1} {x1} {y1}"
    return f'<path class="arrow" d="{path}"><title>{importer} imports {imported}</title></path>'


if __name__ == "__main__":
    PICTURE.write_text(svg(arrows(imports())))
    print(f"wrote {PICTURE}")
