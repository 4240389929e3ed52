"""Work that is timed in turns: who is called how often, in which order. How long it takes is not looked at."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch

from nanofw.measure import rounds

CPU = torch.device("cpu")


class Times:
    """A clock that every call of the work moves on."""

    def __init__(self, monkeypatch):
        self.now, self.calls = 0.0, []
        monkeypatch.setattr(rounds.time, "perf_counter", lambda: self.now)

    def work(self, name, seconds):
        def call():
            assert not self.calls[6:] or not gc.isenabled()  # after the warm-up, nothing is collected
            self.calls.append(name)
            self.now += seconds

        return call


def test_each_round_visits_all_in_an_order_of_its_own(monkeypatch):
    times = Times(monkeypatch)
    timed = rounds.interleaved({n: times.work(n, 1.0) for n in "abc"}, CPU, rounds=20)
    assert times.calls[:6] == ["a", "a", "b", "b", "c", "c"]  # compiled by the first, looked at by the second
    orders = ["".join(times.calls[i : i + 3]) for i in range(6, len(times.calls), 3)]
    assert [Counter(order) for order in orders] == [Counter("abc")] * 20
    assert len(set(orders)) > 3
    assert gc.isenabled()
    for name in "abc":
        assert (timed[name].calls, timed[name].wall, timed[name].device) == (1, [1.0] * 20, [])
        assert timed[name].device_s is None


def test_short_work_is_repeated_and_divided(monkeypatch):
    times = Times(monkeypatch)
    timed = rounds.interleaved({"a": times.work("a", 0.25)}, CPU, rounds=3, least_s=1.1)["a"]
    assert timed.calls == 5
    assert timed.wall == [0.25] * 3
    assert len(times.calls) == 2 + 3 * 5


def test_garbage_is_collected_again_after_an_error(monkeypatch):
    times = Times(monkeypatch)
    plain = times.work("a", 1.0)

    def breaks():
        plain()
        if len(times.calls) > 2:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        rounds.interleaved({"a": breaks}, CPU)
    assert gc.isenabled()
