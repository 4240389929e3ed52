"""`nanofw new`: a package with a working plugin to begin from."""

from __future__ import annotations

import importlib
import importlib.util
import keyword
import re
from pathlib import Path
from typing import Annotated

import typer

from nanofw.component import KINDS, Kind
from nanofw.errors import ConfigError
from nanofw.options import listing, suggest


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the plugin is selected by, e.g. my-attention.")],
    kind: Annotated[str, typer.Option(metavar="KIND", help=f"One of {', '.join(sorted(KINDS))}.")] = "attention",
) -> None:
    """Write a package with a plugin that works, and its suite.

    The folder has the name of the plugin. What it prints says how to go on.

    Example: nanofw new my-attention
    """
    from nanofw.scaffold import STARTERS, render

    chosen = named_kind(kind)
    check_name(name, chosen)
    folder = Path(name)
    if folder.exists():
        raise ConfigError(f"{folder} exists already: choose another name, or remove it first")
    files = render(chosen, name)
    try:
        folder.mkdir()
        for path, text in files.items():
            (folder / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror or error}") from error
    starter = STARTERS[chosen]
    print(f"wrote {name}/: {', '.join(files)}")
    print(
        f"next: pip install -e {name}",
        f"      pytest {name}",
        f"      nanofw check {name}",
        f"      nanofw bench --{starter.setting.replace('_', '-')} {starter.plain},{name}",
        sep="\n",
    )


def named_kind(text: str) -> Kind:
    """A kind as the user wrote it ("kv-cache" too). Raises ConfigError."""
    for kind in KINDS:
        if text.replace("-", "_") == kind:
            return kind
    raise ConfigError(f"no kind of plugin is called {text!r}{suggest(text, KINDS)}; kinds are {listing(KINDS)}")


def check_name(name: str, kind: Kind) -> None:
    """Raises ConfigError if no module, class and distribution can be called so, or if one already is."""
    from nanofw.plugins import PluginHost
    from nanofw.scaffold import class_name

    module = name.replace("-", "_")
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*([-_][A-Za-z0-9]+)*", name) or keyword.iskeyword(module):
        raise ConfigError(
            f"{name!r} cannot name a plugin: it takes letters and digits, begins with a letter, has single - or _ "
            f"between words, and is no word of Python's own; e.g. my-{kind.replace('_', '-')}"
        )
    if hasattr(importlib.import_module("nanofw"), class_name(name)):
        raise ConfigError(f"{class_name(name)} is a class of nanofw itself: say what is special about yours")
    for status in PluginHost.load().statuses():
        whose = f"{status.distribution} {status.version}"
        if (status.kind, status.name) == (kind, name):
            raise ConfigError(f"{kind} {name!r} of {whose} is installed already: choose another name")
        if name in (status.plugin, status.distribution):
            raise ConfigError(f"{name!r} is the name of an installed plugin, of {whose}: choose another")
    if importlib.util.find_spec(module) is not None:
        raise ConfigError(f"a module {module!r} is installed already, and would hide the new one: choose another name")
