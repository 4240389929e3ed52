"""Faults that users of other engines reported, cases A2 to A9, whatever is switched on.

The prefix cache on and off, static buffers (what a graph replays) on and off, prompts in chunks and in one piece, a
step in flight or none. What comes out is compared with the model's own tokens, or with the same request alone in the
plainest engine. Cases that concern a single kernel, sampler or checkpoint are in the suites and beside their plugins.
"""

import copy
import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
import torch

import nanofw
from nanofw import LLM, Config, PluginHost, SamplingParams
from nanofw.build import build_engine
from nanofw.errors import RequestError
from nanofw.testing.attention_memory import FAR, far_kv
from nanofw.testing.audited import audited_engine, check, context_model, nothing_left, prompt, run
from nanofw.testing.cases import Case
from nanofw.testing.ledger import Ledger
from nanofw.testing.null import NullModel, NullSource
from nanofw.testing.plain_attention import PlainAttention
from nanofw.text import REPLACEMENT


class Plugin:
    nanofw_api = nanofw.API

    @staticmethod
    @nanofw.hookimpl
    def nanofw_register_attention(register):
        register("plain", PlainAttention)


@functools.cache
def host():
    loaded = PluginHost.load(only=("basics", "gather", "cudagraph"))
    loaded.register(Plugin, "plain")
    return loaded


class Switches:
    """One combination, and the engines that have it."""

    def __init__(self, prefix, static, chunked, depth):
        self.prefix, self.static, self.chunked, self.depth = prefix, static, chunked, depth

    def __str__(self):
        names = ("prefix" * self.prefix, "static" * self.static, "chunked" * self.chunked, "ahead" * self.depth)
        return "-".join(filter(None, names)) or "plain"

    def settings(self, block_size=16, **changes):
        runner = {"buckets": [1, 2, 4, 8], "contexts": [32]} if self.static else {}
        return {
            "attention": "plain",
            "kv_cache": "prefix" if self.prefix else "paged",
            "runner": "cuda-graph" if self.static else "eager",
            "steps_in_flight": self.depth,
            "max_batch_tokens": 12 if self.chunked else 512,
            "max_num_seqs": 12,
            "options": {"kv_cache": {"block_size": block_size}, "runner": runner},
        } | changes

    def engine(self, eos_token_ids=(), **changes):
        """With a model whose tokens are known."""
        return audited_engine(host(), eos_token_ids, **self.settings(**changes))

    def llm(self, name, loaded, **changes):
        """With a small real model."""
        settings = {"device": "cpu", "dtype": "float32", "kv_blocks": 128, "max_model_len": 256}
        source, model = loaded(name)
        return LLM(name, host=host(), source=source, loaded=model, **settings | self.settings(**changes))


ALL = [Switches(*on) for on in itertools.product((False, True), repeat=4)]


@pytest.fixture(params=ALL, ids=str)
def switches(request):
    return request.param


@pytest.fixture(scope="session")
def models():
    """Dummy models, loaded once."""
    from nanofw.build import build_model
    from nanofw.weights import resolve

    @functools.cache
    def load(name):
        source = resolve(name)
        return source, build_model(Config(model=name, device="cpu", dtype="float32"), host(), source)

    return load


@pytest.fixture(scope="session")
def alone(models):
    """What a request gets alone in the plainest engine."""

    @functools.cache
    def serve(name, tokens, params):
        source, model = models(name)
        settings = {"device": "cpu", "dtype": "float32", "kv_blocks": 128, "max_model_len": 256}
        llm = LLM(name, host=host(), source=source, loaded=model, attention="naive-gather", **settings)
        return llm.generate([list(tokens)], params)[0].outputs[0]

    return lambda name, tokens, params: serve(name, tuple(tokens), params)


def greedy(count, **params):
    return SamplingParams(temperature=0, max_tokens=count, **params)


