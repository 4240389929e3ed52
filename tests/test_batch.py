"""A step, packed: what plugins are given is exactly what the requests are, for any mix of prompts and decode."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanofw import NULL_BLOCK, Batch, RequestTable, SamplingParams
from nanofw.batch import pack
from nanofw.request import Request

CPU = torch.device("cpu")
MAX_LEN = 40

requests = st.lists(
    st.tuples(
        st.integers(0, 20), st.integers(1, 12), st.integers(0, 3)
    ),  # computed before, computed now, still to come
    min_size=1,
    max_size=6,
)


def opened(work, block_size, **params):
    """A table with requests part-way, and a block table with room for their step."""
    table = RequestTable(len(work) + 2, MAX_LEN)
    columns = -(-MAX_LEN // block_size)
    blocks = np.random.default_rng(0).permutation(len(work) * columns).astype(np.int32) + 1
    block_table = np.full((len(work) + 2, columns), NULL_BLOCK, dtype=np.int32)
    rows = []
    for i, (before, now, later) in enumerate(work):
        how = SamplingParams(**{"temperature": 0} | params)
        prompt = [100 * i + n for n in range(before + now + later)]
        request = Request(str(i), tuple(prompt), how, 1000 + i, MAX_LEN, "length", (), stream=False)
        row = table.open(request)
        table.computed[row] = before
        used = -(-(before + now) // block_size)
        block_table[row, :used] = blocks[i * columns : i * columns + used]
        rows.append(row)
    order = np.random.default_rng(1).permutation(len(work))
    return table, np.array(rows)[order], np.array([work[i][1] for i in order]), block_table


@given(requests, st.sampled_from((1, 3, 16)))
@settings(deadline=None, max_examples=80)
def test_pack_describes_each_request(work, block_size):
    table, rows, query_lens, block_table = opened(work, block_size)
    step = pack(table, rows, query_lens, block_table, block_size)
    assert step.num_requests == len(work)
    assert step.num_tokens == query_lens.sum() == len(step.token_ids) == len(step.positions) == len(step.slot_mapping)
    assert step.max_query_len == query_lens.max()
    assert step.max_seq_len == step.seq_lens.max()
    assert not len(step.feeds)
    for i, row in enumerate(rows):
        start, end = step.cu_seqlens_q[i : i + 2]
        computed, n = int(table.computed[row]), int(query_lens[i])
        positions = list(range(computed, computed + n))
        assert end - start == n == step.query_lens[i]
        assert step.seq_lens[i] == computed + n
        assert step.positions[start:end].tolist() == positions
        assert step.token_ids[start:end].tolist() == table.tokens[row, positions].tolist()
        slots = [block_table[row, p // block_size] * block_size + p % block_size for p in positions]
        assert step.slot_mapping[start:end].tolist() == slots
        assert step.logits_indices[i] == end - 1
        assert step.emits[i] == (computed + n == table.length[row]), "a token counts once the prompt is through"
        held = -(-(computed + n) // block_size)
        assert step.block_table[i, :held].tolist() == block_table[row, :held].tolist()
        assert (step.block_table[i, held:] == NULL_BLOCK).all()


@given(requests, st.sampled_from((1, 3, 16)))
@settings(deadline=None, max_examples=40)
def test_the_device_sees_the_same(work, block_size):
    table, rows, query_lens, block_table = opened(work, block_size)
    step = pack(table, rows, query_lens, block_table, block_size)
    batch = Batch.from_step(step, CPU)
    assert (batch.num_tokens, batch.num_requests, batch.num_padding) == (step.num_tokens, step.num_requests, 0)
    for name in ("token_ids", "positions", "slot_mapping", "cu_seqlens_q", "block_table", "logits_indices"):
        assert np.array_equal(getattr(batch, name).numpy(), getattr(step, name)), name
    assert batch.seq_lens.tolist() == batch.seq_lens_host.tolist() == step.seq_lens.tolist()
    assert batch.query_lens_host.tolist() == step.query_lens.tolist()
    assert (batch.max_query_len, batch.max_seq_len) == (step.max_query_len, step.max_seq_len)
    int64 = {batch.token_ids.dtype, batch.positions.dtype, batch.slot_mapping.dtype, batch.logits_indices.dtype}
    assert int64 == {torch.int64}
    assert {batch.cu_seqlens_q.dtype, batch.seq_lens.dtype, batch.block_table.dtype} == {torch.int32}


def test_tokens_that_only_the_device_knows():
    """The second of three requests decodes a token that is still in flight: it is fed from the device's own copy."""
    table, rows, query_lens, block_table = opened([(4, 1, 0), (4, 1, 0), (2, 3, 0)], 4)
    late = int(rows[1])
    table.known[late] -= 1
    table.tokens[late, table.known[late]] = -77  # whatever lies there
    step = pack(table, rows, query_lens, block_table, 4)
    assert step.feeds.tolist() == [1]
    last_token = torch.arange(500, 500 + table.rows)
    batch = Batch.from_step(step, CPU, last_token)
    where = int(step.logits_indices[1])
    assert batch.token_ids[where] == 500 + late
    others = [i for i in range(step.num_tokens) if i != where]
    assert batch.token_ids[others].tolist() == step.token_ids[others].tolist()
    with pytest.raises(ValueError, match="needs last_token"):
        Batch.from_step(step, CPU)


