"""The sweep, on a clock that the engine's own steps move: what it says is then known to the digit."""

from __future__ import annotations

import time

import pytest

from nanofw.errors import RequestError
from nanofw.measure import sweep as module
from nanofw.measure.sweep import Progress, Run, Workload, run_batch, sweep

WORK = Workload([list(range(10)), list(range(20))], output_tokens=5)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_run(clock, llm, depth):
    engine = llm("dummy:tiny", steps_in_flight=depth).engine
    run = run_batch(engine, WORK, batch=3)
    assert (run.batch, run.tokens, run.prompt_tokens) == (3, 15, 10 + 20 + 10)
    assert (run.cached_tokens, run.preemptions) == (0, 0)
    assert run.prefill_s == pytest.approx(1 + 0.40)
    assert (run.decode_tokens, run.decode_steps) == (12, 4)
    assert run.total_s == pytest.approx(1.4 + 4 * 1.03)
    assert run.tok_s == pytest.approx(15 / (1.4 + 4 * 1.03))
    assert run.decode_tok_s == pytest.approx(12 / (4 * 1.03))
    assert run.decode_ms == pytest.approx(1030)
    assert run.prefill_tok_s == pytest.approx(40 / 1.4)
    assert not engine.has_work


def test_prefill_lasts_until_every_request_has_a_token(clock, llm):
    """Two steps of 20 and one of 10: what is decoded beside the prefill is not the decode's."""
    run = run_batch(llm("dummy:tiny", max_batch_tokens=20).engine, Workload([list(range(25))], 5), batch=2)
    assert run.tokens == 10
    assert run.prefill_s == pytest.approx(2 * 1.2 + 1 + 0.01 * (10 + 1))
    assert run.decode_tokens == 10 - 3
    assert run.decode_steps == 4


def test_prompt_tokens_from_the_cache_are_no_work():
    run = Run(2, 10, 100, 60, 0, total_s=3.0, prefill_s=1.0, decode_tokens=8, decode_steps=4)
    assert run.prefill_tok_s == 40


def test_a_run_is_watched_twice_a_second_once_it_decodes(clock, llm):
    seen = []
    run_batch(llm("dummy:tiny").engine, WORK, 1, lambda prefill, decode: seen.append((prefill, decode)))
    assert len(seen) == 4
    assert seen == [pytest.approx((10 / 1.1, 1 / 1.01))] * 4


def test_end_of_sequence_does_not_end_a_run(llm):
    engine = llm("dummy:tiny").engine
    engine.eos_token_ids = tuple(range(512))
    assert run_batch(engine, WORK, 1).tokens == 5


def test_a_run_that_ends_early_is_an_error_with_its_reason(llm):
    with pytest.raises(RequestError, match=r"1 of 2 requests ended early \(context\)"):
        run_batch(llm("dummy:tiny", max_model_len=24).engine, WORK, 2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Workload([], 5), "at least one prompt"),
        (lambda: Workload([[1]], 1), "output_tokens must be at least 2"),
        (lambda: Workload.random(2, 0, 5, 100), "prompt_tokens must be at least 1"),
        (lambda: sweep({}, WORK, []), "batch sizes must be distinct"),
        (lambda: sweep({}, WORK, [1, 1]), "batch sizes must be distinct"),
        (lambda: sweep({}, WORK, [0]), "at least 1"),
        (lambda: sweep({}, WORK, [1], rounds=0), "rounds must be at least 1"),
    ],
)
def test_nothing_to_measure(make, words):
    with pytest.raises(RequestError, match=words):
        make()


def test_random_prompts_share_no_prefix_and_are_the_same_each_time():
    work = Workload.random(16, 8, 5, vocab_size=1000, seed=3)
    assert len({tuple(p) for p in work.prompts}) == len({p[0] for p in work.prompts}) == 16
    assert all(len(p) == 8 and min(p) >= 0 and max(p) < 1000 for p in work.prompts)
    assert work == Workload.random(16, 8, 5, vocab_size=1000, seed=3) != Workload.random(16, 8, 5, 1000, seed=4)


@pytest.fixture
def visits(monkeypatch):
    """Which engine ran which batch for how many tokens, in order."""
    seen = []
    run = module.run_batch

    def noted(engine, work, batch, watch=None):
        seen.append((engine.plugins["attention"].name, batch, work.output_tokens))
        return run(engine, work, batch, watch)

    monkeypatch.setattr(module, "run_batch", noted)
    return seen


def test_every_round_visits_every_point_once_in_an_order_of_its_own(llm, visits):
    names, sizes = ("naive-gather", "vectorized-gather"), [1, 2, 3, 4]
    engines = {name: llm("dummy:tiny", attention=name).engine for name in names}
    runs = sweep(engines, WORK, sizes, rounds=3, seed=5)
    points = {(name, batch) for name in names for batch in sizes}
    rounds = [visits[i : i + 8] for i in range(0, 32, 8)]
    assert all({(name, batch) for name, batch, _ in visited} == points for visited in rounds)
    assert len({tuple(visited) for visited in rounds[1:]}) == 3
    assert [{tokens for *_, tokens in visited} for visited in rounds] == [{4}, {5}, {5}, {5}]
    assert runs.keys() == points
    assert all([run.batch for run in runs[name, batch]] == [batch] * 3 for name, batch in points)

    first = list(visits)
    visits.clear()
    sweep(engines, WORK, sizes, rounds=3, seed=5)
    assert visits == first
    visits.clear()
    sweep(engines, WORK, sizes, rounds=3, seed=6)
    assert visits != first


def test_progress(clock, llm):
    seen: list[Progress] = []
    sweep({"x": llm("dummy:tiny").engine}, WORK, [1, 2], rounds=2, watch=seen.append)
    assert {p.total for p in seen} == {6}
    assert [p.done for p in seen] == sorted(p.done for p in seen)
    assert {p.round for p in seen} == {0, 1, 2}
    before = [p for p in seen if p.decode_tok_s is None]
    assert [p.done for p in before] == [0, 1, 2, 3, 4, 5]
    assert (seen[-1].done, seen[-1].round) == (6, 2)


def test_the_clock_of_a_real_sweep_runs(llm):
    before = time.perf_counter()
    (run,) = sweep({"x": llm("dummy:tiny").engine}, WORK, [1], rounds=1)["x", 1]
    assert 0 < run.prefill_s < run.total_s < time.perf_counter() - before