def assert_same(output, expected):
    """The same tokens, and log-probabilities but for rounding."""
    (found,) = output.outputs
    assert found.token_ids == expected.token_ids
    assert found.finish_reason == expected.finish_reason
    for one, other in zip(found.logprobs or (), expected.logprobs or (), strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=2e-4)


def test_a2_blocks_beyond_int32(switches, models, alone):
    """Blocks from the fourth on begin beyond element 2**31 of each layer; those before it, where a wrap might lead,
    are somebody else's.
    """
    how = greedy(6, ignore_eos=True, logprobs=1)
    llm = switches.llm("dummy:tiny", models, kv_blocks=12)
    cache = llm.engine.kv_cache
    spec = cache.layers[0].spec
    case = Case((1,), heads=spec.num_heads, kv_heads=spec.num_kv_heads, head_size=spec.head_size, block_size=16)
    stride = FAR // 4 + 16 * spec.num_kv_heads * spec.head_size
    far = [far_kv(case, torch.device("cpu"), stride, cache.num_blocks) for _ in cache.layers]
    cache.layers = [dataclasses.replace(one, index=i, spec=cache.layers[i].spec) for i, one in enumerate(far)]
    prompts = [prompt(40, 0), prompt(40, 1), prompt(16, 2)]
    for _ in range(1 + switches.prefix):
        for tokens, output in zip(prompts, llm.generate(prompts, how), strict=True):
            assert_same(output, alone("dummy:tiny", tokens, how))
    written = [bool(one.key[block].any()) for one in far for block in range(1, 8)]
    assert sum(written) >= 6 * len(far), "the far blocks were meant to be used"


@pytest.mark.parametrize("name", ["dummy:gemma-tiny", "dummy:gemma3-tiny"])
def test_a3_windows_and_caps(switches, models, alone, name):
    """Windows of 16 in some layers, shorter than the prompts and grown past in decode; capped scores."""
    how = greedy(10, ignore_eos=True, logprobs=1)
    prompts = [prompt(length, length) for length in (3, 15, 17, 40)]
    llm = switches.llm(name, models)
    for _ in range(1 + switches.prefix):
        for tokens, output in zip(prompts, llm.generate(prompts, how), strict=True):
            assert_same(output, alone(name, tokens, how))


