"""Greedy tokens of whole engines equal `transformers` generate on the same weights, whatever plugins serve them."""

import functools
import random

import pytest
import torch

from nanofw import LLM, SamplingParams

MODELS = ["dummy:tiny", "dummy:llama-tiny", "dummy:untied-tiny", "dummy:gemma-tiny", "dummy:gemma3-tiny"]
MODELS.append("dummy:smollm2-tiny")
COMBINATIONS = [
    (attention, scheduler, depth)
    for attention in ("naive-gather", "vectorized-gather")
    for scheduler in ("continuous", "static")
    for depth in (0, 1)
]
NEW = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NEW)  # both stop at the end-of-sequence id
LENGTHS = (1, 2, 15, 16, 17, 33, 50)


def prompts(lengths=LENGTHS, seed=0):
    draw = random.Random(seed)
    return [[draw.randrange(256) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="session")
def generated(module_of):
    """What transformers generates."""

    @functools.cache
    def generate(name, prompt):
        module = module_of(name)
        ids = torch.tensor([prompt])
        config = module.generation_config.__class__(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        out = module.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return out[0, len(prompt) :].tolist()

    return lambda name, many: [generate(name, tuple(p)) for p in many]


def tokens(outputs):
    return [list(o.outputs[0].token_ids) for o in outputs]


@pytest.mark.parametrize(("attention", "scheduler", "depth"), COMBINATIONS)
@pytest.mark.parametrize("name", MODELS)
def test_ragged_batch(llm, generated, name, attention, scheduler, depth):
    engine = llm(name, attention=attention, scheduler=scheduler, steps_in_flight=depth)
    assert tokens(engine.generate(prompts(), GREEDY)) == generated(name, prompts())
    assert engine.engine.resolved["attention"].name == attention


@pytest.mark.parametrize(("attention", "scheduler", "depth"), COMBINATIONS)
@pytest.mark.parametrize("name", ["dummy:tiny", "dummy:gemma-tiny"])
def test_chunked_prefill(llm, generated, name, attention, scheduler, depth):
    engine = llm(name, attention=attention, scheduler=scheduler, steps_in_flight=depth, max_batch_tokens=7)
    assert tokens(engine.generate(prompts(), GREEDY)) == generated(name, prompts())


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("attention", ["naive-gather", "vectorized-gather"])
@pytest.mark.parametrize("name", ["dummy:tiny", "dummy:gemma3-tiny"])
def test_forced_preemption(llm, generated, name, attention, depth, block_size):
    """vllm#16832, transformers#43150: requests that are put back, once or again and again, lose no token."""
    options = {"kv_cache": {"block_size": block_size}}
    engine = llm(name, attention=attention, steps_in_flight=depth, kv_blocks=96 // block_size, options=options)
    many = prompts((15, 16, 17, 20, 33))
    outputs = engine.generate(many, GREEDY)
    assert tokens(outputs) == generated(name, many)
    assert sum(o.preemptions for o in outputs) > 0


@pytest.mark.parametrize("budget", [2048, 7])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_found_in_the_cache(llm, generated, name, depth, budget):
    """nano-vllm#144, #208: prompts that begin alike, in one step and again later, in one piece and in chunks."""
    engine = llm(name, kv_cache="prefix", steps_in_flight=depth, max_batch_tokens=budget)
    (common,) = prompts((48,), seed=3)
    many = [common[:length] + tail for length in (15, 16, 17, 32, 48) for tail in ([], [1], [2, 3])]
    for again in (False, True):
        outputs = engine.generate(many, GREEDY)
        assert tokens(outputs) == generated(name, many)
        if again:
            assert [o.cached_tokens for o in outputs] == [(len(p) - 1) // 16 * 16 for p in many]


@pytest.mark.parametrize("attention", ["naive-gather", "vectorized-gather"])
@pytest.mark.parametrize("name", ["dummy:tiny", "dummy:smollm2-tiny"])
def test_alone_and_in_company(llm, generated, name, attention):
    """transformers#25921: a greedy result does not depend on the size of the batch."""
    (mine,) = prompts((19,), seed=1)
    (expected,) = generated(name, [mine])
    for size in (1, 2, 7, 32):
        engine = llm(name, attention=attention)
        batch = [*prompts(range(3, 2 + size), seed=size), mine]
        assert len(batch) == size
        assert tokens(engine.generate(batch, GREEDY))[-1] == expected, f"batch of {size}"


@pytest.mark.parametrize("attention", ["naive-gather", "vectorized-gather"])
def test_alone_and_in_company_in_half_precision(host, attention):
    """The same in bfloat16, where a matrix product may round otherwise in company: only near ties may turn."""
    engine = LLM("dummy:tiny", host=host, attention=attention, dtype="bfloat16", device="cpu", kv_blocks=256)
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=5)
    (mine,) = prompts((19,), seed=1)
    alone = engine.generate(mine, params)[0].outputs[0]
    for size in (2, 7, 32):
        company = engine.generate([*prompts(range(3, 2 + size), seed=size), mine], params)[-1].outputs[0]
        for a, b in zip(alone.logprobs, company.logprobs, strict=False):
            for chosen, other in ((a, b), (b, a)):
                assert chosen.token_id in [token for token, _ in other.top], f"batch of {size}"
            if a.token_id != b.token_id:
                assert a.top[0][1] - a.top[1][1] < 0.1
                assert b.top[0][1] - b.top[1][1] < 0.1
                break
        else:
            assert alone.token_ids == company.token_ids


@pytest.mark.parametrize("name", MODELS)
def test_first_logits(llm, module_of, name):
    """sglang#1508: tied or not, the output head is the checkpoint's: first-step log-probabilities agree to 1e-4."""
    (mine,) = prompts((21,), seed=2)
    (output,) = llm(name).generate([mine], SamplingParams(temperature=0, max_tokens=1, logprobs=20))
    with torch.inference_mode():
        expected = module_of(name)(torch.tensor([mine])).logits[0, -1].log_softmax(-1)
    (found,) = output.outputs[0].logprobs
    assert len(found.top) == 20
    for token, logprob in found.top:
        assert logprob == pytest.approx(float(expected[token]), abs=1e-4)


@pytest.mark.parametrize("attention", ["naive-gather", "vectorized-gather"])
def test_sampled_tokens_do_not_depend_on_the_plugins(llm, attention):
    """Seeds, not schedules, decide: alone, in company, chunked, preempted and a step late."""
    many = prompts((15, 16, 17, 20, 33))
    params = [SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=i, max_tokens=NEW) for i in range(5)]
    alone = [tokens(llm(attention=attention).generate([p], how))[0] for p, how in zip(many, params, strict=True)]
    for settings in (
        {},
        {"steps_in_flight": 1},
        {"scheduler": "static", "max_batch_tokens": 9},
        {"kv_blocks": 6, "steps_in_flight": 1},
    ):
        assert tokens(llm(attention=attention, **settings).generate(many, params)) == alone, settings


def test_text_comes_back(llm):
    """Text in, text out: what is streamed joins to what is generated at once, which is the tokens decoded."""
    engine = llm("dummy:tiny")
    texts = ["Grüße aus Köln", "你好,世界", "👨‍👩‍👧‍👦 🇩🇪"]
    params = SamplingParams(temperature=0.7, max_tokens=20, seed=3, ignore_eos=True)
    whole = engine.generate(texts, params)
    deltas = {}
    for output in engine.stream(texts, params):
        deltas.setdefault(output.request_id, []).append(output.delta)
    assert ["".join(d) for d in deltas.values()] == [o.outputs[0].text for o in whole]
    for output in whole:
        decoded = engine.tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)
        assert output.outputs[0].text == decoded
