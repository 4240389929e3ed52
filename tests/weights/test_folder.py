"""A transformers folder: what is loaded is what was saved, and whatever is wrong is named with file and tensor."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanofw.errors import CheckpointError
from nanofw.weights import resolve
from nanofw.weights.checkpoint import INDEX, WEIGHTS

CPU = torch.device("cpu")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Copied = Callable[..., Path]


def load(folder: Path, dtype: torch.dtype = torch.float32, **allowed: bool) -> Any:
    return resolve(str(folder), **allowed).load_module(dtype, CPU, "eager")


def refused(folder: Path, **allowed: bool) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder, **allowed)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rewrite(file: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of a safetensors file."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "200KB"}])
@pytest.mark.parametrize("name", ["tiny", "untied-tiny", "gemma-tiny"])
def test_what_is_loaded_is_what_was_saved(saved: Copied, name: str, shards: dict[str, str]) -> None:
    folder = saved(name, **shards)
    assert (folder / INDEX).is_file() == bool(shards)
    source, dummy = resolve(str(folder)), resolve(f"dummy:{name}")
    assert source.dtype == torch.float32
    assert source.eos_token_ids == dummy.eos_token_ids
    found, expected = (s.load_module(torch.float32, CPU, "eager") for s in (source, dummy))
    assert not found.training
    assert not any(p.requires_grad for p in found.parameters())
    weights = found.state_dict()
    assert weights.keys() == expected.state_dict().keys()
    for key, weight in expected.state_dict().items():
        assert torch.equal(weights[key], weight), key
    assert source.load_tokenizer().encode("Grüße") == list("Grüße".encode())


def test_modules_have_configs_of_their_own(saved: Copied) -> None:
    source = resolve(str(saved()))
    before = source.config.to_dict()
    a, b = (source.load_module(torch.float32, CPU, how) for how in ("eager", "sdpa"))
    assert a.config is not b.config is not source.config  # type: ignore[comparison-overlap]
    assert (a.config._attn_implementation, b.config._attn_implementation) == ("eager", "sdpa")  # type: ignore[union-attr]
    assert source.config.to_dict() == before


def test_dtype_is_that_of_most_bytes(copied: Copied) -> None:
    def half_but_norms(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {name: t.half() for name, t in tensors.items() if t.ndim > 1}

    rewrite((folder := copied()) / WEIGHTS, half_but_norms)
    assert resolve(str(folder)).dtype == torch.float16


@pytest.mark.parametrize("name", ["tiny", "untied-tiny"])
def test_a_missing_weight_is_an_error(copied: Copied, name: str) -> None:
    """sglang#1508 and its kind: nothing that a checkpoint lacks is filled with random numbers."""
    folder = copied(name)
    for tensor in sorted(load_file(folder / WEIGHTS)):
        fresh = copied(name)
        rewrite(fresh / WEIGHTS, lambda tensors, gone=tensor: tensors.pop(gone))  # type: ignore[misc]
        message = refused(fresh)
        assert f"{fresh / WEIGHTS} lacks weights that the config asks for: " in message
        assert tensor in message


def test_a_missing_weight_of_a_sharded_model_is_an_error(copied: Copied) -> None:
    folder, gone = copied("tiny", max_shard_size="200KB"), "model.norm.weight"
    index = json.loads((folder / INDEX).read_text())
    rewrite(folder / index["weight_map"].pop(gone), lambda tensors: tensors.pop(gone))
    (folder / INDEX).write_text(json.dumps(index))
    assert refused(folder) == f"{folder / INDEX} lacks weights that the config asks for: {gone}"


def test_tied_head_shares_storage_whether_or_not_the_file_repeats_it(copied: Copied) -> None:
    folder = copied("tiny")
    for _ in range(2):
        module = load(folder)
        assert module.get_output_embeddings().weight.data_ptr() == module.get_input_embeddings().weight.data_ptr()
        rewrite(folder / WEIGHTS, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))


def test_tied_head_with_other_values_is_an_error(copied: Copied) -> None:
    rewrite((folder := copied("tiny")) / WEIGHTS, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING] + 1}))
    message = refused(folder)
    assert "tie_word_embeddings" in message
    assert str(folder) in message


def test_untied_head_is_the_one_of_the_file(copied: Copied) -> None:
    """pegainfer#544, parallax#444: an untied head is neither the embedding nor zero, and is used."""
    folder = copied("untied-tiny")
    tokens = torch.arange(10)[None]
    before = load(folder)(tokens).logits
    tensors = load_file(folder / WEIGHTS)
    assert (tensors[HEAD] - tensors[EMBEDDING]).abs().max() > 0.1
    assert torch.equal(load(folder).get_output_embeddings().weight, tensors[HEAD])
    rewrite(folder / WEIGHTS, lambda t: t.update({HEAD: -t[HEAD]}))
    torch.testing.assert_close(load(folder)(tokens).logits, -before)


