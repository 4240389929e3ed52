"""The fused model generates the tokens of the transformers model, by every route and under every runner."""

import pytest

pytest.importorskip("triton")

from nanofw import LLM, PluginHost, SamplingParams
from nanofw.errors import PluginError
from nanofw_fused.routes import ROUTES, routes_for

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9] * 7, [11] * 3]


@pytest.fixture(scope="module")
def all_plugins():
    return PluginHost.load()


def tokens(host, name, prompts=PROMPTS, params=GREEDY, **settings):
    llm = LLM(name, host=host, device="cpu", dtype="float32", kv_blocks=64, max_num_seqs=4, **settings)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("name", ["dummy:tiny", "dummy:llama-tiny", "dummy:untied-tiny"])
def test_tokens_equal_those_of_transformers(all_plugins, name):
    expected = tokens(all_plugins, name)
    fast = {"model_impl": "fused", "attention": "triton-paged", "sampler": "triton"}
    assert tokens(all_plugins, name, model_impl="fused", attention="vectorized-gather") == expected
    assert tokens(all_plugins, name, runner="cuda-graph", steps_in_flight=1, **fast) == expected


@pytest.mark.parametrize("length", [16, 17, 65])
def test_prompts_on_either_side_of_a_route(all_plugins, length):
    prompts, params = [[i % 250 for i in range(length)]], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    expected = tokens(all_plugins, "dummy:tiny", prompts, params)
    assert tokens(all_plugins, "dummy:tiny", prompts, params, model_impl="fused") == expected


def test_prompt_logprobs_have_the_logits_of_every_token(all_plugins):
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)

    def scores(**settings):
        llm = LLM("dummy:tiny", host=all_plugins, device="cpu", dtype="float32", kv_blocks=64, **settings)
        (output,) = llm.generate([[5, 6, 7, 8]], params)
        return [entry.logprob for entry in output.prompt_logprobs if entry is not None]

    assert scores(model_impl="fused") == pytest.approx(scores(), abs=1e-4)


def test_what_it_cannot_fuse_is_refused_by_name(all_plugins):
    with pytest.raises(PluginError, match="'fused' cannot serve dummy:gemma-tiny: it has no model type"):
        LLM("dummy:gemma-tiny", host=all_plugins, device="cpu", model_impl="fused")


def test_every_batch_has_a_route():
    assert all(routes_for(n)["qkv"].route in ("slab", "tiled", "cublas") for n in (1, 8, 9, 16, 17, 64, 65, 10**6))
    assert [most for most, _ in ROUTES] == sorted(most for most, _ in ROUTES)
