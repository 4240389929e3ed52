"""Log-probabilities of prompt tokens: those of one pass over the prompt, however it is computed and put back."""

import pytest
import torch

from nanofw import SamplingParams

PROMPTS = [[(7 * i + n) % 256 for i in range(length)] for n, length in enumerate((1, 2, 15, 16, 17, 40))]
SETTINGS = [
    {},
    {"steps_in_flight": 1},
    {"max_batch_tokens": 7},
    {"max_batch_tokens": 7, "steps_in_flight": 1, "scheduler": "static"},
    {"kv_blocks": 5, "steps_in_flight": 1},
    {"kv_cache": "prefix", "max_batch_tokens": 20},
]


@pytest.fixture(scope="module")
def expected(module_of):
    """What transformers says of a prompt, `[length, V]`, the first row of no use."""

    def logprobs(name, prompt):
        with torch.inference_mode():
            logits = module_of(name)(torch.tensor([prompt])).logits[0]
        return logits.log_softmax(-1).roll(1, 0)

    return logprobs


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())) or "plain")
@pytest.mark.parametrize("name", ["dummy:tiny", "dummy:gemma-tiny"])
def test_like_one_pass(llm, expected, name, settings):
    engine = llm(name, **settings)
    how = [SamplingParams(temperature=0, max_tokens=20, prompt_logprobs=i, ignore_eos=True) for i in range(6)]
    for _ in range(2):  # also when all of it is cached
        outputs = engine.generate(PROMPTS, how)
        if "kv_blocks" in settings:
            assert sum(o.preemptions for o in outputs) > 0
        for wanted, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
            right = expected(name, prompt)
            first, *rest = output.prompt_logprobs
            assert first is None
            assert [entry.token_id for entry in rest] == prompt[1:]
            for position, entry in enumerate(rest, start=1):
                assert entry.logprob == pytest.approx(float(right[position, prompt[position]]), abs=1e-4)
                best = right[position].topk(wanted).values.tolist()
                assert [logprob for _, logprob in entry.top] == pytest.approx(best, abs=1e-4)


def test_in_company(llm):
    """Requests that ask for none get none, and the same tokens; nobody is computed twice for it."""
    engine = llm(kv_cache="prefix")
    plain = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    asking = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=2, n=2)
    (alone,) = engine.generate([PROMPTS[5]], plain)
    outputs = engine.generate([PROMPTS[5], PROMPTS[5], PROMPTS[4]], [plain, asking, asking])
    assert outputs[0].prompt_logprobs is None
    assert [len(o.prompt_logprobs) for o in outputs[1:]] == [40, 17]
    assert {c.token_ids for o in outputs[:2] for c in o.outputs} == {alone.outputs[0].token_ids}
    assert [o.cached_tokens for o in outputs] == [32, 0, 0]


def test_streamed(llm):
    """All there when the first token comes."""
    outputs = list(llm(max_batch_tokens=8).stream([PROMPTS[5]], SamplingParams(max_tokens=3, prompt_logprobs=0)))
    assert [len(o.prompt_logprobs) for o in outputs] == [40] * len(outputs)
