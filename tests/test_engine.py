"""The loop, with a model whose tokens are known: ends, refusals, streams, and steps in flight."""

import pytest

import nanofw
from nanofw import PluginHost, SamplingParams
from nanofw.errors import EngineError, RequestError
from nanofw.testing.audited import audited_engine, audited_steps, context_model, host_with, nothing_left, prompt, run
from nanofw_basics.sampler import DefaultSampler

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


@pytest.fixture(scope="module")
def build():
    """An engine with a model whose tokens are known: `build(**settings)`."""
    host = PluginHost.load(only=("basics", "gather"))
    return lambda *args, **settings: audited_engine(host, *args, **settings)


def greedy(count, **params):
    return SamplingParams(temperature=0, max_tokens=count, **params)


def finish(engine):
    """Final outputs by id."""
    return {o.request_id: o for o in engine.run() if o.finished}


def ids(output):
    return list(output.outputs[0].token_ids)


def reason(output):
    return output.outputs[0].finish_reason


@pytest.mark.parametrize("scheduler", ["continuous", "static"])
@pytest.mark.parametrize("blocks", [64, 7])
def test_depth_0_and_1_give_the_same_tokens(build, scheduler, blocks):
    """Greedy and sampled, streamed or not, with stop ids, in a pool with room and in one without."""
    found = []
    for depth in (0, 1):
        settings = {"kv_blocks": blocks, "max_batch_tokens": 16, "options": {"kv_cache": {"block_size": 8}}}
        engine = build((2, 6, 9, 17, 26), scheduler=scheduler, steps_in_flight=depth, **settings)
        for i in range(9):
            how = SamplingParams(temperature=i % 2, seed=i, max_tokens=20, logprobs=1 if i == 4 else None)
            engine.add(f"r{i}", prompt(1 + 5 * i, i), how, stream=bool(i % 3))
        found.append({k: (ids(o), reason(o), o.outputs[0].logprobs) for k, o in finish(engine).items()})
        nothing_left(engine)
    assert found[0] == found[1]
    assert {reason for _, reason, _ in found[0].values()} >= {"stop", "length"}


def test_depth_1_runs_a_step_ahead(build):
    """The first call brings nothing: its step is in flight while the next one is planned."""
    engine = build(steps_in_flight=1)
    engine.add("x", [1, 2], greedy(3))
    counts = [(len(audited_steps(engine)), len(engine.step())) for _ in range(4)]
    assert counts == [(0, 0), (1, 1), (2, 1), (3, 1)]
    assert not engine.has_work


@DEPTHS
def test_tokens_past_the_end_are_dropped(build, depth):
    """An end learned from a token's value: nothing computed beyond it is ever reported."""
    tokens = context_model().greedy([1, 2, 3], 30)
    stop = tokens[6]
    engine = build((stop,), steps_in_flight=depth)
    engine.add("x", [1, 2, 3], greedy(30))
    outputs = list(engine.run())
    assert [ids(o) for o in outputs] == [tokens[: n + 1] for n in range(tokens.index(stop) + 1)]
    nothing_left(engine)


@DEPTHS
@pytest.mark.parametrize(
    ("settings", "length", "count", "expected", "generated"),
    [
        ({}, 5, 7, "length", 7),
        ({}, 5, 1, "length", 1),
        ({"max_model_len": 32}, 30, 7, "context", 2),
        ({"max_model_len": 32}, 31, 7, "context", 1),
        ({"max_model_len": 32}, 30, 2, "length", 2),
        ({"kv_blocks": 2}, 30, 7, "kv_capacity", 3),
        ({"kv_blocks": 2}, 32, 7, "kv_capacity", 1),
        ({"kv_blocks": 2}, 32, 1, "length", 1),
    ],
)
def test_why_a_request_ended(build, depth, settings, length, count, expected, generated):
    """prime-rl#398 (one token is an ordinary case), vllm#39734 b; the last token needs no room in the cache."""
    engine = build(steps_in_flight=depth, **settings)
    engine.add("x", prompt(length, 0), greedy(count))
    output = finish(engine)["x"]
    assert (reason(output), len(ids(output))) == (expected, generated)
    assert ids(output) == context_model().greedy(prompt(length, 0), generated)
    nothing_left(engine)


