"""Read the record of a bench."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from nanofw.errors import ConfigError
from nanofw.options import listing

READABLE = (1, 2)
"""Formats that this version can read. The first had no look at single steps, no roofline and no laws."""

Record = dict[str, Any]


def read(file: Path) -> Record:
    """The record in a file, with what an older format lacks as empty. Raises ConfigError."""
    try:
        found = json.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("points"), list) or "combinations" not in found:
        raise ConfigError(f"{file} is not a report of nanofw bench --json")
    if found.get("format") not in READABLE:
        raise ConfigError(
            f"{file} has format {found.get('format')!r}; this version reads {listing(map(str, READABLE))}: "
            "use the nanofw that wrote it, or measure again"
        )
    return {"telemetry": None, "waited": None, "roof": None, "roofline": [], "explained": {}, "laws": {}} | found


def by_label(record: Record) -> dict[str, list[dict[str, Any]]]:
    """Points of each combination, smallest batch first, under the names that the record gives them."""
    labels = list(record["combinations"])
    size = len(record["points"]) // max(len(labels), 1)
    return {label: record["points"][i * size : (i + 1) * size] for i, label in enumerate(labels)}


def need(*packages: str) -> None:
    """Raises: ConfigError where a package that draws or writes pages is missing."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"reports need {listing(missing)}: pip install 'nanofw[report]'")
