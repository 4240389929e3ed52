"""One step's work: `Step` as the host plans it, `Batch` as the device sees it.

Shape glossary, used all over nanofw:

    T   tokens computed in this step, all requests together (the packed dimension)
    B   requests in this step
    M   columns of the block table
    L   layers          V   vocabulary
    Hq  query heads     Hkv key/value heads     D   head size     G = Hq / Hkv
    BS  slots a block   N   blocks in the pool
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from nanofw.table import IntArray, RequestTable

NULL_BLOCK = 0
"""Block that belongs to nobody. It fills the tails of block tables and is never written."""


@dataclass(frozen=True, slots=True, eq=False)
class Sampling:
    """How to sample each of the B rows. `[B]` arrays on the host, or the same as tensors on the device.

    The last three are facts of the host, so that a sampler takes a branch without asking the device.

    Attributes:
        temperature, top_p: float32.
        top_k, seed: int64.
        position: int64, index of the token to be sampled: the counter of its random number.
        greedy: every row takes the arg-max.
        truncated: some row cuts the tail, by top_k or top_p.
        logprobs: likeliest tokens to report, the most that a row asks for; -1 for none.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    seed: Any
    position: Any
    greedy: bool
    truncated: bool
    logprobs: int

    def to(self, device: torch.device) -> Sampling:
        """The same on `device`."""

        def move(array: np.ndarray[Any, Any]) -> torch.Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        return replace(
            self,
            temperature=move(self.temperature),
            top_k=move(self.top_k),
            top_p=move(self.top_p),
            seed=move(self.seed),
            position=move(self.position),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """Prompt tokens of a step whose log-probabilities are wanted. Arrays on the host, `[P]` each.

    Attributes:
        at: where in the packed dimension the logits are that tell them, those of the token before.
        rows, positions: which tokens they are.
        targets: their ids.
        top: most likely tokens to report beside each.
    """

    at: IntArray
    rows: IntArray
    positions: IntArray
    targets: IntArray
    top: int


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step for all its requests, planned on the host. All arrays are numpy, packed in the order of `rows`.

    What the device needs lies in two buffers, so that a step travels in two copies; the arrays marked * are views.

    Attributes:
        rows: `[B]` the requests' rows in the `RequestTable`; also where the device keeps their last sampled token.
        tickets: `[B]` the rows' tickets when the step was planned.
        query_lens: `[B]` tokens computed for each request.
        seq_lens: `[B]` context including them.
        wide: int64, the concatenation of token_ids* `[T]`, positions* `[T]`, slot_mapping* `[T]`, logits_indices `[B]`.
        narrow: int32, the concatenation of cu_seqlens_q `[B+1]`, seq_lens `[B]`, block_table* `[B, M]`.
        feeds: `[F]` which requests' only token is the one sampled last for their row, known to the device alone.
        emits: `[B]` bool, the sampled token counts; False while a prompt is only part-way through.
        sampling: how to choose the tokens, or None where every row takes the arg-max and nobody asked for logprobs.
        scoring: prompt tokens whose log-probabilities are wanted, or None.
        num_tokens: all of them together, T.
        max_query_len, max_seq_len: upper bounds of the lengths, exact here; but a step with `scoring` is never one of
            plain decode, and says 2 at least.
    """

    rows: IntArray
    tickets: IntArray
    query_lens: IntArray
    seq_lens: IntArray
    wide: IntArray
    narrow: np.ndarray[Any, np.dtype[np.int32]]
    feeds: IntArray
    emits: np.ndarray[Any, np.dtype[np.bool_]]
    sampling: Sampling | None
    scoring: Scoring | None
    num_tokens: int
    max_query_len: int
    max_seq_len: int

    @property
    def num_requests(self) -> int:
        """B, the requests in this step."""
        return len(self.rows)

    @property
    def token_ids(self) -> IntArray:
        """`[T]`; where `feeds` says so, the value is not known here."""
        return self.wide[: self.num_tokens]

    @property
    def positions(self) -> IntArray:
        """`[T]`, of each token in its request."""
        return self.wide[self.num_tokens : 2 * self.num_tokens]

    @property
    def slot_mapping(self) -> IntArray:
        """`[T]`, where each token's K and V go."""
        return self.wide[2 * self.num_tokens : 3 * self.num_tokens]

    @property
    def logits_indices(self) -> IntArray:
        """`[B]`, each request's last token in the packed dimension."""
        return self.wide[3 * self.num_tokens :]

    @property
    def cu_seqlens_q(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """`[B+1]`, where each request's tokens start in the packed dimension."""
        return self.narrow[: self.num_requests + 1]

    @property
    def block_table(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """`[B, M]`, tails filled with the null block."""
        return self.narrow[2 * self.num_requests + 1 :].reshape(self.num_requests, -1)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step on the device: all that a model and an attention may ask about it, complete and unchanging.

    Attributes:
        token_ids, positions: `[T]` int64.
        slot_mapping: `[T]` int64, where each token's K and V go: `block * BS + offset`; -1 means nowhere.
        cu_seqlens_q: `[B+1]` int32, where each request's tokens begin in the packed dimension, and T at the end.
        seq_lens: `[B]` int32, context *including* this step's tokens.
        block_table: `[B, M]` int32, tails filled with the null block.
        logits_indices: `[B]` int64, each request's last token in the packed dimension; more may follow, whose logits
            are wanted too.
        max_query_len, max_seq_len: declared upper bounds, host integers.
        query_lens_host, seq_lens_host: `[B]` numpy int64: lengths for code that branches on them; reading these
            never waits for the device.
        num_padding: trailing requests that may be padding of a graph's bucket: one token each, slot -1, no context.
            In a captured step it is a bound, since the number changes from replay to replay.
        plan: what the attention's `plan()` returned for this step.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    logits_indices: torch.Tensor
    max_query_len: int
    max_seq_len: int
    query_lens_host: IntArray
    seq_lens_host: IntArray
    num_padding: int = 0
    plan: Any = None

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return self.token_ids.shape[0]

    @property
    def num_requests(self) -> int:
        """B, padding included."""
        return self.seq_lens.shape[0]

    def with_plan(self, plan: Any) -> Batch:
        """The same batch, carrying what the attention's `plan()` made of it."""
        return self if plan is None else replace(self, plan=plan)

    @classmethod
    def from_step(cls, step: Step, device: torch.device, last_token: torch.Tensor | None = None) -> Batch:
        """Upload `step` in two copies, and feed the tokens that only the device knows.

        Args:
            step: the host's plan.
            device: where the tensors go.
            last_token: `[rows]` int64 on the device, the last token sampled for each row; needed if `step.feeds`.
        """
        tokens, requests = step.num_tokens, step.num_requests
        wide = torch.from_numpy(step.wide).to(device, non_blocking=True)
        narrow = torch.from_numpy(step.narrow).to(device, non_blocking=True)
        table_size = len(step.narrow) - 2 * requests - 1
        token_ids, positions, slots, logits_indices = wide.split_with_sizes((tokens, tokens, tokens, requests))
        cu_seqlens_q, seq_lens, table = narrow.split_with_sizes((requests + 1, requests, table_size))
        if len(step.feeds):
            if last_token is None:
                raise ValueError("this step feeds sampled tokens on the device: from_step() needs last_token")
            where = np.concatenate((step.logits_indices[step.feeds], step.rows[step.feeds]))
            target, source = torch.from_numpy(where).to(device, non_blocking=True).chunk(2)
            token_ids.index_copy_(0, target, last_token.index_select(0, source))
        return cls(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slots,
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=seq_lens,
            block_table=table.view(requests, -1),
            logits_indices=logits_indices,
            max_query_len=step.max_query_len,
            max_seq_len=step.max_seq_len,
            query_lens_host=step.query_lens,
            seq_lens_host=step.seq_lens,
        )


def pack(
    table: RequestTable,
    rows: IntArray,
    query_lens: IntArray,
    block_table: np.ndarray[Any, np.dtype[np.int32]],
    block_size: int,
) -> Step:
    """Describe a step that computes `query_lens[i]` more tokens of `rows[i]`, by array operations only.

    Args:
        table: the running requests; not changed.
        rows: `[B]` rows in this step.
        query_lens: `[B]` tokens to compute for each, at least 1.
        block_table: `[rows, *]` int32, the KV cache's table over *all* rows, with room for the step's tokens.
        block_size: slots a block.
    """
    start = table.computed[rows]
    seq_lens = start + query_lens
    requests, tokens = len(rows), int(query_lens.sum())
    max_seq_len = int(seq_lens.max())
    wide = np.empty(3 * tokens + requests, dtype=np.int64)
    if tokens == requests:  # one token each
        max_query_len, owner, positions = 1, rows, start
        ends = np.arange(1, requests + 1)
    else:
        max_query_len = int(query_lens.max())
        ends = query_lens.cumsum()
        owner = np.repeat(rows, query_lens)
        positions = np.arange(tokens) + np.repeat(start - ends + query_lens, query_lens)
    blocks, offsets = np.divmod(positions, block_size)
    wide[:tokens] = table.tokens[owner, positions]
    wide[tokens : 2 * tokens] = positions
    wide[2 * tokens : 3 * tokens] = block_table[owner, blocks] * np.int64(block_size) + offsets
    np.subtract(ends, 1, out=wide[3 * tokens :])

    columns = min(-(-max_seq_len // block_size), block_table.shape[1])
    scoring = _scoring(table, owner, positions) if table.scored[rows].any() else None
    narrow = np.empty(2 * requests + 1 + requests * columns, dtype=np.int32)
    narrow[0] = 0
    narrow[1 : requests + 1] = ends
    narrow[requests + 1 : 2 * requests + 1] = seq_lens
    block_table[:, :columns].take(rows, axis=0, out=narrow[2 * requests + 1 :].reshape(requests, columns))
    return Step(
        rows=rows,
        tickets=table.ticket[rows],
        query_lens=query_lens,
        seq_lens=seq_lens,
        wide=wide,
        narrow=narrow,
        feeds=(seq_lens > table.known[rows]).nonzero()[0],
        emits=seq_lens == table.length[rows],
        sampling=_sampling(table, rows, seq_lens) if table.num_choosy else None,
        scoring=scoring,
        num_tokens=tokens,
        max_query_len=max_query_len if scoring is None else max(max_query_len, 2),
        max_seq_len=max_seq_len,
    )


def _scoring(table: RequestTable, owner: IntArray, positions: IntArray) -> Scoring | None:
    at = (table.scored[owner] & (positions + 1 < table.prompt[owner])).nonzero()[0]
    if not len(at):
        return None
    rows, following = owner[at], positions[at] + 1
    top = max(request.params.prompt_logprobs for request in table.requests[np.unique(rows)])
    return Scoring(at, rows, following, table.tokens[rows, following].astype(np.int64), top)


def _sampling(table: RequestTable, rows: IntArray, position: IntArray) -> Sampling | None:
    temperature, logprobs = table.temperature[rows], int(table.logprobs[rows].max())
    greedy = not temperature.any()
    if greedy and logprobs < 0:
        return None
    top_k, top_p = table.top_k[rows], table.top_p[rows]
    return Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=table.seed[rows],
        position=position,
        greedy=greedy,
        truncated=bool((top_k > 0).any() or (top_p < 1).any()),
        logprobs=logprobs,
    )
