"""Writes the page of the command line from the commands themselves: `python docs/command_line.py`.

The settings that most commands share come once, at the end; `tests/docs/test_reference.py` sees that the page is
current.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer

from nanofw.cli import app
from nanofw.cli.settings import HELP_ALL, PANEL, SHARED
from nanofw.config import Config

PAGE = Path(__file__).with_name("reference") / "command-line.md"

HEAD = """# Command line

<!-- written by: python docs/command_line.py -->

{about}

{options}

`--help`, or `-h`, explains any command. What a user can cause is one line on stderr that begins with `error:`, and
status 2; Ctrl-C ends with status 130.
"""

SETTINGS = """## Settings

Most commands take them. Each is a field of [Config](python.md#settings), and [Configuration](configuration.md) tells
where else it may be set. The help of a command that takes all of them shows those marked * with `--help-all` only.
`bench` and `explain` take comma lists of plugins, e.g. `--attention naive-gather,vectorized-gather`, and run every
combination.
"""


def page() -> str:
    """The whole page."""
    root: Any = typer.main.get_command(app)
    own = [option_row(option) for option in root.params if option.name != "help"]
    parts = [HEAD.format(about=prose(root), options=table("option", own))]
    for name, command in commands(root, "nanofw"):
        parts += [f"## {name}\n", *section(name, command)]
    shared = {option.name: option for _, command in commands(root, "nanofw") for option in command.params}
    rows = [setting_row(shared[setting.name], setting.rare) for setting in SHARED]
    return "\n".join([*parts, SETTINGS, table("option", rows)])


def commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    """All commands below a group, in their order, each with what one types for it."""
    for name, command in group.commands.items():
        yield f"{path} {name}", command
        yield from commands(command, f"{path} {name}") if hasattr(command, "commands") else ()


def section(name: str, command: Any) -> Iterator[str]:
    """What a command is for, its arguments and options, and an example."""
    yield prose(command)
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    usage = " ".join([name, *(["[OPTIONS]"] if options else []), *map(placeholder, arguments)])
    if getattr(command, "commands", None):
        usage += " [COMMAND]" if command.invoke_without_command else " COMMAND"
    yield f"\nUsage: `{usage}`\n"
    if arguments:
        rows = [(f"`{p.metavar or p.name.upper()}`", sentence(p.help), default(p.default)) for p in arguments]
        yield table("argument", rows) + "\n"
    own = [p for p in options if p.rich_help_panel != PANEL and p.name not in ("help", HELP_ALL.name)]
    if own:
        yield table("option", [option_row(p) for p in own]) + "\n"
    shared = [p for p in options if p.rich_help_panel == PANEL]
    if len(shared) == len(SHARED):
        yield "It takes all [settings](#settings).\n"
    elif shared:
        yield f"Of the [settings](#settings) it takes {', '.join(f'`{p.opts[0]}`' for p in shared)}.\n"


def prose(command: Any) -> str:
    """The help of a command in Markdown: its examples are code."""
    lines = []
    for line in (command.help or "").strip().splitlines():
        begin, colon, code = line.strip().partition(": ")
        lines.append(f"{begin}: `{code}`" if colon and begin in ("Example", "Start with") else line.strip())
    return "\n".join(lines)


def placeholder(argument: Any) -> str:
    """How the usage shows an argument."""
    shown = argument.metavar or argument.name.upper()
    shown += "..." if argument.nargs == -1 and " " not in shown else ""
    return shown if argument.required or shown.startswith("[") else f"[{shown}]"


def option_row(option: Any) -> tuple[str, str, str]:
    """An option, what it means, and what holds without it."""
    value = f" {option.metavar}" if option.metavar else ""
    return f"`{option.opts[0]}{value}`", sentence(option.help), default(option.default)


def setting_row(option: Any, rare: bool) -> tuple[str, str, str]:
    """The same for one of the settings, whose default is that of `Config`; its help tells it too."""
    shown, help_, _ = option_row(option)
    told = default({field.name: field.default for field in fields(Config)}.get(option.name))
    return shown + " *" * rare, help_.removesuffix(f" ({told.strip('`')})"), told


def sentence(text: str) -> str:
    """A help text without its full stop, the options in it as code."""
    text = text if text.endswith("...") else text.removesuffix(".")
    return re.sub(r"--[a-z-]+", r"`\g<0>`", text)


def default(value: Any) -> str:
    """What holds if something is not given, where that says anything."""
    return "" if value is None or value is False or not isinstance(value, str | int | float | Path) else f"`{value}`"


def table(first: str, rows: list[tuple[str, str, str]]) -> str:
    """A table in Markdown, without a column of defaults if there are none."""
    columns = 3 if any(row[2] for row in rows) else 2
    lines = [(first, "meaning", "default"), ("---", "---", "---"), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row[:columns])} |" for row in lines)


if __name__ == "__main__":
    PAGE.write_text(page() + "\n", encoding="utf-8")
    print(f"wrote {PAGE}")