@pytest.mark.parametrize("live", [3, 5, 9])
def test_a4_only_live_slots_are_written(switches, live):
    """Three in a bucket of four, five of eight, nine in none: a step changes its own slots, no other byte of the pool.

    The pool is just large enough: in one piece, the last block and the one after the null block are both in use.
    """
    engine = switches.engine(kv_blocks=live * 2, max_num_seqs=9)
    layer, submit = engine.kv_cache.layers[0], engine.runner.inner.submit
    layer.key.fill_(-7.0)
    layer.value.fill_(-7.0)
    used = set()

    def watched(step):
        before = layer.key.clone(), layer.value.clone()
        pending = submit(step)
        used.update(step.slot_mapping.tolist())
        for old, new in zip(before, (layer.key, layer.value), strict=True):
            changed = (old != new).flatten(2).any(-1).flatten().nonzero()[:, 0].tolist()
            assert set(changed) <= set(step.slot_mapping.tolist()), "a slot was written that is not the step's"
        return pending

    engine.runner.inner.submit = watched
    work = [([max(token, 1) for token in prompt(17 + i, i)], 6) for i in range(live)]  # padding would write a 0
    check(engine, work, run(engine, work))
    blocks = {slot // 16 for slot in used}
    assert blocks == set(range(1, live * 2 + 1)) or (switches.chunked and blocks >= {1, 2, 3, 4})
    above = sum(engine.runner.report.fallbacks.values())
    if live < 9 or not switches.static:
        assert not above
    elif not switches.chunked:  # in chunks they may not all decode at once
        assert above > 0


def test_a5_the_whole_prompt_is_cached(switches):
    """Three times one after another, then two in one step: never more than all but the last token is found."""
    engine = switches.engine()
    for length in (15, 16, 17, 32, 33):
        work, hits, layer = [(prompt(length, length), 5)], [], engine.kv_cache.layers[0]
        for batch in (work, work, work, work * 2):
            outputs = run(engine, batch)
            check(engine, batch, outputs)
            hits += [output.cached_tokens for output in outputs]
            pools = layer.key.flatten(0, 1), layer.value.flatten(0, 1)
            if len(hits) == 1:
                slots = np.concatenate([step.slot_mapping for step in engine.runner.steps])
                shared = slots[: (length - 1) // 16 * 16]
                before = [pool[shared].clone() for pool in pools]
            elif switches.prefix:
                assert all(torch.equal(pool[shared], old) for pool, old in zip(pools, before, strict=True))
        engine.runner.steps.clear()
        assert hits == [0] + [(length - 1) // 16 * 16 * switches.prefix] * 4


def test_a5_logprobs_of_a_cached_prompt(switches, models, alone):
    """With a real model: the tokens and log-probabilities of a fresh run, each time."""
    llm, how = switches.llm("dummy:tiny", models), greedy(5, ignore_eos=True, logprobs=2)
    for length in (15, 16, 17, 32, 33):
        for times in (1, 1, 1, 2):
            for output in llm.generate([prompt(length, length)] * times, how):
                assert_same(output, alone("dummy:tiny", prompt(length, length), how))
    nothing_left(llm.engine)


def test_a5_a_common_beginning_in_one_step(switches):
    """Nobody reads a block that another request of the same step has not filled yet."""
    engine = switches.engine()
    common = prompt(40, 0)
    work = [(common + prompt(n, n), 6) for n in (1, 8, 9)] + [(common, 6), (common, 6), (common[:33], 6)]
    for _ in range(2):
        check(engine, work, run(engine, work))


def test_a6_larger_than_the_pool(switches):
    """Refused, or ended with a reason, in a bounded number of steps; a small one behind them always runs."""
    engine = switches.engine(kv_blocks=8, max_model_len=256)
    with pytest.raises(RequestError, match="the whole KV cache holds 128; it can never run"):
        engine.add("never", prompt(200, 0))
    work = [(prompt(100, 1), 100), (prompt(10, 2), 5)]
    outputs = run(engine, work)
    check(engine, work, outputs)
    assert [o.outputs[0].finish_reason for o in outputs] == ["kv_capacity", "length"]
    assert len(outputs[0].outputs[0].token_ids) == 128 + 1 - 100


def test_a6_together_larger_than_the_pool(switches):
    """Put back, once and again and again: the tokens of an ample pool."""
    for count, tokens, blocks, times in ((4, 14, 14, 1), (8, 20, 10, 2)):
        engine = switches.engine(block_size=4, kv_blocks=blocks)
        work = [(prompt(5 + i, i), tokens) for i in range(count)]
        outputs = run(engine, work)
        check(engine, work, outputs)
        assert max(o.preemptions for o in outputs) >= times


def test_a7_an_id_twice(switches):
    """Refused while it is in use; the first goes on. Free again afterwards, and independent of what it was."""
    engine = switches.engine()
    book = Ledger(engine)
    book.add("x", prompt(20, 0), greedy(8))
    for _ in range(2):
        book.step()
    with pytest.raises(RequestError, match="'x' is in use"):
        engine.add("x", prompt(5, 1), greedy(3))
    with pytest.raises(RequestError, match="no tokens"):
        engine.add("empty", [])
    book.finish(bound=30)
    book.add("x", prompt(5, 1), greedy(3))
    book.finish(bound=30)


def test_a7_everything_comes_back(switches):
    """Free blocks after 200 requests == at the start."""
    engine = switches.engine(kv_blocks=24)
    work = [(prompt(30, i % 7)[: 1 + i * 7 % 30], 1 + i % 6) for i in range(200)]
    check(engine, work, run(engine, work))


def test_a7_generate_twice(switches, models):
    """Order and count kept, each call its own ids and outputs, and the model's config as it was."""
    llm = switches.llm("dummy:tiny", models)
    before = copy.deepcopy(llm.source.config.to_dict())
    prompts = [prompt(length, 0) for length in (20, 3, 17, 9)]
    how = [greedy(count, ignore_eos=True) for count in (9, 1, 5, 3)]
    first, second = llm.generate(prompts, how), llm.generate(prompts[1:3], how[1:3])
    assert [list(o.prompt_token_ids) for o in first] == prompts
    assert [len(o.outputs[0].token_ids) for o in first] == [9, 1, 5, 3]
    assert [o.outputs for o in second] == [o.outputs for o in first[1:3]]
    assert not {o.request_id for o in first} & {o.request_id for o in second}
    assert llm.source.config.to_dict() == before
    nothing_left(llm.engine)


TEXT = "é, 你好 🇩🇪 👨‍👩‍👧‍👦 e\u0301"


class Scripted(NullModel):
    """Says the same text whatever it is asked."""

    def __init__(self, source, script):
        super().__init__(source)
        self.script = torch.tensor(script)

    def forward(self, batch, attention, kv):
        at = batch.positions[batch.logits_indices] % len(self.script)
        return torch.nn.functional.one_hot(self.script[at], self.spec.vocab_size).float()


@pytest.fixture
def says(switches, byte_tokenizer):
    """An engine that says a text, a byte a token, and ends: `says(text)`."""

    def build(text):
        end = byte_tokenizer.eos_token_id
        source = NullSource(len(byte_tokenizer), eos_token_ids=(end,))
        model = Scripted(source, [*byte_tokenizer.encode(text, add_special_tokens=False), end])
        config = Config.build({"device": "cpu", "kv_blocks": 64, "max_model_len": 256} | switches.settings())
        engine = build_engine(config, host(), source, model)
        engine.tokenizer = byte_tokenizer
        return engine

    return build


def test_a8_characters_split_over_tokens(says, byte_tokenizer):
    """Deltas join to the text, none holds half a character; cut in the middle of one, its bytes come out at the end."""
    engine = says(TEXT)
    ways = [greedy(200), greedy(1), greedy(6), greedy(200, stop="🇩🇪"), greedy(200, stop=["好 ", "👨"])]
    texts = [TEXT, "", "é, 你"[:3], "é, 你好 ", "é, 你"]
    for i, how in enumerate(ways):
        engine.add(str(i), [65], how)
    deltas, last = {}, {}
    for output in engine.run():
        deltas.setdefault(output.request_id, []).append(output.delta)
        last[output.request_id] = output.outputs[0]
    for i, (how, text) in enumerate(zip(ways, texts, strict=True)):
        mine, found = deltas[str(i)], last[str(i)]
        assert "".join(mine) == found.text
        assert not any(REPLACEMENT in delta for delta in mine[:-1])
        whole = byte_tokenizer.decode(found.token_ids, skip_special_tokens=True)
        assert found.text == (text if how.stop or how.max_tokens == 200 else whole)
        assert found.finish_reason == ("length" if how.max_tokens < 200 else "stop")
        assert len(found.token_ids) <= how.max_tokens


def test_a8_any_of_several_end_ids(switches):
    """All of a list of end ids end a request; one token is an ordinary case; none is refused."""
    tokens = {i: context_model().greedy(prompt(9, i), 20) for i in range(4)}
    ends = tuple({found[3 + 2 * i] for i, found in tokens.items()})
    engine = switches.engine(ends)
    book = Ledger(engine)
    for i in tokens:
        book.add(str(i), prompt(9, i), greedy(20))
    book.add("one", prompt(9, 9), greedy(1))
    book.finish(bound=60)
    assert book.ended == {"stop": 4, "length": 1}
    with pytest.raises(RequestError, match="max_tokens=0 is out of range"):
        greedy(0)


def test_a9_tiny_temperatures(switches, models, alone):
    """Tiny ones take the arg-max, beside rows at 1.0 that get what they get alone; logprobs whatever is asked."""
    tiny = [SamplingParams(temperature=t, max_tokens=6, ignore_eos=True, seed=1) for t in (0, 1e-6, 1e-5, 1e-4, 1e-3)]
    warm = [SamplingParams(temperature=1.0, top_k=k, max_tokens=6, ignore_eos=True, seed=5) for k in (-1, 0, 7, 10**6)]
    asking = [greedy(6, ignore_eos=True, logprobs=count) for count in (1, 5, 20)]
    mine, many = prompt(18, 3), [*tiny, *warm, *asking]
    outputs = switches.llm("dummy:tiny", models).generate([mine] * len(many), many)
    best = alone("dummy:tiny", mine, tiny[0])
    for how, output in zip(many, outputs, strict=True):
        assert_same(output, alone("dummy:tiny", mine, how))
        assert (output.outputs[0].token_ids == best.token_ids) == (how not in warm)
    one, *others = [[entry.logprob for entry in output.outputs[0].logprobs] for output in outputs[-3:]]
    for other in others:
        assert one == pytest.approx(other, abs=1e-5)


class Peaked(NullModel):
    """Half-precision logits whose maxima are 11 and 40 in turn, each twice; never at id 0."""

    def forward(self, batch, attention, kv):
        logits = super().forward(batch, attention, kv)
        at = batch.positions[batch.logits_indices]
        rows, best = torch.arange(len(at)), self.best(at)
        for token in (best, best + 5):
            logits[rows, token] = torch.where(at % 2 == 0, 11.0, 40.0).to(logits.dtype)
        return logits

    @staticmethod
    def best(position):
        return position * 13 % 100 + 7


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a9_tiny_temperatures_in_half_precision(switches, dtype):
    """The largest, exact ties by the lower id where the temperature is 0; nothing that is not finite; rows at 1.0 are
    what they are alone.
    """
    source = NullSource()
    settings = {"device": "cpu", "kv_blocks": 64, "max_model_len": 256} | switches.settings()
    engine = build_engine(Config.build(settings), host(), source, Peaked(source, dtype))
    rest = {"max_tokens": 8, "seed": 3, "logprobs": 2}
    how = [SamplingParams(temperature=t, **rest) for t in (0, 1e-6, 1.0, 1e-5, 0, 1e-4, 1e-3, 1.0)]
    for name, params in enumerate(how):
        engine.add(str(name), [1, 2, 3], params, stream=False)
    found = {output.request_id: output.outputs[0] for output in engine.run()}
    engine.add("alone", [1, 2, 3], SamplingParams(temperature=1.0, **rest), stream=False)
    (alone,) = [output.outputs[0] for output in engine.run()]
    for name, params in enumerate(how):
        output = found[str(name)]
        best = Peaked.best(torch.arange(2, 10)).tolist()
        assert all(math.isfinite(value) for entry in output.logprobs for _, value in entry.top)
        if params.temperature == 1.0:
            assert output == alone
        elif params.temperature == 0:
            assert list(output.token_ids) == best
        else:
            assert all(token - low in (0, 5) for token, low in zip(output.token_ids, best, strict=True))


def test_nothing_of_it_was_left_out():
    """Sixteen combinations, and in each the parts that its name says."""
    assert len({str(switches) for switches in ALL}) == 16
    for switches in ALL:
        engine = switches.engine()
        run(engine, [(prompt(30, 0), 5)])
        assert engine.resolved["kv_cache"].name == ("prefix" if switches.prefix else "paged")
        assert engine.resolved["runner"].name == ("cuda-graph" if switches.static else "eager")
        assert engine.depth == switches.depth
        assert (max(step.num_tokens for step in engine.runner.steps) < 30) == switches.chunked
        nothing_left(engine)
