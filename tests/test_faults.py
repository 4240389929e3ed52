"""Whatever breaks off a step: the error names its plugin, nothing is lost, and the engine goes on."""

import sys

import pytest

from nanofw import PluginHost, SamplingParams
from nanofw.testing.audited import audited_engine, audited_steps, prompt
from nanofw.testing.ledger import Ledger

CALLS = [
    ("scheduler", "schedule"),
    ("scheduler", "update"),
    ("scheduler", "add"),
    ("kv_cache", "allocate"),
    ("kv_cache", "match_prefix"),
    ("kv_cache", "worth_waiting"),
    ("kv_cache", "fork"),
    ("kv_cache", "commit"),
    ("kv_cache", "free"),
    ("runner", "submit"),
    ("model", "forward"),
    ("attention", "plan"),
    ("attention", "write_kv"),
    ("sampler", "sample"),
]
STRIDE = 199
"""Of the lines at which Ctrl-C is tried: 1 tries all, in minutes."""


class Fault(Exception):
    """Raised on purpose."""


@pytest.fixture
def ledger(monkeypatch):
    """Six requests, streamed, sampled, forked or with logprobs, in an engine whose pool is too small for them."""

    def build(depth, kv_cache="paged"):
        host = PluginHost.load(only=("basics", "gather"))
        engine = audited_engine(
            host,
            kv_blocks=9,
            max_num_seqs=4,
            max_batch_tokens=16,
            steps_in_flight=depth,
            kv_cache=kv_cache,
            options={"kv_cache": {"block_size": 4}},
        )
        book = Ledger(engine)
        for i in range(5):
            how = SamplingParams(temperature=i % 2, seed=i, max_tokens=9 + i, logprobs=2 if i == 3 else None)
            book.add(str(i), prompt(9, i // 2)[: 5 + i], how, stream=bool(i % 3))  # twos begin alike
        book.add("forked", prompt(7, 9), SamplingParams(n=2, seed=7, max_tokens=6))
        return book

    return build


def part_of(engine, kind):
    inner = engine.runner.inner
    mine = {"scheduler": engine.scheduler, "kv_cache": engine.kv_cache, "runner": inner}
    return mine.get(kind) or getattr(inner.parts, kind)


def fail_at(monkeypatch, part, method, number, before):
    """Make the call of that number raise, before or after its work is done."""
    calls, real = [], getattr(part, method)

    def failing(self, *args, **kwargs):
        calls.append(method)
        if len(calls) != number:
            return real(*args, **kwargs)
        if not before:
            real(*args, **kwargs)
        raise Fault(method)

    monkeypatch.setattr(part, method, failing.__get__(part))
    return calls


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("kv_cache", ["paged", "prefix"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("kind", "method"), CALLS)
def test_a_plugin_that_raises_once(ledger, monkeypatch, kind, method, depth, kv_cache, before):
    """At its first call, at a later one, in the middle of everything: every request still gets its tokens."""
    for number in (1, 2, 5, 13):
        book = ledger(depth, kv_cache)
        book.one_by_one = method not in ("add", "free")  # called between two looks at the tokens of a step
        with monkeypatch.context() as patch:
            calls = fail_at(patch, part_of(book.engine, kind), method, number, before)
            errors = 0
            while book.engine.has_work:
                try:
                    book.step()
                except Fault as error:
                    errors += 1
                    (note,) = error.__notes__
                    names = book.engine.plugins[kind]
                    assert note.startswith(f"raised by {kind} {names.name!r} of {names.distribution}")
                    book.engine.kv_cache.check_integrity()
        book.finish(bound=0)
        assert errors == (number <= len(calls))


def test_a_plugin_that_always_raises(ledger, monkeypatch):
    """Each call says so; requests can be aborted, and the pool is whole."""
    book = ledger(1)
    fail = type("Always", (int,), {"__ne__": lambda self, other: False})(0)
    fail_at(monkeypatch, book.engine.kv_cache, "allocate", fail, before=True)
    for _ in range(3):
        with pytest.raises(Fault):
            book.step()
    for name in list(book.unfinished):
        book.abort(name)
    book.finish(bound=0)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(("kind", "method"), [("scheduler", "abort"), ("kv_cache", "free")])
def test_a_plugin_that_raises_when_a_request_is_aborted(ledger, monkeypatch, kind, method, before):
    """It goes on, like all others, and can be aborted again: waiting, running, or about to be forked."""
    for steps in (0, 1, 2, 5):
        for name in ("0", "3", "forked"):
            book = ledger(1)
            for _ in range(steps):
                book.step()
            with monkeypatch.context() as patch:
                calls, told = fail_at(patch, part_of(book.engine, kind), method, 1, before), []
                try:
                    book.engine.abort(name)
                    del book.unfinished[name]
                except Fault as error:
                    told = error.__notes__
                    book.balance()
                    book.step()
                    book.abort(name)
            assert len(told) == bool(calls), "it can only go well if nothing was held that could be given back"
            for note in told:
                assert note.startswith(f"raised by {kind} ")
                assert f"when request '{name}' was aborted" in note
            book.finish(bound=200)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_plugin_that_raises_when_a_request_is_added(ledger, monkeypatch, before):
    """It has not been added, and its id is free."""
    book = ledger(1)
    book.step()
    with monkeypatch.context() as patch:
        fail_at(patch, book.engine.scheduler, "add", 1, before)
        with pytest.raises(Fault) as caught:
            book.engine.add("new", [1, 2], SamplingParams(temperature=0))
    assert "when request 'new' was added" in caught.value.__notes__[0]
    book.balance()
    book.add("new", [3, 4, 5], SamplingParams(temperature=0, max_tokens=3))
    book.finish(bound=200)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("kv_cache", ["paged", "prefix"])
@pytest.mark.parametrize(("kind", "method"), [("scheduler", "clear"), ("kv_cache", "recover"), ("scheduler", "add")])
@pytest.mark.parametrize("call", ["step", "add", "abort"])
def test_a_plugin_that_raises_when_all_are_put_back(ledger, monkeypatch, call, kind, method, kv_cache, before):
    """After another error: both are told, and the next call, whichever it is, puts all back before it begins."""
    book = ledger(1, kv_cache)
    for _ in range(4):
        book.step()
    with monkeypatch.context() as patch:
        fail_at(patch, book.engine.runner.inner.parts.model, "forward", 1, before=True)
        fail_at(patch, part_of(book.engine, kind), method, 2 if method == "add" else 1, before)
        with pytest.raises(Fault, match=method) as caught:
            book.engine.step()
    (note,) = caught.value.__notes__
    assert note.startswith(f"raised by {kind} ")
    assert note.endswith("when all requests were put back; the next call tries again")
    assert str(caught.value.__context__) == "forward"
    book.one_by_one = False
    if call == "add":
        book.add("new", [3, 4, 5], SamplingParams(temperature=0, max_tokens=3))
    elif call == "abort":
        book.abort(next(iter(book.unfinished)))
    else:
        book.step()
    book.balance()
    book.finish(bound=200)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_result_that_fails_to_arrive(ledger, monkeypatch, depth):
    """An error of the device shows when its tokens are waited for, a step late."""
    for number in (1, 2, 7):
        book = ledger(depth)
        submit, seen = book.engine.runner.submit, []

        def late(step, submit=submit, seen=seen, number=number):
            pending = submit(step)
            seen.append(pending)
            if len(seen) == number:
                pending.wait = lambda: (_ for _ in ()).throw(Fault("device"))
            return pending

        monkeypatch.setattr(book.engine.runner, "submit", late)
        errors = 0
        while book.engine.has_work:
            try:
                book.step()
            except Fault:
                errors += 1
        assert errors == 1
        book.finish(bound=0)


@pytest.mark.parametrize("depth", [0, 1])
def test_an_allocation_that_fails(ledger, monkeypatch, depth):
    """The cache says no now and then although it has room: requests are put back or wait, and all end."""
    book = ledger(depth)
    allocate, calls = book.engine.kv_cache.allocate, []

    def moody(rows, lengths):
        calls.append(len(rows))
        return not (len(rows) > 1 and len(calls) % 3 == 0) and allocate(rows, lengths)

    monkeypatch.setattr(book.engine.kv_cache, "allocate", moody)
    book.finish(bound=300)
    assert len(calls) > 20


def test_what_was_cached_is_kept(monkeypatch):
    """A step that breaks off costs what it computed, not what earlier requests have left in the cache."""
    engine = audited_engine(PluginHost.load(only=("basics", "gather")), kv_cache="prefix")
    book = Ledger(engine)
    book.add("first", prompt(64, 0), SamplingParams(temperature=0, max_tokens=1))
    book.finish(bound=5)
    book.add("second", prompt(64, 0) + [1] * 32, SamplingParams(temperature=0, max_tokens=4))
    with monkeypatch.context() as patch:
        fail_at(patch, engine.runner.inner.parts.model, "forward", 1, before=True)
        with pytest.raises(Fault):
            book.step()
    (request,) = engine.requests.values()
    before = len(audited_steps(engine))
    book.finish(bound=9)
    assert sum(step.num_tokens for step in audited_steps(engine)[before:]) == 32 + 3
    assert request.preemptions == 1


@pytest.mark.parametrize("kv_cache", ["paged", "prefix"])
@pytest.mark.parametrize("depth", [0, 1])
def test_ctrl_c_at_any_line(ledger, depth, kv_cache):
    """KeyboardInterrupt at line after line of engine, scheduler, cache and table: every request still ends right.

    Now and then a second one follows, while all requests are put back.
    """
    beyond = ("step", "_broke_off")  # on the way out of `step`, or before anything has been put back
    files = (
        "engine.py",
        "table.py",
        "batch.py",
        "request.py",
        "eager.py",
        "continuous.py",
        "waiting.py",
        "policies.py",
    )
    files += ("paged_cache.py", "prefix_cache.py", "block_index.py", "block_queue.py")

    class Interrupt:
        """Raises at the line of a given number, and again so many lines later, if that is not 0."""

        def __init__(self, at, again):
            self.at, self.again, self.lines, self.active = at, again, 0, True

        def __call__(self, frame, event, arg):
            if not self.active or not frame.f_code.co_filename.endswith(files) or frame.f_code.co_name in beyond:
                return None
            if event == "line":
                self.lines += 1
                if self.lines == self.at:
                    self.at, self.again = self.at + self.again, 0
                    self.active = self.at > self.lines
                    raise KeyboardInterrupt
            return self

    def run(at, again=0):
        book, interrupt = ledger(depth, kv_cache), Interrupt(at, again)
        book.one_by_one = False
        while book.engine.has_work:
            before = sys.gettrace()
            sys.settrace(interrupt)
            try:
                outputs = book.engine.step()
            except KeyboardInterrupt:
                outputs = []
            finally:
                sys.settrace(before)
            book.look(outputs)
        book.finish(bound=0)
        return interrupt.lines

    total = run(0)
    assert total > 1000
    for turn, at in enumerate(range(1, total, STRIDE)):
        run(at, turn % 2 * (1 + turn % 60))
