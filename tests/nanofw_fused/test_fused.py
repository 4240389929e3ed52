"""The fused model in an engine, with the plugins that it is made for; and prompts on either side of its routes."""

import pytest
import torch

pytest.importorskip("triton")

from nanofw import LLM, PluginHost, SamplingParams
from nanofw.errors import PluginError
from nanofw_fused.project import Projector
from nanofw_fused.routes import ROUTES, routes_for

GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9] * 6, [11] * 3]


@pytest.fixture(scope="module")
def all_plugins():
    return PluginHost.load()


def tokens(host, name, prompts=PROMPTS, params=GREEDY, **settings):
    small = {"kv_blocks": 64, "max_num_seqs": 4, "max_model_len": 96}
    llm = LLM(name, host=host, device="cpu", dtype="float32", **small, **settings)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("name", ["dummy:tiny", "dummy:untied-tiny"])
def test_the_whole_fast_path_gives_the_tokens_of_transformers(all_plugins, name):
    """With the attention, sampler and runner that it is made for; by itself, the suite judges it."""
    fast = {"model_impl": "fused", "attention": "triton-paged", "sampler": "triton", "runner": "cuda-graph"}
    assert tokens(all_plugins, name, steps_in_flight=1, **fast) == tokens(all_plugins, name)


@pytest.mark.parametrize("length", [16, 17, 65])
def test_prompts_on_either_side_of_a_route(all_plugins, length):
    prompts, params = [[i % 250 for i in range(length)]], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    expected = tokens(all_plugins, "dummy:tiny", prompts, params)
    assert tokens(all_plugins, "dummy:tiny", prompts, params, model_impl="fused") == expected


def test_what_it_cannot_fuse_is_refused_by_name(all_plugins):
    with pytest.raises(PluginError, match="'fused' cannot serve dummy:gemma-tiny: it has no model type"):
        LLM("dummy:gemma-tiny", host=all_plugins, device="cpu", model_impl="fused")


def test_every_batch_has_a_route():
    assert all(routes_for(n)["qkv"].route in ("slab", "tiled", "cublas") for n in (1, 8, 9, 16, 17, 64, 65, 10**6))
    assert [most for most, _ in ROUTES] == sorted(most for most, _ in ROUTES)


@pytest.mark.parametrize("shared", [232_448, 166_912, 101_376], ids=["9.0", "8.0", "8.9"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_tiles_fit_the_shared_memory_of_every_card(shared, dtype):
    """By compute capability. A pipelined tile keeps all its turns but one in shared memory."""
    projector = Projector(dtype, False, shared)
    for _, routes in ROUTES:
        for projection, tile in routes.items():
            for rows in (16, 64):
                turn = rows + tile.bn * (2 if projection == "gate_up" else 1)
                stages = projector.stages(tile, turn, dtype.itemsize)
                assert 1 <= stages <= tile.stages
                assert (stages - 1) * turn * tile.bk * dtype.itemsize <= shared
