"""`nanofw plugins`: what is installed, what works here, and why the rest does not."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from nanofw.cli.console import stdout
from nanofw.cli.settings import HOST_ONLY, Settings, with_settings


@with_settings(HOST_ONLY)
def plugins(
    settings: Settings,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List plugins, and why some cannot be used.

    A plugin is ok, unavailable on this machine, failed to load, or blocked.

    Example: nanofw plugins --no-plugin gather
    """
    from nanofw.plugins import PluginHost

    config = settings.resolve()
    statuses = PluginHost.load(config.disable, config.plugins, config.strict).statuses()
    columns = ("kind", "name", "distribution", "version", "api", "status", "reason")
    rows = [{key: value for key, value in asdict(s).items() if key in columns} for s in statuses]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "unavailable": "yellow", "failed": "red", "blocked": "dim"}
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        cells = [Text(row[c], style=colours[row[c]] if c == "status" else "") for c in columns]
        table.add_row(*cells)
    stdout().print(table)
