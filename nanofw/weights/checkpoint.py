"""Is a checkpoint whole? Found out from the files' headers, before anything is loaded.

A safetensors file is an 8-byte little-endian length, a JSON header that gives each tensor's dtype, shape and place, and
the tensors. Reading the headers costs milliseconds and finds what a broken download or a wrong index does to a file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanofw.errors import CheckpointError
from nanofw.options import listing

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
MAX_HEADER = 100_000_000

_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
_BITS |= {"U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64}
_BITS |= {"F64": 64, "C64": 64}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as a header describes it: dtype by its safetensors name ("BF16"), and size in bytes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def verify(folder: Path, *, allow_pickle: bool) -> dict[str, Tensor]:
    """Check that all weights of a transformers folder are there and whole.

    Returns:
        Every tensor by name; nothing for a pickled checkpoint, which cannot be looked into.

    Raises:
        CheckpointError: naming the file, and the tensor if it is one that is not whole.
    """
    if (folder / INDEX).is_file():
        return _verify_shards(folder)
    if (folder / WEIGHTS).is_file():
        return read_header(folder / WEIGHTS)
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if not pickles:
        raise CheckpointError(f"{folder} holds no weights: there is neither {WEIGHTS} nor {INDEX}")
    if not allow_pickle:
        raise CheckpointError(
            f"{folder / pickles[0]} is a pickled checkpoint, which can run code when it is read; convert it to "
            "safetensors, or set allow_pickle if you trust it"
        )
    loadable = {"pytorch_model.bin", "pytorch_model.bin.index.json"}
    if not any((folder / name).is_file() for name in loadable):
        raise CheckpointError(f"{folder} holds {listing(pickles)}; of pickled weights only pytorch_model.bin is read")
    return {}


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, each checked against the file's size. Raises CheckpointError."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise CheckpointError(f"{path} is damaged: its header should be {length} bytes, of {size} in the file")
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is damaged: its header is no table of tensors")
    header.pop("__metadata__", None)
    places = {name: _place(path, name, entry) for name, entry in header.items()}
    end, held = 0, size - 8 - length
    for name, (tensor, start) in sorted(places.items(), key=lambda item: item[1][1]):
        if start != end:
            raise CheckpointError(f"{path} is damaged: tensor {name} starts at byte {start}, not at {end}")
        end = start + tensor.nbytes
        if end > held:
            raise CheckpointError(
                f"{path} is cut short: tensor {name} ends at byte {end} of the data, of which {held} bytes are there; "
                "fetch the file again"
            )
    if end != held:
        raise CheckpointError(f"{path} is damaged: {held - end} bytes follow the last tensor")
    return {name: tensor for name, (tensor, _) in places.items()}


def _place(path: Path, name: str, entry: Any) -> tuple[Tensor, int]:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = all(isinstance(number, int) and number >= 0 for number in (*shape, start, end))
        nbytes = -(-math.prod(shape) * _BITS[dtype] // 8)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: its header does not describe tensor {name}") from error
    if not whole or end - start != nbytes:
        raise CheckpointError(
            f"{path} is damaged: tensor {name} of {dtype} {list(shape)} takes {nbytes} bytes, not {end - start}"
        )
    return Tensor(dtype, shape, nbytes), start


def _verify_shards(folder: Path) -> dict[str, Tensor]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{folder / INDEX} is damaged: it has no weight_map of tensors to files")
    found: dict[str, Tensor] = {}
    for shard in sorted(set(weight_map.values())):
        path = folder / shard
        names = [name for name, file in weight_map.items() if file == shard]
        if path.parent != folder or not path.is_file():
            raise CheckpointError(f"{path} is missing: {INDEX} says that it holds {names[0]} and {len(names) - 1} more")
        tensors = read_header(path)
        absent = [name for name in names if name not in tensors]
        if absent:
            raise CheckpointError(f"{path} lacks what {INDEX} says it holds: {shorten(absent)}")
        found |= tensors
    return found


def read_json(path: Path) -> Mapping[str, Any]:
    """A JSON object. Raises CheckpointError if the file is missing or holds something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: it is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is damaged: it is no JSON object")
    return found


def shorten(names: list[str], most: int = 5) -> str:
    """The first few of many names, and how many more there are."""
    return listing(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
