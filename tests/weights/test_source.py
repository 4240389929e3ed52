"""What `--model` may say, and what the hub is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from nanofw.errors import CheckpointError
from nanofw.weights import resolve, smollm2


def refused(name: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolve(name)
    return str(caught.value)


def test_a_folder_goes_before_the_hub(saved: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved()
    monkeypatch.chdir(folder.parent.parent)
    name = f"{folder.parent.name}/{folder.name}"
    assert resolve(name).name == name


def test_a_home_folder(saved: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(saved().parent))
    assert resolve(f"~/{saved().name}").eos_token_ids


def test_a_file_is_not_a_folder(saved: Callable[..., Path]) -> None:
    assert "name the transformers folder that it lies in" in refused(str(saved() / "model.safetensors"))


@pytest.mark.parametrize("name", ["nosuch", "a/b/c", "", "../x", "org/", "org/na me"])
def test_no_such_model(name: str) -> None:
    message = refused(name)
    assert f"no model {name!r}" in message
    assert "dummy:tiny" in message


def test_a_slip_is_corrected() -> None:
    assert "did you mean 'smollm2'?" in refused("smolm2")


def test_smollm2_that_was_not_pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOFW_CACHE", str(tmp_path))
    assert refused(smollm2.NAME).endswith("run: nanofw model pull smollm2")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, saved: Callable[..., Path]) -> list[dict[str, Any]]:
    """The hub, which has one model. What it was asked for is kept."""
    asked: list[dict[str, Any]] = []

    def download(name: str, **how: Any) -> str:
        asked.append({"name": name, **how})
        if name != "org/model-1.5_x":
            raise OSError(f"404 Client Error.\n\nRepository Not Found for url: .../{name}.")
        return str(saved())

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


def test_hub(hub: list[dict[str, Any]]) -> None:
    assert resolve("org/model-1.5_x").config.model_type == "qwen3"
    (asked,) = hub
    assert "*.safetensors" in asked["allow_patterns"]
    assert not {"*.py", "*.bin", "*.pt", "*"} & set(asked["allow_patterns"])


@pytest.mark.parametrize(("allowed", "pattern"), [("trust_remote_code", "*.py"), ("allow_pickle", "*.bin")])
def test_code_and_pickles_are_fetched_only_if_allowed(hub: list[dict[str, Any]], allowed: str, pattern: str) -> None:
    resolve("org/model-1.5_x", **{allowed: True})
    assert pattern in hub[0]["allow_patterns"]


def test_what_the_hub_says_is_one_line(hub: list[dict[str, Any]]) -> None:
    message = refused("org/other")
    assert message.startswith("cannot fetch model 'org/other' from the Hugging Face hub: 404 Client Error; check ")
    assert "\n" not in message
