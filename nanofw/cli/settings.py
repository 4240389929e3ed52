"""The options that every command shares, defined once, and how they become a `Config`.

A command asks for them by a parameter `settings: Settings`; the decorator `with_settings` puts the options themselves
in its place. An option that was not given is None and overrides nothing: the defaults in the help are only told.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import typer

from nanofw.config import Config, merge_options, read_environment, read_file

PANEL = "Settings (all of them: --help-all)"


@dataclass(frozen=True, slots=True)
class Shared:
    """One shared option.

    Attributes:
        name: the parameter's, and unless it is one of the few special ones, a field of `Config`.
        help: one line. kind: what typer converts to. metavar: how the help shows its value.
        flag: its name on the command line, if not `--NAME`. rare: shown by `--help-all` only.
    """

    name: str
    help: str
    kind: Any = str
    metavar: str | None = None
    flag: str | None = None
    rare: bool = False

    def parameter(self) -> inspect.Parameter:
        """The same as a parameter that typer understands."""
        default = {f.name: f.default for f in fields(Config)}.get(self.name)
        told = f" ({default})" if default not in (None, False) and isinstance(default, (str, int)) else ""
        option = typer.Option(
            None,
            self.flag or f"--{self.name.replace('_', '-')}",
            help=self.help + told,
            metavar=None if self.kind is bool else self.metavar or ("N" if self.kind is int else "NAME"),
            show_default=False,
            rich_help_panel=PANEL,
            hidden=self.rare,
        )
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=self.kind | None)


SHARED = (
    Shared("model", "Folder, hub id or dummy:NAME", metavar="MODEL"),
    Shared("attention", "Attention"),
    Shared("kv_cache", "KV cache"),
    Shared("scheduler", "Scheduler"),
    Shared("runner", "Runner"),
    Shared("model_impl", "Model implementation"),
    Shared("sampler", "Sampler"),
    Shared("options", "Option of a plugin; repeatable", list[str], "KIND.KEY=VALUE", "--option"),
    Shared("device", "cpu, cuda, cuda:1, ..."),
    Shared("dtype", "float32, float16, bfloat16"),
    Shared("max_model_len", "Most tokens a request may reach", int),
    Shared("max_num_seqs", "Most requests at once", int),
    Shared("config", "Config file", Path, metavar="FILE"),
    Shared("max_batch_tokens", "Most tokens in a step", int, rare=True),
    Shared("kv_blocks", "Blocks of the KV cache", int, rare=True),
    Shared("kv_memory", "Its size instead, e.g. 2GiB", metavar="SIZE", rare=True),
    Shared("steps_in_flight", "0 waits for each step, 1 plans ahead", int, rare=True),
    Shared("seed", "Seed of random choices", int, rare=True),
    Shared("disable", "Block a plugin; repeatable", list[str], flag="--no-plugin", rare=True),
    Shared("strict", "A plugin that fails to load is an error", bool, rare=True),
    Shared("trust_remote_code", "Run code that comes with a model", bool, rare=True),
    Shared("allow_pickle", "Load pickled weights, which can run code", bool, rare=True),
)
HOST_ONLY = ("disable", "strict", "config")
"""What a command needs that loads plugins and builds no engine."""


def _help_all(ctx: typer.Context, wanted: bool) -> None:
    """Print the help with every setting in it."""
    if wanted:
        for parameter in ctx.command.params:
            parameter.hidden = False  # type: ignore[attr-defined]
        typer.echo(ctx.get_help())
        raise typer.Exit


HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    default=typer.Option(False, "--help-all", hidden=True, is_eager=True, callback=_help_all),
    annotation=bool,
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line said, by field of `Config`, and the config file it named."""

    given: Mapping[str, Any]
    file: Path | None

    def merged(self, defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Command line over environment over config file over `defaults`, not yet checked."""
        merged: dict[str, Any] = {}
        options: dict[str, dict[str, Any]] = {}
        for layer in (defaults or {}, read_file(self.file, ".", os.environ), read_environment(os.environ), self.given):
            merged.update({key: value for key, value in layer.items() if key != "options"})
            for kind, table in layer.get("options", {}).items():
                options.setdefault(kind, {}).update(table)
        return merged | {"options": options}

    def resolve(self) -> Config:
        """The settings of this run. Raises ConfigError."""
        return Config.resolve(self.given, file=self.file)


def with_settings(only: Collection[str] | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command that takes `settings`: it gets the shared options (or `only` these) in its place."""
    shared = [s for s in SHARED if only is None or s.name in only]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "settings"]

        def run(**values: Any) -> None:
            values.pop(HELP_ALL.name, None)
            taken = {s.name: values.pop(s.name) for s in shared}
            file = taken.pop("config")
            given = {name: value for name, value in taken.items() if value not in (None, [])}
            if "options" in given:
                given["options"] = merge_options(given["options"])
            command(settings=Settings(given, file), **values)

        rare = any(s.rare for s in shared) and only is None
        told = [s if rare else replace(s, rare=False) for s in shared]
        parameters = [*own, *(s.parameter() for s in told), *([HELP_ALL] if rare else [])]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__doc__, run.__name__ = command.__doc__, command.__name__
        return run

    return decorate
