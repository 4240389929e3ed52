"""The model of transformers: families that are served give transformers' own tokens, the others are refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM

from nanofw import LLM, SamplingParams
from nanofw.attention import Attention, AttentionSpec
from nanofw.errors import PluginError
from nanofw.testing import ModelSuite
from nanofw.weights import ModelSource, resolve
from nanofw_basics.transformers_model import TransformersModel, weight_bytes
from nanofw_basics.transformers_probe import ProbeMask, mask_window

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
SERVED = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "mixtral": {"sliding_window": 8, "num_local_experts": 3},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 0} | WINDOWS,
    "qwen3": {"head_dim": 24},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 5} | WINDOWS,
    "gemma3_text": {"head_dim": 16} | WINDOWS,
    "olmo2": {},
    "olmo3": WINDOWS,
    "phi": {},
    "phi3": {"sliding_window": 8},
    "starcoder2": {"sliding_window": 8},
    "granite": {"attention_multiplier": 0.3},
    "cohere2": WINDOWS,
    "gpt2": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "glm4": {"head_dim": 8},
    "exaone4": {"sliding_window": 8, "sliding_window_pattern": 2},
}
REFUSED = {
    "gpt_oss": ({}, r"attention sinks \(s_aux\)"),
    "bloom": ({}, "BloomForCausalLM does not take another attention"),
    "gptj": ({}, "GPTJForCausalLM does not take another attention"),
    "llama4_text": ({}, r"layer type chunked_attention \(layers 0, 1, 2\)"),
    "minimax": ({}, r"layer type linear_attention \(layers 1\)"),
    "mamba": ({}, "layer type linear_attention"),
    "gemma3n_text": ({"num_kv_shared_layers": 1}, "1 layers that share the keys and values of others"),
    "deepseek_v2": ({}, r"heads of different sizes \(query 192, key 192, value 128\)"),
    "nemotron": ({}, "does not hand keyword arguments of its forward down to the attention"),
    "llama": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "rotary embedding dynamic, whose frequencies depend on the longest request",
    ),
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=5, ignore_eos=True)


class TestTransformers(ModelSuite):
    backend = TransformersModel

    def tables(self, model):
        return model.module.get_output_embeddings().weight, model.module.get_input_embeddings().weight


class RandomSource(ModelSource):
    """A small model of any family of transformers, with weights large enough that everything shows in the logits."""

    dtype = torch.float32

    def __init__(self, model_type, **settings):
        self.name, self.eos_token_ids = model_type, (2,)
        self.config = AutoConfig.for_model(model_type, **SMALL | settings)

    def load_module(self, dtype, device, attn_implementation):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = AutoModelForCausalLM.from_config(
                copy.deepcopy(self.config), dtype=torch.float32, attn_implementation=attn_implementation
            )
            with torch.no_grad():
                for weight in module.parameters():
                    weight.add_(torch.randn_like(weight), alpha=0.2)
        return module.to(device=device, dtype=dtype).eval().requires_grad_(False)

    def load_tokenizer(self):
        return None


def prompts(*lengths):
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(3, 96, (n,), generator=generator).tolist() for n in lengths]


def make_llm(source, host, **settings):
    return LLM(
        "test", source=source, host=host, dtype="float32", device="cpu", kv_blocks=64, max_num_seqs=8, **settings
    )


@pytest.mark.parametrize("attention", ["naive-gather", "vectorized-gather"])
@pytest.mark.parametrize("model_type", SERVED)
def test_families_that_are_served(host, model_type, attention):
    """Tokens and log-probabilities of a ragged batch, prompts in chunks, are those of the module alone."""
    source = RandomSource(model_type, **SERVED[model_type])
    module = source.load_module(torch.float32, CPU, "eager")
    many = prompts(3, 40, 17)
    outputs = make_llm(source, host, attention=attention, max_batch_tokens=29).generate(many, GREEDY)
    for prompt, output in zip(many, outputs, strict=True):
        ids = [*prompt, *output.outputs[0].token_ids]
        with torch.inference_mode():
            logits = module(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), use_cache=False).logits[0]
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        assert expected.argmax(-1).tolist() == list(output.outputs[0].token_ids)
        for row, found in zip(expected, output.outputs[0].logprobs, strict=True):
            for token, logprob in found.top:
                assert logprob == pytest.approx(row[token].item(), abs=2e-4)


@pytest.mark.parametrize("model_type", REFUSED)
def test_families_that_are_refused_by_name(model_type):
    settings, words = REFUSED[model_type]
    source = RandomSource(model_type, **settings)
    with pytest.raises(PluginError, match=rf"model 'transformers' cannot serve {model_type} .*{words}"):
        TransformersModel(source, torch.float32, CPU, TransformersModel.Options())


def spec_of(name):
    return TransformersModel(resolve(name), torch.float32, CPU, TransformersModel.Options()).spec


@pytest.mark.parametrize(
    ("name", "windows", "cap"),
    [
        ("dummy:tiny", [None] * 3, None),
        ("dummy:gemma-tiny", [16, None, 16, None], 4.0),
        ("dummy:gemma3-tiny", [16, 16, 16, None], None),
    ],
)
def test_windows_and_caps_reach_the_spec(name, windows, cap):
    layers = spec_of(name).layers
    assert [layer.window for layer in layers] == windows
    assert {layer.soft_cap for layer in layers} == {cap}
    assert {layer.scale for layer in layers} == {32**-0.5}


def test_an_attention_without_windows_or_caps_is_told_that_the_model_needs_them():
    spec = AttentionSpec(spec_of("dummy:gemma-tiny").layers, torch.float32, CPU, block_size=16)
    assert Attention.validate(spec) == ["sliding windows", "capped scores"]


@pytest.mark.parametrize("tied", [True, False])
def test_bytes_of_a_step_leave_out_a_table_that_is_only_looked_up(tied):
    source = RandomSource("llama", tie_word_embeddings=tied)
    module = source.load_module(torch.bfloat16, CPU, "eager")
    everything = sum(p.numel() for p in module.parameters()) * 2
    table = 96 * 32 * 2
    assert weight_bytes(module) == (everything if tied else everything - table)


def seen_through(function):
    return ProbeMask(function, CPU)


@given(st.integers(2, 300), st.integers(1, 400))
def test_window_of_a_mask(max_len, window):
    mask = seen_through(lambda b, h, q, k: (k <= q) & (k > q - window))
    assert mask_window(mask, max_len) == (window if window < max_len else None)
    assert mask_window(mask, max_len, window) == (window if window < max_len else None)


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, q, k: (k <= q) & (k // 64 == q // 64),
        lambda b, h, q, k: (k <= q) | (k < 10),
        lambda b, h, q, k: k >= 0,
        lambda b, h, q, k: k < q,
        lambda b, h, q, k: (k <= q) & ((k > q - 20) | (k < 4)),
        lambda b, h, q, k: (k <= q) & (k > q - 20) & (k % 2 == 0),
        lambda b, h, q, k: (k <= q) & (k > q - torch.where(q < 100, 20, 30)),
        lambda b, h, q, k: k <= q + 1,
    ],
    ids=["chunks", "prefix", "all", "not itself", "sinks", "every second", "window that grows", "one ahead"],
)
def test_masks_that_are_no_window(function):
    with pytest.raises(ValueError, match="not causal with one window"):
        mask_window(seen_through(function), 512)


@pytest.mark.parametrize("mask", [None, torch.zeros(1, 1, 5, 5), "text"])
def test_masks_that_cannot_be_looked_into(mask):
    with pytest.raises(ValueError, match="cannot be checked"):
        mask_window(mask, 512)


def test_a_mask_that_looks_at_data_is_refused():
    segments = torch.tensor([0, 0, 1, 1, 1])
    with pytest.raises(ValueError, match="more than positions"):
        mask_window(seen_through(lambda b, h, q, k: (k <= q) & (segments[q] == segments[k])), 512)


def test_engines_side_by_side(host):
    """Two engines over one model and one over another, a step each in turn, give what each gives alone."""
    source, other = RandomSource("gemma2", **SERVED["gemma2"]), RandomSource("gemma3_text", **SERVED["gemma3_text"])
    first = make_llm(source, host, attention="naive-gather")
    settings = [(source, "naive-gather"), (source, "vectorized-gather"), (other, "vectorized-gather")]
    alone = [make_llm(s, host, attention=a).generate(prompts(9, 30), GREEDY) for s, a in settings]
    shared = first.engine.runner.parts.model
    engines = [
        make_llm(s, host, attention=a, loaded=shared if s is source else None, max_batch_tokens=tokens).engine
        for (s, a), tokens in zip(settings, (13, 64, 21), strict=True)
    ]
    for engine in engines:
        for number, prompt in enumerate(prompts(9, 30)):
            engine.add(str(number), prompt, GREEDY, stream=False)
    found = [{} for _ in engines]
    while any(engine.has_work for engine in engines):
        for engine, outputs in zip(engines, found, strict=True):
            outputs |= {int(o.request_id): o.outputs[0].token_ids for o in engine.step()}
    assert [[o[0], o[1]] for o in found] == [[o.outputs[0].token_ids for o in outputs] for outputs in alone]


def test_nothing_of_transformers_is_changed(host):
    """transformers#45943: neither the config, nor another module of the same config, nor a registry."""
    source = RandomSource("gemma2", **SERVED["gemma2"])
    before, tokens = copy.deepcopy(source.config.to_dict()), torch.tensor(prompts(30))
    plain = {how: source.load_module(torch.float32, CPU, how) for how in ("eager", "sdpa")}
    logits = {how: module(tokens).logits for how, module in plain.items()}
    masks, attentions = (dict(registry._global_mapping) for registry in (AttentionMaskInterface, AttentionInterface))

    llm = make_llm(source, host)
    llm.generate(prompts(30, 5), GREEDY)
    assert source.config.to_dict() == before
    assert source.config._attn_implementation != "nanofw"
    for how, module in plain.items():
        assert module.config._attn_implementation == how
        assert torch.equal(module(tokens).logits, logits[how])
    assert dict(AttentionMaskInterface._global_mapping) == masks
    assert dict(AttentionInterface._global_mapping) == attentions
    assert "nanofw" in attentions
    assert "nanofw" not in masks


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch.compile imports
def test_compiled_layers_give_the_same_tokens(host):
    """The attention stays outside: its plan changes with every step, and nothing is compiled again for that."""
    prompts = [[1, 2, 3], list(range(40)), [9] * 17]
    params = SamplingParams(max_tokens=6, temperature=0)
    plain, compiled = (
        LLM(
            "dummy:tiny",
            host=host,
            device="cpu",
            dtype="float32",
            kv_blocks=64,
            options={"model": {"compile": backend}},
        )
        for backend in ("", "aot_eager")
    )
    assert compiled.engine.resolved["model"].path == "layers compiled by aot_eager"
    expected = [o.outputs[0].token_ids for o in plain.generate(prompts, params)]
    torch.compiler.reset()
    assert [o.outputs[0].token_ids for o in compiled.generate(prompts, params)] == expected
    stats = torch._dynamo.utils.counters["stats"]
    made = stats["unique_graphs"]
    assert made > 0
    assert [o.outputs[0].token_ids for o in compiled.generate(prompts[:2], params)] == expected[:2]
    assert stats["unique_graphs"] == made, "compiled again for another batch"


def test_unknown_compiler_is_refused():
    with pytest.raises(ValueError, match=r"must be a backend of torch.compile \(.*inductor.*\), got 'gcc'"):
        TransformersModel.Options(compile="gcc")
