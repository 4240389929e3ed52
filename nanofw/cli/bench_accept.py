"""`nanofw bench accept`: make a run that passed the gate the baseline of its machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

LAST_RUN = Path(".benchmarks", "last-run.json")
FOLDER = Path("benchmarks", "baselines")


def accept(
    run: Annotated[
        Path, typer.Argument(metavar="RUN.json", help="What pytest benchmarks --benchmark-json=RUN.json wrote.")
    ] = LAST_RUN,
    into: Annotated[Path, typer.Option("--into", metavar="FOLDER", help="Where the baselines are.")] = FOLDER,
) -> None:
    """Make a run that passed the baseline of its machine.

    Without RUN.json, the last run here. Refused, with the reason: a run that failed, was judged by nobody, or holds
    only a part of the benchmarks.

    Example: pytest benchmarks && nanofw bench accept
    """
    from nanofw.measure import accept as promotion

    print(f"wrote {promotion.accept(run, into)}: commit it")
