"""SmolLM2."""

from __future__ import annotations

from pathlib import Path

from nanofw.errors import CheckpointError

NAME = "smollm2"


def find() -> Path:
    raise CheckpointError("run: nanofw model pull smollm2")