def test_a_weight_of_another_shape_is_named_with_both(copied: Copied) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite((folder := copied()) / WEIGHTS, lambda t: t.update({name: t[name][:-1].contiguous()}))
    assert refused(folder) == (
        f"{folder / WEIGHTS}: tensor {name} has shape [127, 64], but the config asks for [128, 64]"
    )


def test_a_config_of_another_size_names_the_first_and_counts_the_rest(copied: Copied) -> None:
    edit_json((folder := copied()) / "config.json", intermediate_size=96)
    message = refused(folder)
    assert "model.layers.0.mlp.down_proj.weight has shape [64, 128], but the config asks for [64, 96]" in message
    assert "(and 8 more differ)" in message


def test_a_weight_without_a_place_is_an_error(copied: Copied) -> None:
    """A layer more than the config knows: the model would answer, but as another model."""
    edit_json((folder := copied()) / "config.json", num_hidden_layers=2, layer_types=["full_attention"] * 2)
    message = refused(folder)
    assert "has no place for" in message
    assert "model.layers.2." in message


def test_damage_is_found_before_anything_is_loaded(copied: Copied) -> None:
    folder = copied()
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="cut short: tensor "):
        resolve(str(folder))


def test_pickled_weights_are_read_only_if_allowed(copied: Copied) -> None:
    folder = copied()
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    assert "pytorch_model.bin is a pickled checkpoint" in refused(folder)
    found, expected = load(folder, allow_pickle=True).state_dict(), load_dummy().state_dict()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def load_dummy() -> torch.nn.Module:
    return resolve("dummy:tiny").load_module(torch.float32, CPU, "eager")


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_a_checkpoint_is_not_run_unless_asked_for(copied: Copied, file: str) -> None:
    folder = copied()
    marker = folder / "ran"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    kind = "AutoConfig" if file == "config.json" else "AutoTokenizer"
    value = "evil.Config" if file == "config.json" else [None, "evil.Tokenizer"]
    edit_json(folder / file, auto_map={kind: value})
    with pytest.raises(CheckpointError, match="auto_map") as caught:
        resolve(str(folder)).load_tokenizer()
    assert str(folder / file) in str(caught.value)
    assert "trust_remote_code" in str(caught.value)
    assert not marker.exists()


def test_code_of_a_checkpoint_runs_if_asked_for(
    copied: Copied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("transformers.dynamic_module_utils", "transformers.utils.hub"):
        monkeypatch.setattr(f"{module}.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = copied("llama-tiny")
    (folder / "own_config.py").write_text(
        "from transformers import LlamaConfig\n\n\nclass OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    )
    edit_json(folder / "config.json", model_type="own", auto_map={"AutoConfig": "own_config.OwnConfig"})
    assert "auto_map" in refused(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' about its own cache
        assert type(resolve(str(folder), trust_remote_code=True).config).__name__ == "OwnConfig"


def test_quantised_weights_are_refused(copied: Copied) -> None:
    edit_json((folder := copied()) / "config.json", quantization_config={"quant_method": "awq"})
    assert "quantised by awq" in refused(folder)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, "cannot read"),
        ("config.json", "{", "not JSON"),
        ("config.json", '{"model_type": "nosuch"}', "cannot read"),
        ("config.json", "{}", "cannot read"),
    ],
)
def test_a_config_that_cannot_be_used(copied: Copied, file: str, content: str | None, words: str) -> None:
    folder = copied()
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    message = refused(folder)
    assert words in message
    assert str(folder / file) in message


def test_a_damaged_tokenizer_is_said_when_it_is_asked_for(copied: Copied) -> None:
    ((folder := copied()) / "tokenizer.json").write_text("{")
    source = resolve(str(folder))  # ids can be generated without one
    with pytest.raises(CheckpointError, match="cannot load the tokenizer of ") as caught:
        source.load_tokenizer()
    assert str(folder) in str(caught.value)


def test_end_ids_are_those_of_all_files(copied: Copied) -> None:
    """exllamav2#803, vllm#4180: a list of end ids is honoured, all of it, and no other file hides it."""
    folder = copied()
    edit_json(folder / "generation_config.json", eos_token_id=[7, 9, 300])
    edit_json(folder / "config.json", eos_token_id=11)
    assert resolve(str(folder)).eos_token_ids == (7, 9, 300, 11, 257)
    (folder / "generation_config.json").unlink()
    assert resolve(str(folder)).eos_token_ids == (11, 257)
