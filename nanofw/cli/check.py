"""`nanofw check`: the suite of its kind, its laws, and what to do next, for any one plugin."""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanofw.cli.console import one_thread, quiet_libraries, stdout, tell
from nanofw.cli.experiment import Quiet, check_writable
from nanofw.cli.new import named_kind
from nanofw.cli.settings import HOST_ONLY, Settings, with_settings
from nanofw.errors import ConfigError, PluginError
from nanofw.options import listing, suggest

if TYPE_CHECKING:
    from nanofw.component import Component, Kind
    from nanofw.plugins import PluginHost
    from nanofw.testing.verdict import Verdict


@with_settings((*HOST_ONLY, "options"))
def check(
    settings: Settings,
    plugin: Annotated[str, typer.Argument(metavar="PLUGIN", help="Its name, or package.module:Class.")],
    kind: Annotated[str | None, typer.Option(metavar="KIND", help="Where a name stands for several kinds.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the verdict as JSON.")] = None,
    quiet: Quiet = False,
) -> None:
    """Judge a plugin: is it right, does it keep its laws, and scale?

    Exits with 0 if it is right and keeps its laws, with 1 if not. An attention takes less than three minutes on a CPU.

    Example: nanofw check vectorized-gather
    """
    check_writable(json_file)
    quiet_libraries()
    try:
        from nanofw.testing.verdict import judge
    except ModuleNotFoundError as error:
        raise ConfigError(f"nanofw check needs {error.name}: pip install 'nanofw[test]'") from error
    from nanofw.cli.check_view import progress, show
    from nanofw.options import build_options
    from nanofw.plugins import PluginHost

    config = settings.resolve()
    wanted = named_kind(kind) if kind is not None else None
    host = PluginHost.load(config.disable, config.plugins, config.strict)
    found, backend = _by_path(plugin, wanted) if ":" in plugin else _by_name(plugin, wanted, host)
    options = config.options.get(found, {})
    build_options(backend.Options, options, f'{found} "{plugin}"')
    one_thread()
    with progress(plugin, quiet) as watch:
        verdict = judge(plugin, found, backend, options, watch)
    show(stdout(), verdict)
    if json_file is not None:
        _write(json_file, verdict)
    raise typer.Exit(0 if verdict.good else 1)


def _by_name(name: str, wanted: Kind | None, host: PluginHost) -> tuple[Kind, type[Component]]:
    """An installed plugin. Raises PluginError if there is none, or if it cannot run here; ConfigError."""
    from nanofw.component import KINDS

    statuses = host.statuses() if wanted is None else []
    kinds: list[Kind] = [kind for kind in KINDS if any((s.kind, s.name) == (kind, name) for s in statuses)]
    if wanted is not None:
        kinds = [wanted]
    if len(kinds) > 1:
        raise ConfigError(f"{name!r} is a {' and a '.join(kinds)}: say which by --kind")
    if not kinds:
        names = sorted({status.name for status in statuses if status.kind in KINDS})
        raise PluginError(
            f"no plugin is named {name!r}{suggest(name, names)}; there are {listing(names)}. A class that is not "
            f"registered is named package.module:Class"
        )
    return kinds[0], host.get(kinds[0], name).load()


def _by_path(path: str, wanted: Kind | None) -> tuple[Kind, type[Component]]:
    """A class that need not be registered. Raises PluginError."""
    from nanofw.plugins import kind_of

    module, _, name = path.partition(":")
    try:
        target: Any = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise PluginError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    if not isinstance(target, type):
        raise PluginError(f"{path} is {target!r}, and not a class")
    backend: type[Any] = target
    kind = kind_of(backend)
    if wanted not in (None, kind):
        raise ConfigError(f"{path} is of the kind {kind}, not {wanted}")
    if missing := sorted(getattr(backend, "__abstractmethods__", ())):
        raise PluginError(f"{path} does not implement {listing(missing)}")
    if reason := backend.unavailable():
        raise PluginError(f"{path} is unavailable here: {reason}")
    return kind, backend


def _write(file: Path, verdict: Verdict) -> None:
    report = {"right": verdict.right, "good": verdict.good} | asdict(verdict)
    try:
        file.write_text(json.dumps(report, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror or error}") from error
    tell([f"wrote {file}"])