def test_block_numbers_beyond_two_to_the_31():
    """vllm#47671, #50427: a slot is a 64-bit number, so that a large pool's last blocks are where they should be."""
    table, rows, query_lens, block_table = opened([(17, 1, 0)], 16)
    block_table[rows[0], :2] = (2**31 - 2, 2**31 - 1)
    step = pack(table, rows, query_lens, block_table, 16)
    assert step.slot_mapping.tolist() == [(2**31 - 1) * 16 + 1]
    assert Batch.from_step(step, CPU).slot_mapping.tolist() == [(2**31 - 1) * 16 + 1]


def test_lengths_that_fill_a_block():
    """MinivLLM#77: k * block_size tokens need k blocks, and the last of them is full, not empty."""
    for k in range(1, 5):
        table, rows, query_lens, block_table = opened([(4 * k - 1, 1, 0)], 4)
        step = pack(table, rows, query_lens, block_table, 4)
        assert step.block_table.shape == (1, k)
        assert step.slot_mapping.tolist() == [block_table[rows[0], k - 1] * 4 + 3]


def test_a_step_that_is_all_greedy_carries_no_parameters():
    table, rows, query_lens, block_table = opened([(4, 1, 0), (0, 3, 2)], 4)
    assert pack(table, rows, query_lens, block_table, 4).sampling is None


def test_parameters_of_each_row():
    """Where one wants more than the arg-max, the parameters of all travel, each with the index of its next token."""
    table, rows, query_lens, block_table = opened(
        [(4, 1, 0), (0, 3, 2)], 4, temperature=0.5, top_k=3, top_p=0.25, logprobs=2
    )
    sampling = pack(table, rows, query_lens, block_table, 4).sampling.to(CPU)
    assert sampling.temperature.tolist() == [0.5, 0.5]
    assert sampling.top_k.tolist() == [3, 3]
    assert sampling.top_p.tolist() == [0.25, 0.25]
    assert sampling.seed.tolist() == table.seed[rows].tolist()
    assert sampling.position.tolist() == (table.computed[rows] + query_lens).tolist()
    assert (sampling.greedy, sampling.truncated, sampling.logprobs) == (False, True, 2)


def test_logprobs_of_a_greedy_step():
    table, rows, query_lens, block_table = opened([(4, 1, 0)], 4, logprobs=0)
    sampling = pack(table, rows, query_lens, block_table, 4).sampling
    assert (sampling.greedy, sampling.truncated, sampling.logprobs) == (True, False, 0)


def test_a_plan_travels_with_the_batch():
    table, rows, query_lens, block_table = opened([(4, 1, 0)], 4)
    batch = Batch.from_step(pack(table, rows, query_lens, block_table, 4), CPU)
    planned = batch.with_plan("plan")
    assert (planned.plan, batch.plan) == ("plan", None)
    assert planned.token_ids is batch.token_ids
    assert batch.with_plan(None) is batch
