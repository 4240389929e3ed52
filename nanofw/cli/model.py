"""`nanofw model`: models that nanofw can fetch by itself."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from nanofw.errors import CheckpointError
from nanofw.options import suggest

app = typer.Typer(no_args_is_help=True)

MODELS = ("smollm2",)


@app.callback()
def model() -> None:
    """Fetch models.

    Example: nanofw model pull smollm2
    """


@app.command("pull")
def pull(name: Annotated[str, typer.Argument(help="Which one: smollm2.")]) -> None:
    """Fetch a model into the cache, once. Later runs need no network.

    Example: nanofw model pull smollm2
    """
    if name not in MODELS:
        raise CheckpointError(
            f"cannot pull {name!r}{suggest(name, MODELS)}; there is {', '.join(MODELS)}. Models of the Hugging Face "
            "hub are fetched when they are used (--model org/name)"
        )
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from nanofw.weights import smollm2

    # the stream as it is now: libraries are silenced by replacing it while they convert
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: float) -> None:
            if what not in tasks:
                for task in tasks.values():
                    bars.update(task, completed=1.0)
                tasks[what] = bars.add_task(what, total=1.0)
            bars.update(tasks[what], completed=done)

        folder = smollm2.pull(show)
    print(f"{name} is in {folder}")