@DEPTHS
def test_any_of_several_end_ids(build, depth):
    """exllamav2#803, vllm#4180: end ids are a list, and each of them ends a sequence."""
    tokens = context_model().greedy([1, 2, 3], 40)
    distinct = list(dict.fromkeys(tokens))
    for stop in distinct[2:8]:
        missing = [i for i in range(128) if i not in tokens][:5]
        engine = build((*missing, stop), steps_in_flight=depth)
        engine.add("x", [1, 2, 3], greedy(40))
        output = finish(engine)["x"]
        assert (reason(output), ids(output)) == ("stop", tokens[: tokens.index(stop) + 1])


def test_stop_token_ids_beside_the_models_own(build):
    tokens = context_model().greedy([1, 2, 3], 40)
    first, second = list(dict.fromkeys(tokens))[3:5]
    engine = build((second,))
    engine.add("own", [1, 2, 3], greedy(40))
    engine.add("both", [1, 2, 3], greedy(40, stop_token_ids=[first]))
    engine.add("mine", [1, 2, 3], greedy(40, stop_token_ids=[first], ignore_eos=True))
    engine.add("none", [1, 2, 3], greedy(40, ignore_eos=True))
    found = finish(engine)
    assert ids(found["own"]) == tokens[: tokens.index(second) + 1]
    assert ids(found["both"]) == ids(found["mine"]) == tokens[: tokens.index(first) + 1]
    assert (ids(found["none"]), reason(found["none"])) == (tokens, "length")


@DEPTHS
def test_an_end_id_as_the_last_of_max_tokens(build, depth):
    """Both reasons at once: the end that the model chose is told."""
    tokens = context_model().greedy([1, 2, 3], 5)
    engine = build((tokens[4],), steps_in_flight=depth)
    engine.add("x", [1, 2, 3], greedy(tokens.index(tokens[4]) + 1))
    assert reason(finish(engine)["x"]) == "stop"


@DEPTHS
@pytest.mark.parametrize("count", [0, 1, 4, 5, 6, 30])
def test_min_tokens(build, depth, count):
    """An end id before that many tokens is a token like any other; the next one that comes counts."""
    tokens = context_model().greedy([1, 2, 3], 40)
    ends = set(tokens[4:6])
    engine = build((tokens[4],), steps_in_flight=depth)
    engine.add("x", [1, 2, 3], greedy(40, min_tokens=count, stop_token_ids=[tokens[5]]))
    output = finish(engine)["x"]
    expected = next((n for n in range(max(count, 1), 40) if tokens[n - 1] in ends), 40)
    assert ids(output) == tokens[:expected]
    assert reason(output) == ("stop" if expected < 40 else "length")


@DEPTHS
def test_an_id_in_use(build, depth):
    """vllm#10583: a second live request of the same id is refused, and the first does not notice."""
    engine = build(steps_in_flight=depth)
    engine.add("x", [1, 2, 3], greedy(10))
    engine.step(), engine.step()
    with pytest.raises(RequestError, match="request id 'x' is in use by an unfinished request; choose another"):
        engine.add("x", [4, 5], greedy(10))
    assert ids(finish(engine)["x"]) == context_model().greedy([1, 2, 3], 10)
    engine.add("x", [4, 5], greedy(4))
    assert ids(finish(engine)["x"]) == context_model().greedy([4, 5], 4)
    nothing_left(engine)


