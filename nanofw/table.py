"""Running requests as arrays: one row a request, one array a property.

Steady decode must not loop over sequences in Python, so everything that a step needs to know of its requests lives in
numpy arrays indexed by *row*, a small integer lent to a request from admission until it ends or is preempted. The
scheduler reads lengths here, the KV cache keys its block tables by the same rows, and the engine packs a step with a
dozen array operations whatever the batch size.

Lengths run ahead of values. `length` counts tokens that exist or are promised by a step in flight; `known` counts those
whose values have reached the host. A scheduler works with lengths alone, so it can plan step N+1 while step N runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from nanofw.request import Request

    IntArray = npt.NDArray[np.int64]
    TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]


class RequestTable:
    """State of up to `rows` running requests of up to `max_len` tokens each.

    Each attribute is an array over rows, int64 unless said otherwise.

    Attributes:
        length: tokens that exist or are promised, prompt included.
        known: tokens whose values are in `tokens`.
        computed: tokens whose K and V are in the cache or will be once the steps in flight have run.
        prompt: length of the prompt.
        least: length from which the request may stop.
        last: `computed` at which the request has nothing left to do: its final token needs no K and V.
        ticket: changes each time a row changes hands; a result for an old ticket is dropped.
        tokens: `[rows, max_len]` int32, token values.
        stop_ids: `[rows, K]` int64, ids that end the request, padded with -1.
        temperature, top_k, top_p, seed, logprobs: sampling parameters (`logprobs` -1: none).
        scored: the prompt's log-probabilities are wanted and not there yet.
        requests: the requests themselves, None where a row is free (objects).
        num_choosy: running requests that are not plain greedy (a number, not an array).
        watched: rows whose tokens are looked at one by one (streams, stop strings, logprobs).
    """

    def __init__(self, rows: int, max_len: int) -> None:
        self.rows, self.max_len = rows, max_len
        self.length, self.known, self.computed, self.last = np.zeros((4, rows), dtype=np.int64)
        self.prompt, self.least = np.zeros((2, rows), dtype=np.int64)
        self.ticket, self.top_k, self.seed = np.zeros((3, rows), dtype=np.int64)
        self.temperature = np.zeros(rows, dtype=np.float32)
        self.top_p = np.ones(rows, dtype=np.float32)
        self.logprobs = np.full(rows, -1, dtype=np.int64)
        self.watched, self.scored = np.zeros((2, rows), dtype=bool)
        self.tokens = np.empty((rows, max_len), dtype=np.int32)
        self.stop_ids = np.full((rows, 4), -1, dtype=np.int64)
        self.requests = np.full(rows, None, dtype=object)
        self.num_choosy = 0
        self._free = list(range(rows - 1, -1, -1))

    @property
    def free_rows(self) -> int:
        """Rows that no request holds."""
        return len(self._free)

    def needs(self, rows: IntArray) -> IntArray:
        """Tokens each row still has to compute before it waits for nothing but values: 1 in decode, more in prefill."""
        return np.minimum(self.length[rows], self.last[rows]) - self.computed[rows]

    def open(self, request: Request) -> int:
        """Lend a row to `request`, with all the tokens it has (after a preemption: the generated ones too)."""
        row = self._free.pop()
        params = request.params
        size = request.length
        self.tokens[row, : len(request.prompt_ids)] = request.prompt_ids
        self.tokens[row, len(request.prompt_ids) : size] = request.output_ids
        self.length[row] = self.known[row] = size
        self.computed[row] = 0
        self.prompt[row] = len(request.prompt_ids)
        self.least[row] = len(request.prompt_ids) + params.min_tokens
        self.last[row] = request.limit - 1
        self.temperature[row], self.top_k[row], self.top_p[row] = params.temperature, params.top_k, params.top_p
        self.seed[row] = request.seed
        self.logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self.watched[row], self.scored[row] = request.watched, request.scored
        if len(request.stop_ids) > self.stop_ids.shape[1]:
            grown = np.full((self.rows, len(request.stop_ids)), -1, dtype=np.int64)
            grown[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = grown
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(request.stop_ids)] = request.stop_ids
        self.num_choosy += params.choosy
        self.requests[row] = request
        request.row = row
        return row

    def close(self, request: Request) -> int:
        """Take the row back and hand the known tokens to `request`. Returns the row, whose blocks the caller frees."""
        row = request.row
        request.output_ids = self.output_ids(row, len(request.prompt_ids))
        self.num_choosy -= request.params.choosy
        self.requests[row] = None
        self.ticket[row] += 1
        self._free.append(row)
        request.row = -1
        return row

    def clear(self) -> None:
        """Take all rows back, whatever an interrupted call has left."""
        self.ticket += 1
        self.num_choosy = 0
        self.requests[:] = None
        self._free = list(range(self.rows - 1, -1, -1))

    def output_ids(self, row: int, prompt_len: int) -> list[int]:
        """Generated tokens of a row whose values are known."""
        return self.tokens[row, prompt_len : self.known[row]].tolist()  # type: ignore[no-any-return]
