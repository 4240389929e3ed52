"""What all model checks share: a model under test, steps for it made by hand, and transformers on the same weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from nanofw.attention import Attention, AttentionSpec
from nanofw.batch import NULL_BLOCK, Batch, Step
from nanofw.component import NoOptions
from nanofw.errors import PluginError
from nanofw.model import Model
from nanofw.options import build_options
from nanofw.testing.by_hand import ByHand
from nanofw.testing.model_sources import FAMILIES, FamilySource
from nanofw.testing.plain_attention import PlainAttention
from nanofw.testing.suite import Suite, environment_seed
from nanofw.weights import ModelSource, resolve

ROWS, MAX_LEN, BLOCK_SIZE = 34, 64, 4


class Oracle:
    """The same weights in transformers: its logits in float64, and how far its own in the model's dtype are from them.

    Args:
        source: the weights. dtype: of the model under test.
    """

    def __init__(self, source: ModelSource, dtype: torch.dtype) -> None:
        cpu = torch.device("cpu")
        self._exact: Any = source.load_module(torch.float64, cpu, "eager")
        self._plain: Any = source.load_module(dtype, cpu, "eager")
        self._eps = torch.finfo(dtype).eps
        self._known: dict[tuple[int, ...], tuple[torch.Tensor, float]] = {}

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """`[n, V]` float64: the logits of every token."""
        return self._find(tokens)[0]

    def allowed(self, tokens: Sequence[int]) -> float:
        """Largest error that a right model may show: four times that of the plain computation, and some rounding.

        A right model rounds in another order than transformers, in sums as long. Over the families here and two ways
        to write their layers, the largest error in float32 was 0.44 of this; a longrope that took the wrong factors
        exceeded it 190,000 times.
        """
        return self._find(tokens)[1]

    def _find(self, tokens: Sequence[int]) -> tuple[torch.Tensor, float]:
        key = tuple(tokens)
        if key not in self._known:
            ids = torch.tensor([key])
            with torch.inference_mode():
                exact, plain = (
                    module(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0].double()
                    for module in (self._exact, self._plain)
                )
            allowed = 4 * (exact - plain).abs().max() + 16 * self._eps * exact.abs().max()
            self._known[key] = exact, allowed.item()
        return self._known[key]


class Served(ByHand):
    """A model, and sequences for it: each is computed in pieces, as the caller says.

    Args:
        model: the model under test. attention: attends for it.
    """

    def __init__(self, model: Model, attention: Attention | None = None) -> None:
        spec = model.spec
        super().__init__(spec, rows=ROWS, max_len=MAX_LEN, blocks=ROWS * MAX_LEN // BLOCK_SIZE, block_size=BLOCK_SIZE)
        self.model = model
        self.attention = attention or plain_attention(model)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits of a step."""
        return self.model.forward(batch.with_plan(self.attention.plan(batch)), self.attention, self.cache.layers)

    def batch(self, work: Mapping[int, int]) -> tuple[Step, Batch]:
        """The next so many tokens of each row."""
        step = self.plan(work)
        return step, Batch.from_step(step, self.model.spec.device)

    def run(self, work: Mapping[int, int]) -> torch.Tensor:
        """Logits `[B, V]` of each row's last token, after the next so many of it."""
        return self.forward(self.batch(work)[1])

    def check(self, work: Mapping[int, int], oracle: Oracle, what: str) -> None:
        """Run a step, and compare with the oracle."""
        logits = self.run(work)
        self.compare(work, logits, oracle, what)

    def compare(self, work: Mapping[int, int], logits: torch.Tensor, oracle: Oracle, what: str) -> None:
        """Logits of a step that has been run, the last token's of each row, against the oracle."""
        expected = (len(work), self.model.spec.vocab_size)
        assert logits.shape == expected, f"{what}: logits are {tuple(logits.shape)}, must be {expected}"
        for row, found in zip(work, logits, strict=True):
            tokens, done = self.tokens(row), int(self.table.computed[row])
            check_close(found, oracle.logits(tokens)[done - 1], oracle.allowed(tokens), f"{what}, token {done - 1}")

    def left(self, row: int) -> int:
        """Tokens of a sequence that have not been computed."""
        return int(self.table.known[row] - self.table.computed[row])

    def tokens(self, row: int) -> list[int]:
        """All tokens of a sequence."""
        return self.table.tokens[row, : self.table.known[row]].tolist()  # type: ignore[no-any-return]