@DEPTHS
def test_an_id_is_free_again_at_once(build, depth):
    """Ended or aborted, with steps of its first life still in flight: the second life is its own."""
    engine = build(steps_in_flight=depth)
    engine.add("x", [1, 2, 3], greedy(10))
    engine.step(), engine.step()
    engine.abort("x")
    engine.add("x", [4, 5], greedy(4))
    assert ids(finish(engine)["x"]) == context_model().greedy([4, 5], 4)
    nothing_left(engine)


REFUSED = {
    "empty": ([], {}, "the prompt has no tokens; it needs at least one"),
    "negative": ([1, -1], {}, "the prompt holds token id -1; the model's ids are 0 to 127"),
    "vocabulary": ([1, 128, 5], {}, "the prompt holds token id 128; the model's ids are 0 to 127"),
    "context": ([1] * 256, {}, "the prompt has 256 tokens; at a length limit of 256 .* it may have at most 255"),
    "pool": ([1] * 65, {}, r"65 tokens and the whole KV cache holds 64; it can never run: shorten it, .*\(kv_blocks\)"),
    "stop": ([1], {"stop": "x"}, "stop strings need a tokenizer, and this engine has none; use stop_token_ids"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_never_run_is_refused(build, case):
    """vllm#7632 (an empty prompt ended the engine), vllm#39734 a: that request alone is refused, and the rest runs."""
    tokens, params, message = REFUSED[case]
    engine = build(kv_blocks=4)
    engine.add("before", [1, 2], greedy(5))
    engine.step()
    with pytest.raises(RequestError, match=message):
        engine.add("bad", tokens, greedy(5, **params))
    engine.add("after", [3, 4], greedy(5))
    found = finish(engine)
    assert set(found) == {"before", "after"}
    assert ids(found["after"]) == context_model().greedy([3, 4], 5)
    nothing_left(engine)


def test_pool_smaller_than_the_length_limit(build):
    """vllm#39734 as reported: 128 slots, a limit of 1,024. The small request always completes, in bounded steps."""
    engine = build(kv_blocks=8, max_model_len=1024)
    with pytest.raises(RequestError, match="it can never run"):
        engine.add("a", prompt(200, 0), greedy(10))
    outputs = run(engine, [(prompt(100, 1), 100), (prompt(10, 2), 10)])
    assert [reason(o) for o in outputs] == ["kv_capacity", "length"]
    assert len(audited_steps(engine)) <= 60


@DEPTHS
def test_a_stream_reports_every_token_once(build, depth):
    engine = build(steps_in_flight=depth, max_batch_tokens=4)
    engine.add("x", prompt(9, 0), greedy(6))
    engine.add("quiet", prompt(3, 1), greedy(6), stream=False)
    outputs = list(engine.run())
    streamed = [o for o in outputs if o.request_id == "x"]
    assert [ids(o) for o in streamed] == [context_model().greedy(prompt(9, 0), n) for n in range(1, 7)]
    assert [o.finished for o in streamed] == [False] * 5 + [True]
    assert [reason(o) for o in streamed] == [None] * 5 + ["length"]
    assert [o.finished for o in outputs if o.request_id == "quiet"] == [True]


def test_an_output_says_what_was_asked(build):
    engine = build()
    engine.add("x", [1, 2, 3], greedy(2), prompt="a text")
    output = finish(engine)["x"]
    assert (output.prompt, output.prompt_token_ids, output.cached_tokens, output.preemptions) == (
        "a text",
        (1, 2, 3),
        0,
        0,
    )


@DEPTHS
@pytest.mark.parametrize("wanted", [0, 1, 5, 20])
def test_logprobs(build, depth, wanted):
    """One entry a token, the chosen one's too; a value does not depend on how many were asked for (vllm#44319)."""
    engine = build(steps_in_flight=depth)
    engine.add("x", [1, 2, 3], greedy(4, logprobs=wanted))
    engine.add("most", [1, 2, 3], greedy(4, logprobs=20))
    engine.add("none", [1, 2, 3], greedy(4))
    found = finish(engine)
    mine, most = found["x"].outputs[0].logprobs, found["most"].outputs[0].logprobs
    assert found["none"].outputs[0].logprobs is None
    assert [entry.token_id for entry in mine] == ids(found["x"])
    for few, many in zip(mine, most, strict=True):
        assert (few.logprob, few.top) == (many.logprob, many.top[:wanted])
        assert few.logprob < 0
        if wanted:
            assert few.top[0] == (few.token_id, few.logprob)


@DEPTHS
def test_logprobs_survive_preemption(build, depth):
    """One entry a token, whatever was put back and computed again."""
    engine = build(kv_blocks=5, steps_in_flight=depth, options={"kv_cache": {"block_size": 4}})
    for i in range(3):
        engine.add(str(i), prompt(4, i), greedy(9, logprobs=1))
    found = finish(engine)
    assert sum(o.preemptions for o in found.values()) > 0
    for output in found.values():
        assert [entry.token_id for entry in output.outputs[0].logprobs] == ids(output)


def test_seeds(build):
    """A seed given decides alone; without one, the engine's seed and the request's number do."""

    def tokens(engine_seed, *seeds):
        engine = build(seed=engine_seed)
        for i, seed in enumerate(seeds):
            engine.add(str(i), [1, 2, 3], SamplingParams(temperature=1, seed=seed, max_tokens=12))
        found = finish(engine)
        return [ids(found[str(i)]) for i in range(len(seeds))]

    assert tokens(0, 5, 5, 6)[0] == tokens(1, 6, 5, 5)[1]
    one, same, other = tokens(0, 5, 5, 6)
    assert one == same != other
    assert tokens(0, None, None) == tokens(0, None, None)
    assert tokens(0, None) != tokens(1, None)
    first, second = tokens(0, None, None)
    assert first != second


@pytest.mark.parametrize("seed", [-1, 0, 2**63, 2**64 - 1, 2**70])
def test_any_integer_is_a_seed(build, seed):
    engine = build()
    engine.add("x", [1], SamplingParams(seed=seed, max_tokens=3))
    assert len(ids(finish(engine)["x"])) == 3


@DEPTHS
def test_abort(build, depth):
    engine = build(steps_in_flight=depth)
    engine.add("x", [1, 2, 3], greedy(20))
    engine.add("y", [4, 5], greedy(5))
    for _ in range(4):
        engine.step()
    output = engine.abort("x")
    assert (output.finished, reason(output)) == (True, "abort")
    assert ids(output) == context_model().greedy([1, 2, 3], 4 - depth)
    assert engine.abort("x") is None
    assert engine.abort("nobody") is None
    assert set(finish(engine)) == {"y"}
    nothing_left(engine)


@DEPTHS
def test_abort_of_everything_in_flight(build, depth):
    engine = build(steps_in_flight=depth)
    engine.add("x", [1, 2, 3], greedy(20))
    engine.step(), engine.step()
    engine.abort("x")
    assert list(engine.run()) == []
    assert engine.step() == []
    nothing_left(engine)


class NoLogprobs(DefaultSampler):
    def sample(self, logits, sampling):
        return nanofw.Sampled(super().sample(logits, sampling).tokens)


def test_a_sampler_without_logprobs():
    engine = audited_engine(host_with("sampler", NoLogprobs), sampler="under-test")
    engine.add("x", [1], greedy(2, logprobs=1))
    with pytest.raises(EngineError, match="the sampler returned no logprobs although a request asked for them"):
        engine.step()


def test_what_serves_is_told(build):
    resolved = build().resolved
    assert {kind: r.name for kind, r in resolved.items() if kind != "model"} == {
        "attention": "naive-gather",
        "kv_cache": "paged",
        "scheduler": "continuous",
        "runner": "eager",
        "sampler": "default",
    }
    assert {r.distribution for r in resolved.values()} == {"nanofw"}
    assert {r.version for r in resolved.values()} == {nanofw.__version__}
    assert resolved["runner"].path == "eager"
