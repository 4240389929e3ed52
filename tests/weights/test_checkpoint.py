"""What the look at headers finds, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from nanofw.errors import CheckpointError
from nanofw.weights.checkpoint import INDEX, WEIGHTS, Tensor, read_header, read_json, shorten, verify

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "empty": torch.empty(0, 4),
    "b": torch.ones(5, dtype=torch.bfloat16),
    "scalar": torch.tensor(3.0, dtype=torch.float64),
    "flags": torch.tensor([True, False]),
    "ids": torch.arange(3),
}
WHOLE = save(TENSORS, metadata={"format": "pt"})


def encode(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("header") / WEIGHTS


def error(file: Path, content: bytes) -> str:
    file.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(file)
    assert str(file) in str(caught.value)
    return str(caught.value)


def test_tensors_of_a_whole_file(file: Path) -> None:
    file.write_bytes(WHOLE)
    assert read_header(file) == {
        "a": Tensor("F32", (2, 3), 24),
        "empty": Tensor("F32", (0, 4), 0),
        "b": Tensor("BF16", (5,), 10),
        "scalar": Tensor("F64", (), 8),
        "flags": Tensor("BOOL", (2,), 2),
        "ids": Tensor("I64", (3,), 24),
    }


@given(st.integers(0, len(WHOLE) - 1))
def test_a_file_cut_anywhere_is_found_out(file: Path, size: int) -> None:
    message = error(file, WHOLE[:size])
    header = 8 + int.from_bytes(WHOLE[:8], "little")
    assert ("is cut short: tensor " if size >= header else "is damaged") in message


@given(st.binary(min_size=1, max_size=20))
def test_bytes_after_the_last_tensor_are_found_out(file: Path, extra: bytes) -> None:
    assert f"{len(extra)} bytes follow the last tensor" in error(file, WHOLE + extra)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"<!DOCTYPE html><html>not found</html>", "is damaged"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is damaged"),
        (encode(b"{'a'}"), "its header is not JSON"),
        (encode([1]), "its header is no table of tensors"),
        (encode({"t": 3}), "does not describe tensor t"),
        (encode({"t": {"dtype": "F32", "shape": [1]}}), "does not describe tensor t"),
        (encode({"t": entry(dtype="F5")}), "does not describe tensor t"),
        (encode({"t": entry(shape=None)}), "does not describe tensor t"),
        (encode({"t": entry(shape=["2"])}), "does not describe tensor t"),
        (encode({"t": entry(shape=[-2], offsets=(0, -8))}), "tensor t"),
        (encode({"t": entry(offsets=(0, 4))}, bytes(4)), "tensor t of F32 [2] takes 8 bytes, not 4"),
        (encode({"t": entry(offsets=(4, 12))}, bytes(12)), "tensor t starts at byte 4, not at 0"),
        (encode({"t": entry(), "u": entry()}, bytes(8)), "starts at byte 0, not at 8"),
        (encode({"t": entry()}, bytes(7)), "tensor t ends at byte 8 of the data, of which 7 bytes are there"),
    ],
)
def test_damage_is_named(file: Path, content: bytes, words: str) -> None:
    assert words in error(file, content)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no weights: there is neither model\.safetensors nor "):
        verify(tmp_path, allow_pickle=True)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt", "weights.pkl"])
def test_pickles_are_refused_unless_asked_for(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match="allow_pickle") as caught:
        verify(tmp_path, allow_pickle=False)
    assert name in str(caught.value)
    if name == "pytorch_model.bin":
        assert verify(tmp_path, allow_pickle=True) == {}
    else:
        with pytest.raises(CheckpointError, match=r"only pytorch_model\.bin is read"):
            verify(tmp_path, allow_pickle=True)


def test_safetensors_go_before_pickles(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    (tmp_path / WEIGHTS).write_bytes(WHOLE)
    assert set(verify(tmp_path, allow_pickle=True)) == set(TENSORS)


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards(tmp_path: Path) -> None:
    write_index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    (tmp_path / "1.safetensors").write_bytes(save({"a": TENSORS["a"]}))
    (tmp_path / "2.safetensors").write_bytes(save({"b": TENSORS["b"]}))
    assert set(verify(tmp_path, allow_pickle=False)) == {"a", "b"}


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "1.safetensors", "b": "2.safetensors"}, "2.safetensors is missing: .*holds b and 0 more"),
        ({"a": "1.safetensors", "c": "1.safetensors"}, "1.safetensors lacks what .* says it holds: c"),
        ({"a": "../1.safetensors"}, "is missing"),
        ({"a": 1}, "no weight_map"),
        ([], "no weight_map"),
        (None, "no weight_map"),
    ],
)
def test_a_wrong_index_is_named(tmp_path: Path, weight_map: Any, words: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for place in (folder, tmp_path):
        (place / "1.safetensors").write_bytes(save({"a": TENSORS["a"]}))
    write_index(folder, weight_map)
    with pytest.raises(CheckpointError, match=words):
        verify(folder, allow_pickle=False)


def test_a_shard_is_checked_like_a_single_file(tmp_path: Path) -> None:
    write_index(tmp_path, {"a": "1.safetensors"})
    (tmp_path / "1.safetensors").write_bytes(save({"a": TENSORS["a"]})[:-1])
    with pytest.raises(CheckpointError, match=r"1\.safetensors is cut short: tensor a"):
        verify(tmp_path, allow_pickle=False)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda path: None, "cannot read"),
        (lambda path: path.mkdir(), "cannot read"),
        (lambda path: path.write_text("{"), "not JSON"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "not JSON"),
        (lambda path: path.write_text("[]"), "no JSON object"),
    ],
)
def test_json_that_cannot_be_read(tmp_path: Path, write: Callable[[Path], Any], words: str) -> None:
    write(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=words) as caught:
        read_json(tmp_path / "config.json")
    assert "config.json" in str(caught.value)


def test_shorten() -> None:
    assert shorten(["a"]) == "a"
    assert shorten(list("abcdefgh"), most=2).endswith("and 6 more")
