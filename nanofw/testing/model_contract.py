"""What a model promises beside its logits: its spec, one call of the attention a layer, no state, plain refusals."""

from __future__ import annotations

import copy
from typing import Any

import torch

from nanofw.attention import Attention, Prologue
from nanofw.batch import Batch
from nanofw.errors import PluginError
from nanofw.kv_cache import LayerKV
from nanofw.testing.model_base import ModelBase, Oracle, Served, find, plain_attention, sequence
from nanofw.testing.model_sources import FAMILIES
from nanofw.testing.suite import cases
from nanofw.testing.tolerance import check_same_bits


class Recorded(Attention):
    """Hands everything to another attention, and keeps the caches that were attended over."""

    def __init__(self, inner: Attention) -> None:
        super().__init__(inner.spec, None)
        self.inner = inner
        self.calls: list[LayerKV] = []

    def plan(self, batch: Batch) -> Any:
        """The inner one's."""
        return self.inner.plan(batch)

    def attend(self, q: torch.Tensor, kv: LayerKV, batch: Batch) -> torch.Tensor:
        """Not counted: whoever calls it alone has not written K and V."""
        return self.inner.attend(q, kv, batch)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: LayerKV, batch: Batch) -> torch.Tensor:
        """Counted."""
        self.calls.append(kv)
        return self.inner.forward(q, k, v, kv, batch)

    def forward_packed(self, qkv: torch.Tensor, prologue: Prologue, kv: LayerKV, batch: Batch) -> torch.Tensor:
        """Counted."""
        self.calls.append(kv)
        return self.inner.forward_packed(qkv, prologue, kv, batch)


class Contract(ModelBase):
    """Its word can be relied on."""

    @cases(lambda suite: suite.models)
    def test_the_spec(self, case: str) -> None:
        """Geometry, vocabulary, length, dtype and device are those of the model, and the bytes of a step those of it.

        Fails if the cache is built for other heads, requests are admitted beyond the model's positions, or a report of
        bandwidth counts other bytes. Source: the contract.
        """
        spec, source = self.model(case).spec, find(case)
        module: Any = source.load_module(self.dtype, torch.device("cpu"), "eager")
        config = source.config
        assert len(spec.layers) == config.num_hidden_layers
        heads = {(layer.num_heads, layer.num_kv_heads) for layer in spec.layers}
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        assert heads == {(config.num_attention_heads, kv_heads)}
        assert spec.vocab_size == module.get_output_embeddings().weight.shape[0]
        assert spec.max_len == config.max_position_embeddings
        assert (spec.dtype, spec.device.type) == (self.dtype, self.torch_device().type)
        head, embedding = module.get_output_embeddings().weight, module.get_input_embeddings().weight
        weights = sum(p.numel() for p in module.parameters()) - (0 if head is embedding else embedding.numel())
        share = spec.weight_bytes / (weights * self.dtype.itemsize)
        assert 0.98 < share < 1.02, f"weight_bytes is {share:.2f} of the weights that a step reads"

    @cases(lambda suite: suite.models)
    def test_attention_is_called_once_a_layer(self, case: str) -> None:
        """In order, each layer with its own cache, by `forward` or `forward_packed`, in prefill and in decode.

        Fails for layers that share a cache, leave one out, or go round the attention. Source: the contract.
        """
        model = self.model(case)
        recorded = Recorded(plain_attention(model))
        served = Served(model, recorded)
        row = served.open(sequence(5, 0, model.spec.vocab_size))
        for count in (4, 1):
            recorded.calls.clear()
            served.check({row: count}, self.oracle(case), case)
            called = [kv.index for kv in recorded.calls]
            assert called == list(range(len(model.spec.layers))), f"{case}: layers {called} called the attention"
            assert all(kv is served.cache.layers[kv.index] for kv in recorded.calls), f"{case}: a cache of its own"

    @cases(lambda suite: suite.models)
    def test_it_keeps_nothing_of_a_request(self, case: str) -> None:
        """Two engines share one model and take turns; a step again gives the same bits; a batch is not written to.

        Fails for anything kept from step to step, be it a cache, a length or a buffer. Source: the contract.
        """
        one, first = self.served(case, (6, 3))
        other, second = self.served(case, (9,))
        logits = {}
        for turn, counts in enumerate(({0: 4, 1: 2}, {0: 1, 1: 1}, {0: 1})):
            logits[turn] = one.run({row: counts[i] for i, row in enumerate(first) if i in counts})
            other.check(dict.fromkeys(second, 3), self.oracle(case), f"{case}, turns")
        again, rows = self.served(case, (6, 3))
        for turn, counts in enumerate(({0: 4, 1: 2}, {0: 1, 1: 1}, {0: 1})):
            _, batch = again.batch({row: counts[i] for i, row in enumerate(rows) if i in counts})
            tensors = {name: t for name in batch.__slots__ if isinstance(t := getattr(batch, name), torch.Tensor)}
            before = {name: tensor.clone() for name, tensor in tensors.items()}
            check_same_bits(again.forward(batch), logits[turn], f"{case}: step {turn} alone and with others between")
            written = [name for name, tensor in tensors.items() if not torch.equal(tensor, before[name])]
            assert not written, f"{case}: the batch's {', '.join(written)} were written to"

    @cases(lambda suite: suite.models)
    def test_the_source_is_as_it_was(self, case: str) -> None:
        """Neither the config nor another model of the same source is changed.

        Fails for a plugin that edits the config it is given, or a registry of transformers that others use. Source:
        transformers#45943.
        """
        source = find(case)
        cpu, ids = torch.device("cpu"), torch.tensor([sequence(9, 1, 96)])
        before = copy.deepcopy(source.config.to_dict())
        module: Any = source.load_module(torch.float32, cpu, "eager")
        expected = module(ids).logits
        self.model(case)  # skips if it is refused
        served = Served(self.load(source))
        served.run({served.open(sequence(9, 1, 96)): 9})
        changed = [key for key, value in source.config.to_dict().items() if before.get(key) != value]
        assert not changed, f"{case}: the source's config has another {', '.join(changed)}"
        assert torch.equal(module(ids).logits, expected), f"{case}: another model of this config computes otherwise"
        fresh: Any = source.load_module(torch.float32, cpu, "eager")
        assert torch.equal(fresh(ids).logits, expected), f"{case}: a model loaded afterwards computes otherwise"

    @cases(lambda suite: FAMILIES)
    def test_right_or_refused(self, case: str) -> None:
        """Each family, each with something that may be overlooked: the logits of transformers, or a refusal.

        A refusal is a PluginError that names the model and says why. Fails for a model that is served wrongly. Source:
        mistral.rs#2094, where a window was never passed on.
        """
        source, refusal = find(case), None
        try:
            model = self.load(source)
        except PluginError as error:
            refusal = str(error)
        if refusal is not None:
            words = refusal.replace(source.name, "").split()
            told = source.name in refusal and len(words) > 3
            assert told, f"{case}: a refusal must name the model ({source.name!r}) and say why, got {refusal!r}"
            return
        served = Served(model)
        work = {served.open(sequence(length, length, model.spec.vocab_size)): length for length in (36, 2)}
        oracle = Oracle(source, self.dtype)
        served.check({row: length - 1 for row, length in work.items()}, oracle, f"{case}, prompts")
        served.check(dict.fromkeys(work, 1), oracle, f"{case}, decode")
