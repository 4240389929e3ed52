"""A model in a local transformers folder: config.json, a tokenizer, and safetensors in one file or in shards."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from nanofw.errors import CheckpointError
from nanofw.weights.checkpoint import INDEX, WEIGHTS, read_json, shorten, verify
from nanofw.weights.source import ModelSource

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


class FolderSource(ModelSource):
    """A transformers folder, verified when this is made.

    Args:
        name: as the user wrote it. path: the folder.
        trust_remote_code: run code that the checkpoint brings. allow_pickle: read pickled weights.

    Raises:
        CheckpointError: a file is missing or damaged, or asks for a permission that was not given.
    """

    def __init__(self, name: str, path: Path, *, trust_remote_code: bool = False, allow_pickle: bool = False) -> None:
        self.name, self.path, self._trust = name, path, trust_remote_code
        raw = read_json(path / "config.json")
        self._refuse_code(path / "config.json", raw)
        if "quantization_config" in raw:
            method = raw["quantization_config"].get("quant_method", "an unknown method")
            raise CheckpointError(f"{path / 'config.json'}: weights quantised by {method}; only plain ones are read")
        self._tensors = verify(path, allow_pickle=allow_pickle)
        self._config = self._load_config()
        self.config = self._config.get_text_config(decoder=True)
        self._tokenizer: Any = None
        self.eos_token_ids = self._find_eos()

    def load_module(self, dtype: torch.dtype, device: torch.device, attn_implementation: str) -> torch.nn.Module:
        """Every weight comes from the checkpoint, and every tensor of the checkpoint has its place.

        Tensors that transformers itself knows to be left over are ignored: `rotary_emb.inv_freq` and `position_ids`,
        which old versions saved and new ones compute, and what the model's class lists as such.
        """
        from transformers import AutoModelForCausalLM

        try:
            with quiet():
                module, info = AutoModelForCausalLM.from_pretrained(
                    self.path,
                    config=copy.deepcopy(self._config),
                    dtype=dtype,
                    attn_implementation=attn_implementation,
                    use_safetensors=bool(self._tensors),
                    trust_remote_code=self._trust,
                    local_files_only=True,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # so that they are listed, and all of them
                )
        except Exception as error:  # the loader and a model's own code raise anything
            raise CheckpointError(f"cannot load {self.path}: {first_line(error)}") from error
        self._refuse_gaps(module, info)
        loaded: torch.nn.Module = module.to(device).eval().requires_grad_(False)
        return loaded

    def load_tokenizer(self) -> Any:
        """From the folder, read once."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            if (path := self.path / "tokenizer_config.json").is_file():
                self._refuse_code(path, read_json(path))
            try:
                with quiet():
                    self._tokenizer = AutoTokenizer.from_pretrained(
                        self.path, trust_remote_code=self._trust, local_files_only=True
                    )
            except Exception as error:  # whatever is wrong with the files, they cannot be used
                raise CheckpointError(f"cannot load the tokenizer of {self.path}: {first_line(error)}") from error
        return self._tokenizer

    @property
    def dtype(self) -> torch.dtype:
        """The one that most bytes of the weights have; what the config says if none is plain floating point."""
        sizes: Counter[str] = Counter()
        for tensor in self._tensors.values():
            sizes[tensor.dtype] += tensor.nbytes
        plain = [_DTYPES[name] for name, _ in sizes.most_common() if name in _DTYPES]
        return plain[0] if plain else self.config.dtype or torch.float32

    def _load_config(self) -> Any:
        from transformers import AutoConfig

        try:
            with quiet():
                return AutoConfig.from_pretrained(self.path, trust_remote_code=self._trust, local_files_only=True)
        except Exception as error:  # transformers validates configs in many ways
            raise CheckpointError(f"cannot read {self.path / 'config.json'}: {first_line(error)}") from error

    def _refuse_code(self, path: Path, raw: Mapping[str, Any]) -> None:
        if raw.get("auto_map") and not self._trust:
            raise CheckpointError(f"{path} brings its own code (auto_map); set trust_remote_code if you trust it")

    def _refuse_gaps(self, module: Any, info: Mapping[str, Any]) -> None:
        """Turn what transformers would fill with random numbers, or leave out, into errors."""
        if mismatched := sorted(info["mismatched_keys"]):
            name, found, expected = mismatched[0]
            raise CheckpointError(
                f"{self.file_of(name)}: tensor {name} has shape {list(found)}, but the config asks for "
                f"{list(expected)}" + (f" (and {len(mismatched) - 1} more differ)" if mismatched[1:] else "")
            )
        if missing := sorted(info["missing_keys"]):
            file = self.file_of(missing[0])
            raise CheckpointError(f"{file} lacks weights that the config asks for: {shorten(missing)}")
        if unexpected := sorted(info["unexpected_keys"]):
            file = self.file_of(unexpected[0])
            raise CheckpointError(f"{file} holds weights that the config has no place for: {shorten(unexpected)}")
        head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
        if head is None or embedding is None:
            return
        if getattr(self.config, "tie_word_embeddings", False) and head.weight.data_ptr() != embedding.weight.data_ptr():
            raise CheckpointError(
                f"{self.path} ties the output head to the embedding (tie_word_embeddings in config.json), but holds a "
                "head with other values; correct the config"
            )

    def file_of(self, tensor: str) -> Path:
        """The file that holds a tensor, or should; the index of shards if that does not name it."""
        if (index := self.path / INDEX).is_file():
            return self.path / str(read_json(index)["weight_map"].get(tensor, INDEX))
        return self.path / WEIGHTS if self._tensors else self.path

    def _find_eos(self) -> tuple[int, ...]:
        generation = self.path / "generation_config.json"
        found = [read_json(generation).get("eos_token_id")] if generation.is_file() else []
        found += [getattr(config, "eos_token_id", None) for config in (self.config, self._config)]
        with suppress(CheckpointError):  # said when the tokenizer is asked for; ids can be generated without one
            found.append(self.load_tokenizer().eos_token_id)
        return union(found)


def union(values: Iterable[int | list[int] | None]) -> tuple[int, ...]:
    """Ids of several settings, each an id, a list of ids, or nothing, in order and without repeats."""
    flat = [i for value in values for i in (value if isinstance(value, (list, tuple)) else [value])]
    return tuple(dict.fromkeys(i for i in flat if i is not None))


def first_line(error: Exception) -> str:
    """What an error says, as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from printing: what its log says about a load, nanofw raises. Its settings are put back."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
