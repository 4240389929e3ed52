"""What commands print alike, and keeping the libraries below quiet."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from nanofw.engine import Resolved


def stdout() -> Console:
    """A console for results. A file or pipe gets long lines, so that tables stay whole."""
    from rich.console import Console

    plain = functools.partial(Console, highlight=False, markup=False, emoji=False)  # a user's names stay as they are
    console = plain()
    return console if console.is_terminal or "COLUMNS" in os.environ else plain(width=200)


@contextmanager
def status(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A function to be told what is being done now, which shows it; nothing where nobody looks on, or `quiet`.

    It draws only when told: a thread that redraws would disturb what is measured.
    """
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda what: None
        return
    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as line:
        task = line.add_task("")

        def say(what: str) -> None:
            line.update(task, description=what)
            line.refresh()

        yield say


def tell(lines: Iterable[str]) -> None:
    """Print notes to stderr."""
    for line in lines:
        print(line, file=sys.stderr)


def resolved_lines(resolved: Mapping[str, Resolved]) -> list[str]:
    """One line a kind: `attention: naive-gather (nanofw 0.1.0)`, and the path where there is one."""
    return [
        f"{kind}: {r.name} ({r.distribution} {r.version})" + (f", path {r.path}" if r.path else "")
        for kind, r in resolved.items()
    ]


def resolved_json(resolved: Mapping[str, Resolved]) -> dict[str, dict[str, Any]]:
    """The same for a JSON report."""
    return {kind: asdict(r) for kind, r in resolved.items()}


def quiet_libraries() -> None:
    """Ask transformers and its kin for silence: before they are imported, through their variables.

    Called by commands that load a model, so a program that uses nanofw as a library keeps its own choices.
    """
    for variable, value in {
        "TRANSFORMERS_VERBOSITY": "error",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "KINETO_LOG_LEVEL": "99",
    }.items():
        os.environ.setdefault(variable, value)


def one_thread() -> None:
    """Run small work on one thread, unless OMP_NUM_THREADS says otherwise.

    The operations of a tiny model are too small to share out, and threads that wait for each other measure who else
    uses the machine.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
