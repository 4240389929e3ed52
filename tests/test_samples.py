"""Several outputs of one prompt: each is what a request of its own would get, whoever shares its blocks."""

import pytest

from nanofw import PluginHost, SamplingParams
from nanofw.testing.audited import audited_engine, audited_steps, nothing_left, prompt
from nanofw.testing.ledger import Ledger


@pytest.fixture(scope="module")
def build():
    """An engine with a model whose tokens are known: `build(**settings)`."""
    host = PluginHost.load(only=("basics", "gather"))
    return lambda **settings: audited_engine(host, (2, 6, 9, 17, 26), **settings)


SETTINGS = pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache": kv_cache, "scheduler": scheduler, "steps_in_flight": depth, **more}
        for kv_cache in ("paged", "prefix")
        for scheduler in ("continuous", "static")
        for depth in (0, 1)
        for more in ({}, {"kv_blocks": 12, "max_batch_tokens": 8, "options": {"kv_cache": {"block_size": 4}}})
    ],
    ids=lambda s: "-".join(str(s[k]) for k in s if k not in ("options", "max_batch_tokens")),
)


@SETTINGS
@pytest.mark.parametrize("length", [1, 4, 5, 15, 16, 17])
def test_samples_are_requests_of_their_own(build, settings, length):
    """Sample i gets what a request with seed + i gets; streamed or not, with room and without."""
    book = Ledger(build(**settings))
    for number, count in enumerate((1, 9, 20)):
        how = SamplingParams(n=3, seed=7 * number, max_tokens=count)
        book.add(f"{count}", prompt(length, number), how, stream=bool(number % 2))
    book.add("greedy", prompt(length, 9), SamplingParams(n=2, temperature=0, max_tokens=5))
    book.finish(bound=600)


def test_a_prompt_is_computed_once(build):
    """With a cache that shares blocks: the others compute its last token again, for their own logits."""
    computed = {}
    for kv_cache in ("paged", "prefix"):
        engine = build(kv_cache=kv_cache)
        engine.add("x", prompt(50, 0), SamplingParams(n=4, seed=1, max_tokens=3, ignore_eos=True), stream=False)
        (output,) = engine.run()
        computed[kv_cache] = sum(step.num_tokens for step in audited_steps(engine))
        assert (len(output.outputs), output.cached_tokens) == (4, 0)
    assert computed == {"paged": 4 * (50 + 2), "prefix": 50 + 3 + 4 * 2}


def test_a_forked_block_is_copied_once(build):
    """Three blocks of the prompt are shared; each of four samples needs one of its own for what comes after."""
    engine = build(kv_cache="prefix", options={"kv_cache": {"block_size": 16}})
    engine.add("x", prompt(50, 0), SamplingParams(n=4, seed=1, max_tokens=9, ignore_eos=True))
    start = engine.kv_cache.free_blocks
    lowest = start
    while engine.has_work:
        engine.step()
        lowest = min(lowest, engine.kv_cache.free_blocks)
    assert start - lowest == 3 + 4
    nothing_left(engine)


@pytest.mark.parametrize("depth", [0, 1])
def test_streamed_outputs_name_their_sample(build, depth):
    """One sample an output, and all of them in the last one."""
    engine = build(steps_in_flight=depth)
    engine.add("x", [1, 2, 3], SamplingParams(n=3, seed=5, max_tokens=4, ignore_eos=True))
    *streamed, last = engine.run()
    assert [o.finished for o in streamed] == [False] * 12
    for index in range(3):
        mine = [o.outputs[0] for o in streamed if o.outputs[0].index == index]
        assert [len(c.token_ids) for c in mine] == [1, 2, 3, 4]
        assert [c.finish_reason for c in mine] == [None] * 3 + ["length"]
        assert mine[-1] == last.outputs[index]
    assert last.finished
    assert [c.index for c in last.outputs] == [0, 1, 2]
    assert len({c.token_ids for c in last.outputs}) == 3


@pytest.mark.parametrize("kv_cache", ["paged", "prefix"])
@pytest.mark.parametrize("depth", [0, 1])
def test_abort_ends_all_samples(build, depth, kv_cache):
    """Before the others have begun, when all run, and when some have ended."""
    for steps in range(12):
        engine = build(steps_in_flight=depth, kv_cache=kv_cache, max_batch_tokens=8, max_num_seqs=3)
        engine.add("x", prompt(20, 0), SamplingParams(n=4, seed=1, max_tokens=3, ignore_eos=True))
        for _ in range(steps):
            engine.step()
        output = engine.abort("x")
        if output is not None:
            assert {c.finish_reason for c in output.outputs} <= {"abort", "length"}
            assert [c.index for c in output.outputs] == [0, 1, 2, 3]
        assert list(engine.run()) == []
        nothing_left(engine)


def test_seeds_of_the_engine(build):
    """Without a seed, samples and later requests all differ."""
    engine = build()
    engine.add("x", [1, 2], SamplingParams(n=3, max_tokens=9, ignore_eos=True), stream=False)
    engine.add("y", [1, 2], SamplingParams(max_tokens=9, ignore_eos=True), stream=False)
    found = [c.token_ids for o in engine.run() for c in o.outputs]
    assert len(set(found)) == 4


def test_text_of_samples(llm):
    """Deltas of each sample join to its text; `generate` gives them all, in order."""
    engine = llm(kv_cache="prefix")
    how = SamplingParams(n=3, seed=4, temperature=0.9, max_tokens=12, ignore_eos=True, logprobs=1)
    whole = engine.generate(["Grüße", "你好"], how)
    text, last = {}, {}
    for output in engine.stream(["Grüße", "你好"], how):
        if output.finished:
            last[output.prompt] = output
        else:
            key = output.prompt, output.outputs[0].index
            text[key] = text.get(key, "") + output.delta
    for output in whole:
        assert output.outputs == last[output.prompt].outputs
        assert [c.text for c in output.outputs] == [text[output.prompt, index] for index in range(3)]
        assert all(len(c.logprobs) == 12 for c in output.outputs)
    alone = engine.generate(["Grüße"], SamplingParams(seed=6, temperature=0.9, max_tokens=12, ignore_eos=True))
    assert alone[0].outputs[0].token_ids == whole[0].outputs[2].token_ids