class ModelBase(Suite):
    """Base of the groups of checks.

    Attributes a subclass sets:
        backend: a subclass of `Model`.
        models: names that `--model` takes, of small ones. What it refuses is skipped with its reasons.
        dtype: of weights and activations.
        device: where to test it; the environment's `NANOFW_TEST_DEVICE` if not given, else the CPU.
    """

    backend: ClassVar[type[Model]]
    models: ClassVar[Sequence[str]] = (
        "dummy:tiny",
        "dummy:llama-tiny",
        "dummy:untied-tiny",
        "dummy:smollm2-tiny",
        "dummy:gemma-tiny",
        "dummy:gemma3-tiny",
    )
    dtype: ClassVar[torch.dtype] = torch.float32
    device: ClassVar[str | None] = None
    _models: ClassVar[dict[str, Model | PluginError]]
    _oracles: ClassVar[dict[tuple[str, torch.dtype], Oracle]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._models = {}

    def tables(self, model: Model) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Where the output head and the embedding of a loaded model lie, for a model whose head may be tied."""
        return None

    @classmethod
    def torch_device(cls) -> torch.device:
        """Where the checks run."""
        return torch.device(cls.device or os.environ.get("NANOFW_TEST_DEVICE") or "cpu")

    def load(self, source: ModelSource) -> Model:
        """The model under test. Raises PluginError if it refuses; skips if it does not run here."""
        if reason := self.backend.unavailable():
            pytest.skip(f"{self.backend.__name__} is unavailable here: {reason}")
        options = build_options(self.backend.Options, self.options, self.backend.__name__)
        return self.backend(source, self.dtype, self.torch_device(), options)

    def model(self, name: str) -> Model:
        """The model of this name, loaded once; skips the test with its reasons if the plugin refuses it."""
        if name not in self._models:
            try:
                self._models[name] = self.load(find(name))
            except PluginError as error:
                self._models[name] = error
        found = self._models[name]
        if isinstance(found, PluginError):
            pytest.skip(f"{self.backend.__name__} refuses: {found}")
        return found

    def oracle(self, name: str) -> Oracle:
        """What transformers says of a model."""
        key = (name, self.dtype)
        if key not in self._oracles:
            self._oracles[key] = Oracle(find(name), self.dtype)
        return self._oracles[key]

    def served(self, name: str, lengths: Sequence[int]) -> tuple[Served, dict[int, int]]:
        """The model, and sequences of so many tokens; nothing is computed yet. Second, the work of all of them."""
        served = Served(self.model(name))
        vocab = served.model.spec.vocab_size
        return served, {served.open(sequence(length, i, vocab)): length for i, length in enumerate(lengths)}


def find(name: str) -> ModelSource:
    """A model by its name: a small family, or what `--model` takes."""
    return FamilySource(name) if name in FAMILIES else resolve(name)


def plain_attention(model: Model) -> PlainAttention:
    """The plain attention for a model."""
    spec = model.spec
    return PlainAttention(AttentionSpec(spec.layers, spec.dtype, spec.device, BLOCK_SIZE), NoOptions())


def sequence(length: int, seed: int, vocab_size: int) -> list[int]:
    """Token ids."""
    return np.random.default_rng([environment_seed(), seed, length]).integers(0, min(vocab_size, 256), length).tolist()  # type: ignore[no-any-return]


def check_close(found: torch.Tensor, expected: torch.Tensor, allowed: float, what: str) -> None:
    """Logits `[V]` of one token. Raises AssertionError that says how far they are off, and what was allowed."""
    error = (found.detach().cpu().double() - expected).abs()
    if error.isnan().any():
        raise AssertionError(f"{what}: {int(error.isnan().sum())} of {error.numel()} logits are NaN")
    worst = error.max().item()
    if worst > allowed:
        raise AssertionError(
            f"{what}: logits are off by {worst:.3g} where {allowed:.3g} is allowed (they reach "
            f"{expected.abs().max().item():.3g}), at id {int(error.argmax())}"
        )


def padded(batch: Batch, count: int, token: int) -> Batch:
    """The batch with so many padding requests behind it, as a graph's bucket has them; their token is `token`."""

    def more(tensor: torch.Tensor, value: int) -> torch.Tensor:
        return torch.cat((tensor, tensor.new_full((count, *tensor.shape[1:]), value)))

    ends = batch.num_tokens + torch.arange(1, count + 1, dtype=torch.int32, device=batch.token_ids.device)
    return replace(
        batch,
        token_ids=more(batch.token_ids, token),
        positions=more(batch.positions, 0),
        slot_mapping=more(batch.slot_mapping, -1),
        cu_seqlens_q=torch.cat((batch.cu_seqlens_q, ends)),
        seq_lens=more(batch.seq_lens, 0),
        block_table=more(batch.block_table, NULL_BLOCK),
        logits_indices=torch.cat((batch.logits_indices, ends.long() - 1)),
        query_lens_host=np.append(batch.query_lens_host, [1] * count),
        seq_lens_host=np.append(batch.seq_lens_host, [0] * count),
        num_padding=count,
    )
