"""Policies of the continuous scheduler: who comes in, who is put back, and that nobody waits for ever."""

import numpy as np
import pytest

from nanofw import PluginHost, RequestTable, SamplingParams
from nanofw.errors import ConfigError
from nanofw.request import Request
from nanofw.testing.audited import audited_engine, audited_steps, nothing_left, prompt, run
from nanofw.testing.ledger import Ledger
from nanofw_basics.policies import WINDOW, least_lost
from nanofw_basics.waiting import WaitingLine


@pytest.fixture(scope="module")
def build():
    """An engine whose scheduler has these options: `build({"order": ...}, **settings)`."""
    host = PluginHost.load(only=("basics", "gather"))

    def engine(options=None, **settings):
        cache = {"block_size": 4}
        return audited_engine(host, options={"scheduler": options or {}, "kv_cache": cache}, **settings)

    return engine


def ends(engine):
    """Request ids in the order in which they end."""
    return [o.request_id for o in engine.run() if o.finished]


def add(engine, name, length, count=3, **params):
    engine.add(name, prompt(length, length), SamplingParams(temperature=0, max_tokens=count, **params))


def test_first_come_first_served(build):
    engine = build(max_num_seqs=1)
    for name, length in (("long", 30), ("short", 2), ("middle", 9)):
        add(engine, name, length)
    assert ends(engine) == ["long", "short", "middle"]


def test_shortest_first(build):
    engine = build({"order": "shortest"}, max_num_seqs=1)
    for name, length in (("long", 30), ("short", 2), ("middle", 9), ("twin", 9)):
        add(engine, name, length)
    assert ends(engine) == ["short", "middle", "twin", "long"]


def test_shortest_first_starves_nobody(build):
    """However many short ones come, a long one is overtaken by fewer than a window of them."""
    engine = build({"order": "shortest"}, max_num_seqs=1)
    add(engine, "long", 40, 1)
    for number in range(2 * WINDOW):
        add(engine, f"{number}", 1, 1)
    assert ends(engine).index("long") == WINDOW - 1


def test_priority(build):
    engine = build({"order": "priority"}, max_num_seqs=1)
    for name, priority in (("normal", 0), ("late", 5), ("urgent", -1), ("later", 5), ("normal too", 0)):
        add(engine, name, 5, priority=priority)
    assert ends(engine) == ["urgent", "normal", "normal too", "late", "later"]


def test_priority_is_nothing_to_other_orders(build):
    engine = build(max_num_seqs=1)
    add(engine, "first", 5, priority=3)
    add(engine, "second", 5, priority=-3)
    assert ends(engine) == ["first", "second"]


def test_victims(build):
    """A pool for two of three: the youngest is put back, or the one that loses least."""
    put_back = {}
    for victim in ("last-come", "least-lost"):
        engine = build({"victim": victim}, kv_blocks=16)
        for name, length in (("old", 20), ("small", 8), ("young", 20)):
            add(engine, name, length, 16)
        put_back[victim] = {o.request_id for o in engine.run() if o.preemptions and o.finished}
    assert put_back["last-come"] == {"young"}
    assert "small" in put_back["least-lost"]
    assert "old" not in put_back["least-lost"]


def test_least_lost_spares_the_oldest():
    table = RequestTable(4, 16)
    running = [Request(str(i), (1, 2), SamplingParams(), 0, 9, "length", ()) for i in range(4)]
    for request, computed in zip(running, (1, 7, 4, 4), strict=True):
        table.computed[table.open(request)] = computed
    assert least_lost(running, table) == 3
    assert least_lost(running[:2], table) == 1


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kv_cache", ["paged", "prefix"])
def test_reserving_puts_nobody_back(build, kv_cache, depth):
    """All that the running ones may grow to is set aside; by default it is not, and somebody has to go."""
    preemptions, most = {}, {}
    for admission in ("prompt", "reserve"):
        engine = build({"admission": admission}, kv_blocks=20, kv_cache=kv_cache, steps_in_flight=depth)
        outputs = run(engine, [(prompt(6, i), 20) for i in range(8)])
        preemptions[admission] = sum(o.preemptions for o in outputs)
        most[admission] = max(step.num_requests for step in audited_steps(engine))
        nothing_left(engine)
    assert preemptions["reserve"] == 0 < preemptions["prompt"]
    assert most["reserve"] < most["prompt"]


@pytest.mark.parametrize("admission", ["prompt", "reserve"])
def test_reserving_counts_forks(build, admission):
    """Samples that share blocks, each of which will need blocks of its own."""
    engine = build({"admission": admission}, kv_blocks=20, kv_cache="prefix", max_num_seqs=8)
    book = Ledger(engine)
    for number in range(3):
        book.add(f"{number}", prompt(14, number), SamplingParams(n=4, seed=number, max_tokens=12))
    outputs = []
    engine.observers["nanofw_request_finished"] = lambda event: outputs.append(event.output)
    book.finish(bound=400)
    assert (sum(o.preemptions for o in outputs) == 0) == (admission == "reserve")


def test_shared_blocks_count_once(build):
    """Eight requests of 40 common tokens and 4 of their own: a pool for all of them only because they share."""
    common = prompt(40, 0)
    work = [([*common, *prompt(3, i)], 2) for i in range(8)]
    engine = build(kv_blocks=10 + 8 * 2, kv_cache="prefix")
    run(engine, work[:1])
    before = len(audited_steps(engine))
    for i, (tokens, count) in enumerate(work):
        engine.add(str(i), tokens, SamplingParams(temperature=0, max_tokens=count))
    list(engine.run())
    assert max(step.num_requests for step in audited_steps(engine)[before:]) == 8
    nothing_left(engine)


@pytest.mark.parametrize("policy", ["order", "victim", "admission"])
def test_a_policy_that_nobody_knows(build, policy):
    with pytest.raises(ConfigError, match=f"scheduler 'continuous': option '{policy}' must be one of '.*, got 'fair'"):
        build({policy: "fair"})


def test_a_policy_of_ones_own():
    """A subclass swaps one function; the rest stays."""
    line = WaitingLine(lambda request: (len(request.prompt_ids) % 2, request.number))
    many = [Request(str(i), (1,) * (1 + i), SamplingParams(), 0, 99, "length", (), number=i) for i in range(5)]
    for request in many:
        line.join(request)
    order = []
    while line:
        order.append(int(line.first().id))
        line.leave(line.first())
    assert order == [1, 3, 0, 2, 4]


def test_whoever_leaves_the_line_is_gone():
    draw = np.random.default_rng(0)
    line = WaitingLine(lambda request: (request.number,))
    many = [Request(str(i), (1,), SamplingParams(), 0, 99, "length", (), number=i) for i in range(50)]
    for request in draw.permutation(np.array(many, dtype=object)):
        line.join(request)
    gone = set(draw.choice(50, 30, replace=False).tolist())
    for number in gone:
        line.leave(many[number])
        line.leave(many[number])
    assert len(line) == 20
    assert many[min(gone)] not in line
    left = []
    while line:
        left.append(line.first().number)
        line.leave(line.first())
    assert left == sorted(set(range(50)) - gone)
