"""Promotion of a run to a baseline: only one that passed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanofw.errors import ConfigError
from nanofw.measure import baseline

ACCEPTABLE = ("passed", "no baseline")


def accept(file: Path, folder: Path) -> Path:
    """Write the run in `file` into `folder`, under the name of its machine.

    Returns:
        Where the baseline is now.

    Raises:
        ConfigError: the run failed, was not judged, or is only a part of the set; or a file cannot be read or written.
    """
    run = baseline.read(file)
    verdict = run["nanofw"]
    if verdict["status"] == "failed":
        more = len(verdict["failures"]) - 1
        rest = f" (and {more} more)" if more else ""
        raise ConfigError(f"{file} failed the gate and cannot become a baseline: {verdict['failures'][0]}{rest}")
    if verdict["status"] not in ACCEPTABLE:
        raise ConfigError(f"{file} was not judged and cannot become a baseline: {verdict['basis']}")
    if verdict["part"]:
        raise ConfigError(f"{file} is a run of a part of the set ({verdict['part']}): run all of it")
    if not baseline.records(run):
        raise ConfigError(f"{file} holds no benchmark: nothing was measured")
    target = folder / f"{baseline.slug(run['machine_info']['nanofw'])}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        target.write_text(dumps(run), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}") from error
    return target


def dumps(run: Mapping[str, Any]) -> str:
    """A run as JSON with one line a benchmark, so that a diff shows which ones changed. Samples are left out."""
    slim = [bench | {"stats": {k: v for k, v in bench["stats"].items() if k != "data"}} for bench in run["benchmarks"]]
    lines = ",\n".join(f"  {json.dumps(bench)}" for bench in sorted(slim, key=lambda bench: str(bench["fullname"])))
    rest = json.dumps({key: value for key, value in run.items() if key != "benchmarks"}, indent=1)
    return f'{rest[:-2]},\n "benchmarks": [\n{lines}\n ]\n}}\n'
