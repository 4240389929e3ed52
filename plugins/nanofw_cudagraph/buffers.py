"""Static inputs and outputs of captured steps: one buffer, one copy a step, the same addresses for ever.

A graph replays launches with the addresses they were captured with, so a step is written into fixed places. All inputs
of a step lie in one device buffer; the host fills a pinned copy of it and one transfer moves it. A bucket holds more
requests than the step has, as a rule: the rest are padding, which have no context, write nowhere (slot -1) and leave
their token in a row that nobody reads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nanofw.batch import NULL_BLOCK, Batch, Sampling, Step

WIDE = ("token_ids", "positions", "slots", "feeds", "rows", "top_k", "seed")  # int64
NARROW = ("seq_lens", "temperature", "top_p")  # int32, float32, float32
STAGES = 3
"""Pinned copies: the host fills one while the transfer of an earlier one may still be under way."""


class StaticInputs:
    """The inputs of one bucket: `size` decode requests, block tables of `columns` columns.

    Args:
        size: requests the bucket holds.
        columns: block-table columns, which bound the context.
        spare_row: row of `last_token` that padding writes to; the one after it always holds zero.
    """

    def __init__(self, size: int, columns: int, spare_row: int, device: torch.device) -> None:
        self.size, self.columns, self.spare_row, self.device = size, columns, spare_row, device
        self.zero_row = spare_row + 1
        words = len(WIDE) * size + -(-(len(NARROW) * size + size * columns) // 2)
        pinned = device.type == "cuda"
        self._stages = [torch.zeros(words, dtype=torch.int64, pin_memory=pinned) for _ in range(STAGES)]
        self._host = [_views(stage.numpy(), size) for stage in self._stages]
        self._turn = 0
        self._buffer = torch.zeros(words, dtype=torch.int64, device=device)
        self.on_device: dict[str, torch.Tensor] = {
            name: self._buffer[i * size : (i + 1) * size] for i, name in enumerate(WIDE)
        }
        narrow = self._buffer[len(WIDE) * size :].view(torch.int32)
        self.on_device |= {name: narrow[i * size : (i + 1) * size] for i, name in enumerate(NARROW)}
        for name in ("temperature", "top_p"):
            self.on_device[name] = self.on_device[name].view(torch.float32)
        table = narrow[len(NARROW) * size :][: size * columns]
        self.on_device["block_table"] = table.view(size, columns)
        self.ends = torch.arange(size + 1, dtype=torch.int32, device=device)
        self.each = torch.arange(size, dtype=torch.int64, device=device)

    def fill(self, step: Step) -> None:
        """Write `step` into the static inputs, padding what it leaves free. Does not wait for the device."""
        self._turn = (self._turn + 1) % STAGES
        host, count = self._host[self._turn], step.num_requests
        host["token_ids"][:count] = step.token_ids
        host["positions"][:count] = step.positions
        host["slots"][:count] = step.slot_mapping
        host["rows"][:count] = step.rows
        host["feeds"][:] = self.zero_row
        host["feeds"][step.feeds] = step.rows[step.feeds]
        host["token_ids"][step.feeds] = 0
        host["seq_lens"][:count] = step.seq_lens
        host["slots"][count:] = -1
        host["rows"][count:] = self.spare_row
        host["seq_lens"][count:] = 0
        host["token_ids"][count:] = 0
        host["positions"][count:] = 0
        table = host["block_table"][: self.size * self.columns].reshape(self.size, self.columns)
        given = step.block_table
        table[:count, : given.shape[1]] = given
        table[:count, given.shape[1] :] = NULL_BLOCK
        table[count:] = NULL_BLOCK
        if step.sampling is not None:
            for name in ("temperature", "top_p", "top_k", "seed"):
                host[name][:count] = getattr(step.sampling, name)
                host[name][count:] = 0
        self._buffer.copy_(self._stages[self._turn], non_blocking=True)

    def batch(self, last_token: torch.Tensor, block_size: int) -> Batch:
        """The inputs as a `Batch`.

        Its token ids are made on the device: what `feeds` names in `last_token` plus what the host knows, one of them
        zero.
        """
        data = self.on_device
        bound = self.columns * block_size
        return Batch(
            token_ids=last_token[data["feeds"]] + data["token_ids"],
            positions=data["positions"],
            slot_mapping=data["slots"],
            cu_seqlens_q=self.ends,
            seq_lens=data["seq_lens"],
            block_table=data["block_table"],
            logits_indices=self.each,
            max_query_len=1,
            max_seq_len=bound,
            query_lens_host=np.ones(self.size, dtype=np.int64),
            seq_lens_host=np.full(self.size, bound, dtype=np.int64),
            num_padding=self.size,  # a bound: how many rows are padding changes from replay to replay
        )

    def sampling(self, like: Sampling | None) -> Sampling | None:
        """Sampling parameters in the static inputs, with the host flags of `like`."""
        if like is None:
            return None
        data = self.on_device
        return Sampling(
            temperature=data["temperature"],
            top_k=data["top_k"],
            top_p=data["top_p"],
            seed=data["seed"],
            position=data["seq_lens"].long(),
            greedy=like.greedy,
            truncated=like.truncated,
            logprobs=like.logprobs,
        )


def _views(words: np.ndarray[Any, Any], size: int) -> dict[str, np.ndarray[Any, Any]]:
    views = {name: words[i * size : (i + 1) * size] for i, name in enumerate(WIDE)}
    narrow = words[len(WIDE) * size :].view(np.int32)
    views |= {name: narrow[i * size : (i + 1) * size] for i, name in enumerate(NARROW)}
    views |= {name: views[name].view(np.float32) for name in ("temperature", "top_p")}
    return views | {"block_table": narrow[len(NARROW) * size :]}
