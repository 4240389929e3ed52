"""Steps made by hand: a table, a cache, and no scheduler between a test and what it wants computed."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from nanofw.batch import Step, pack
from nanofw.component import Component, Kind
from nanofw.kv_cache import KVCache, KVCacheSpec
from nanofw.model import ModelSpec
from nanofw.options import build_options
from nanofw.plugins import PluginHost
from nanofw.request import Request, SamplingParams
from nanofw.sampler import Sampler
from nanofw.table import RequestTable

if TYPE_CHECKING:
    from nanofw.table import TokenIds

GREEDY = SamplingParams(temperature=0)


class ByHand:
    """Does to its requests what scheduler and engine do, but the caller says who computes how much.

    Args:
        spec: the model that will run the steps.
        rows: most requests at once. max_len: most tokens of each.
        blocks: blocks in the pool beside the null block. block_size: slots a block.
    """

    def __init__(self, spec: ModelSpec, *, rows: int, max_len: int, blocks: int, block_size: int = 4) -> None:
        cache_cls = cast("type[KVCache]", plugin("kv_cache", "paged"))
        room = KVCacheSpec(spec.layers, blocks + 1, rows, max_len, spec.dtype, spec.device)
        self.cache = cache_cls(room, build_options(cache_cls.Options, {"block_size": block_size}, "kv_cache"))
        self.table = RequestTable(rows, max_len)
        self.opened = 0  # requests so far

    def open(self, prompt: Sequence[int], params: SamplingParams = GREEDY) -> int:
        """Begin a request. Returns its row; a seed that `params` does not give is its number."""
        seed = self.opened if params.seed is None else params.seed
        name, self.opened = str(self.opened), self.opened + 1
        return self.table.open(Request(name, tuple(prompt), params, seed, self.table.max_len, "length", ()))

    def close(self, row: int) -> list[int]:
        """End a request and give back what it holds. Returns the tokens it was given."""
        request = cast("Request", self.table.requests[row])
        self.cache.free(self.table.close(request))
        return request.output_ids

    def plan(self, work: Mapping[int, int]) -> Step:
        """A step that computes so many tokens of each row, in this order."""
        rows, counts = (np.fromiter(part, np.int64, len(work)) for part in (work, work.values()))
        assert self.cache.allocate(rows, self.table.computed[rows] + counts), "the pool is too small for this check"
        step = pack(self.table, rows, counts, self.cache.block_table, self.cache.block_size)
        self.table.computed[rows] = step.seq_lens
        self.table.length[rows] += step.emits
        return step

    def take(self, step: Step, tokens: TokenIds) -> None:
        """Take a step's tokens in, one a request; those of requests that have ended meanwhile are dropped."""
        table = self.table
        live = table.ticket[step.rows] == step.tickets
        rows = step.rows[live & step.emits]
        table.tokens[rows, table.known[rows]] = np.asarray(tokens)[live & step.emits]
        table.known[rows] += 1
        table.scored[step.rows[live]] &= (step.seq_lens < table.prompt[step.rows])[live]

    def pools(self) -> list[torch.Tensor]:
        """Keys and values of every layer, `[slots, Hkv, D]` each."""
        return [pool.flatten(0, 1) for layer in self.cache.layers for pool in (layer.key, layer.value)]


@functools.cache
def plugin(kind: Kind, name: str) -> type[Component]:
    """One of the plain plugins."""
    return PluginHost.load(only=("basics",)).get(kind, name).load()


def default_sampler() -> Sampler:
    """The plain sampler."""
    cls: Any = plugin("sampler", "default")
    return cast("Sampler", cls(cls.Options()))
