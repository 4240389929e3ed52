"""Dummies: the same everywhere, real architectures, no part of them without effect."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanofw.errors import CheckpointError
from nanofw.weights import ModelSource, resolve
from nanofw.weights.dummy import BOS, EOS, PAD, names

CPU = torch.device("cpu")
TINY = [name for name in names() if name.endswith("-tiny") or name == "dummy:tiny"]
TOKENS = torch.randint(256, (1, 40), generator=torch.Generator().manual_seed(0))


def load(source: ModelSource, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return source.load_module(dtype, CPU, "eager")


@pytest.mark.parametrize("name", TINY)
def test_a_name_gives_the_same_weights_and_leaves_random_numbers_alone(name: str) -> None:
    torch.manual_seed(1)
    first = load(resolve(name)).state_dict()
    after = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(3))
    second = load(resolve(name)).state_dict()
    assert first.keys() == second.keys()
    for key, weight in first.items():
        assert torch.equal(weight, second[key]), key


def test_another_dtype_rounds_the_same_numbers() -> None:
    exact, rounded = (load(resolve("dummy:tiny"), dtype).state_dict() for dtype in (torch.float32, torch.bfloat16))
    for key, weight in exact.items():
        assert torch.equal(weight.bfloat16(), rounded[key]), key


@pytest.mark.parametrize("name", TINY)
def test_every_weight_matters(name: str) -> None:
    module, generator = load(resolve(name)), torch.Generator().manual_seed(1)
    with torch.inference_mode():
        expected = module(TOKENS).logits
        for key, weight in module.named_parameters():
            kept = weight.clone()
            weight.mul_(1 + 0.5 * torch.rand(weight.shape, generator=generator))
            change = (module(TOKENS).logits - expected).abs().max().item()
            weight.copy_(kept)
            assert change > 1e-2, key
        assert torch.equal(module(TOKENS).logits, expected)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("dummy:gemma-tiny", "sliding_window"),
        ("dummy:gemma-tiny", "attn_logit_softcapping"),
        ("dummy:gemma-tiny", "query_pre_attn_scalar"),
        ("dummy:gemma3-tiny", "sliding_window"),
        ("dummy:gemma3-tiny", "query_pre_attn_scalar"),
    ],
)
def test_every_setting_of_attention_matters(name: str, setting: str) -> None:
    source, other = resolve(name), resolve(name)
    setattr(other.config, setting, getattr(source.config, setting) * 1000)
    a, b = (load(s)(TOKENS).logits for s in (source, other))
    assert (a - b).abs().max() > 1e-2


@pytest.mark.parametrize("name", TINY)
def test_output_head(name: str) -> None:
    module = load(resolve(name))
    head, embedding = module.get_output_embeddings().weight, module.get_input_embeddings().weight  # type: ignore[operator]
    if name == "dummy:untied-tiny":
        assert (head - embedding).abs().max() > 0.1
    else:
        assert head.data_ptr() == embedding.data_ptr()


@pytest.mark.parametrize(
    ("name", "parameters"), [("dummy:qwen3-0.6b", 596_049_920), ("dummy:smollm2-135m", 134_515_008)]
)
def test_real_shapes_have_the_real_number_of_weights(name: str, parameters: int) -> None:
    from transformers import AutoModelForCausalLM

    source = resolve(name)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(source.config)
    assert sum(p.numel() for p in module.parameters()) == parameters
    assert source.dtype == torch.bfloat16


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(CheckpointError, match="did you mean 'dummy:tiny'") as caught:
        resolve("dummy:tny")
    assert all(name in str(caught.value) for name in names())


TOKENIZER = resolve("dummy:tiny").load_tokenizer()


@given(st.text(max_size=200))
def test_text_is_its_bytes_and_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_every_id_is_text_and_specials_can_be_left_out() -> None:
    words = TOKENIZER.decode(range(PAD + 1, 512)).split()
    assert len(set(words)) == len(words) == 512 - PAD - 1
    assert TOKENIZER.decode([97, EOS, PAD, BOS], skip_special_tokens=True) == "a"
    assert TOKENIZER.eos_token_id == EOS
    assert resolve("dummy:tiny").eos_token_ids == (EOS,)


def test_chat_template() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "user: Hi\nassistant: "
