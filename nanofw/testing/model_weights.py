"""Where a model's weights come from: a head that is tied or not, and checkpoints that lack something."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanofw.errors import CheckpointError
from nanofw.model import Model
from nanofw.testing.model_base import ModelBase, Oracle, Served, find, sequence
from nanofw.testing.suite import cases
from nanofw.weights import resolve
from nanofw.weights.folder import quiet

HEAD, EMBEDDING, LAST = "lm_head.weight", "model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"


class Weights(ModelBase):
    """Every weight is the checkpoint's own."""

    @cases(lambda suite: ("llama", "llama-untied", "qwen3", "qwen3-untied"))
    def test_from_a_checkpoint(self, case: str) -> None:
        """A folder of safetensors gives the logits of transformers, with a tied head and with one of its own.

        Fails if an untied head is not used, or a tied one is looked for in the file. Sources: pegainfer#544,
        sglang#1508.
        """
        self.model(case)
        with checkpoint(case) as folder:
            source = resolve(str(folder))
            served = Served(self.load(source))
            work = {served.open(sequence(9, 0, served.model.spec.vocab_size)): 9}
            served.check(work, Oracle(source, self.dtype), f"checkpoint of {case}")

    @cases(lambda suite: (f"llama {EMBEDDING}", f"llama-untied {HEAD}", f"llama-untied {EMBEDDING}", f"llama {LAST}"))
    def test_a_missing_tensor_is_an_error(self, case: str) -> None:
        """A CheckpointError that names it; never random weights.

        Fails for a plugin that fills a gap with what memory held, with zeros, or with another tensor. Sources:
        sglang#1508, GradientHQ/parallax#444.
        """
        name, missing = case.split()
        self.model(name)
        with checkpoint(name, without=missing) as folder, pytest.raises(CheckpointError, match=missing):
            self._load_from(folder)

    def _load_from(self, folder: Path) -> Model:
        return self.load(resolve(str(folder)))

    @cases(lambda suite: ("llama", "llama-untied", "qwen3", "qwen3-untied"))
    def test_a_tied_head_is_the_embedding(self, case: str) -> None:
        """Tied: one tensor in memory. Untied: two, with other numbers. For a plugin that says where they lie.

        Fails if a tied head takes memory of its own, or an untied one is left out. Sources: sglang#1508, pegainfer#544.
        """
        model = self.model(case)
        found = self.tables(model)
        if found is None:
            pytest.skip("the suite's `tables` does not say where head and embedding lie")
        head, embedding = found
        one = head.data_ptr() == embedding.data_ptr()
        tied = bool(find(case).config.tie_word_embeddings)
        assert one == tied, f"{case}: head and embedding are {'one tensor' if one else 'two tensors'}"
        assert tied == torch.equal(head, embedding), f"{case}: head and embedding hold the same numbers"


@contextmanager
def checkpoint(name: str, without: str | None = None) -> Iterator[Path]:
    """A folder with the small family's weights, one tensor left out."""
    source = find(name)
    module = source.load_module(torch.float32, torch.device("cpu"), "eager")
    with TemporaryDirectory() as folder:
        path = Path(folder)
        with quiet():
            module.save_pretrained(path)  # type: ignore[operator]
        file = path / "model.safetensors"
        if without is not None:
            tensors = load_file(file)
            del tensors[without]
            save_file(tensors, file, metadata={"format": "pt"})
        yield path
