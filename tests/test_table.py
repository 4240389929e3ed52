"""Rows of running requests: what a scheduler and a cache read there."""

import numpy as np
import pytest

from nanofw import RequestTable, SamplingParams
from nanofw.request import Request


def request(prompt=(1, 2, 3), limit=10, stop_ids=(), **params):
    how = SamplingParams(**{"temperature": 0} | params)
    return Request("x", tuple(prompt), how, 7, limit, "length", tuple(stop_ids), stream=False)


@pytest.fixture
def table():
    return RequestTable(rows=3, max_len=16)


def test_a_row_is_lent_and_given_back(table):
    mine = request()
    row = table.open(mine)
    assert (mine.row, table.free_rows) == (row, 2)
    assert table.requests[row] is mine
    assert table.tokens[row, :3].tolist() == [1, 2, 3]
    assert (table.length[row], table.known[row], table.computed[row], table.last[row]) == (3, 3, 0, 9)
    assert table.close(mine) == row
    assert (mine.row, table.free_rows) == (-1, 3)


def test_rows_are_distinct_and_all_can_be_lent(table):
    many = [request() for _ in range(3)]
    assert {table.open(r) for r in many} == {0, 1, 2}
    assert table.free_rows == 0


def test_what_was_generated_survives(table):
    """Put back after two tokens and one promised: the two come back, the promise does not."""
    mine = request()
    row = table.open(mine)
    table.tokens[row, 3:5] = (8, 9)
    table.known[row], table.length[row], table.computed[row] = 5, 6, 5
    table.close(mine)
    assert mine.output_ids == [8, 9]
    again = table.open(mine)
    assert table.tokens[again, :5].tolist() == [1, 2, 3, 8, 9]
    assert (table.length[again], table.known[again], table.computed[again]) == (5, 5, 0)


def test_a_ticket_is_never_used_twice(table):
    seen = set()
    for _ in range(5):
        mine = request()
        row = table.open(mine)
        assert (row, table.ticket[row]) not in seen
        seen.add((row, int(table.ticket[row])))
        table.close(mine)


def test_needs(table):
    """All of a prompt; one token in decode; nothing for a value that is not there yet, nor past the last token."""
    row = table.open(request(limit=5))
    here = np.array([row])
    needs = []
    for computed, length in ((0, 3), (2, 3), (3, 3), (3, 4), (4, 5)):
        table.computed[row], table.length[row] = computed, length
        needs.append(int(table.needs(here)[0]))
    assert needs == [3, 1, 0, 1, 0]


def test_a_row_forgets_its_last_holder(table):
    """Sampling parameters, stop ids and flags are the new request's alone."""
    first = request(temperature=0.5, top_k=3, top_p=0.9, logprobs=2, stop_ids=(4, 5, 6), stop=["x"])
    row = table.open(first)
    assert table.num_choosy == 1
    assert table.watched[row]
    table.close(first)
    second = request(stop_ids=(9,))
    assert table.open(second) == row
    assert (table.temperature[row], table.top_k[row], table.top_p[row], table.logprobs[row]) == (0, 0, 1, -1)
    assert {i for i in table.stop_ids[row].tolist() if i >= 0} == {9}
    assert not table.watched[row]
    assert table.num_choosy == 0


@pytest.mark.parametrize("count", [0, 1, 4, 5, 40])
def test_any_number_of_stop_ids(table, count):
    """exllamav2#803: all of them, not the first."""
    before = request(stop_ids=(7,))
    other = table.open(before)
    row = table.open(request(stop_ids=range(100, 100 + count)))
    assert sorted(i for i in table.stop_ids[row].tolist() if i >= 0) == list(range(100, 100 + count))
    assert [i for i in table.stop_ids[other].tolist() if i >= 0] == [7]


def test_who_is_watched(table):
    """Streams, stop strings and logprobs; the others need no look before they end."""
    quiet, streaming = request(), request()
    streaming.stream = True
    assert not table.watched[table.open(quiet)]
    assert table.watched[table.open(streaming)]
    assert table.watched[table.open(request(logprobs=0))]
