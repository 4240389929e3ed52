"""`nanofw report`: a run of `nanofw bench` as a page or a picture, or two of them side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nanofw.cli.console import stdout, tell
from nanofw.cli.experiment import HtmlFile, PngFile, check_writable
from nanofw.errors import ConfigError


def report(
    files: Annotated[list[Path], typer.Argument(metavar="A.json [B.json]", help="Of nanofw bench --json.")],
    html_file: HtmlFile = None,
    png_file: PngFile = None,
) -> None:
    """Show a run of bench, or compare two of them.

    Example: nanofw report before.json after.json --html change.html
    """
    from nanofw.report import compare, page, plots
    from nanofw.report.read import need, read

    if len(files) > 2:
        raise ConfigError(f"report takes one file or two, got {len(files)}")
    need(*(["jinja2", "matplotlib"] if html_file else []), *(["matplotlib"] if png_file else []))
    for file in (html_file, png_file):
        check_writable(file)
    records, names = [read(file) for file in files], _names(files)
    _show(records, names)
    if html_file is not None:
        text = page.page(records[0]) if len(records) == 1 else compare.page(records[0], records[1], names)
        html_file.write_text(text, encoding="utf-8")
        tell([f"wrote {html_file}"])
    if png_file is not None:
        named = [""] if len(records) == 1 else [f"{name}: " for name in names]
        drawn = [c for record, name in zip(records, named, strict=True) for c in plots.curves(record, name)]
        plots.png(plots.scaling(drawn, records[0]["roofline"] if len(records) == 1 else ()), png_file)
        tell([f"wrote {png_file}"])


def _names(files: list[Path]) -> tuple[str, str]:
    """Of two files, as short as tells them apart."""
    first, last = files[0], files[-1]
    return (first.stem, last.stem) if first.stem != last.stem else (str(first), str(last))


def _show(records: list[dict[str, object]], names: tuple[str, str]) -> None:
    from nanofw.cli import report_view

    console = stdout()
    for part in report_view.one(records[0]) if len(records) == 1 else report_view.two(records[0], records[1], names):
        console.print(part, soft_wrap=isinstance(part, str))
