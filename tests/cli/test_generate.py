"""`nanofw generate` on a tiny random model."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from nanofw.engine import Engine

TINY = ("--model", "dummy:tiny", "--max-tokens", "6", "--max-num-seqs", "4", "--ignore-eos")


def test_json_is_all_there_is_on_stdout(nanofw: Any) -> None:
    ran = nanofw("generate", "Hello", "you", *TINY, "--json")
    assert ran.code == 0
    report = json.loads(ran.out)
    assert set(report) == {"outputs", "resolved"}
    assert [o["prompt"] for o in report["outputs"]] == ["Hello", "you"]
    for output in report["outputs"]:
        assert set(output) == {"prompt", "text", "token_ids", "finish_reason", "cached_tokens"}
        assert len(output["token_ids"]) == 6
        assert output["finish_reason"] == "length"
        assert output["text"]
    assert set(report["resolved"]) == {"model", "attention", "kv_cache", "scheduler", "runner", "sampler"}
    assert report["resolved"]["attention"]["name"] == "vectorized-gather"
    assert set(report["resolved"]["runner"]) == {"name", "distribution", "version", "path", "batch_invariant"}
    assert "KV cache: " in ran.err


def test_one_prompt_streams_the_text_of_the_json(nanofw: Any) -> None:
    text = json.loads(nanofw("generate", "Hello", *TINY, "--json").out)["outputs"][0]["text"]
    assert nanofw("generate", "Hello", *TINY).out == text + "\n"


def test_text_is_shown_while_it_is_generated(nanofw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[int] = []
    step = Engine.step

    def watched(engine: Engine) -> Any:
        shown.append(sys.stdout.buffer.tell())  # what has been flushed
        return step(engine)

    monkeypatch.setattr(Engine, "step", watched)
    assert nanofw("generate", "Hello", *TINY).code == 0
    assert shown[0] == 0
    assert len(set(shown)) == 6


def test_several_prompts_come_one_after_the_other_under_headers(nanofw: Any) -> None:
    outputs = json.loads(nanofw("generate", "Hello", "you", *TINY, "--json").out)["outputs"]
    expected = "\n".join(f"=== {o['prompt']}\n{o['text']}\n" for o in outputs)
    assert nanofw("generate", "Hello", "you", *TINY).out == expected


def test_chat_template_is_used_unless_told_otherwise(nanofw: Any) -> None:
    chat, plain, by_hand = (
        json.loads(nanofw("generate", text, *TINY, *extra, "--json").out)["outputs"][0]["token_ids"]
        for text, extra in (
            ("Hello", ()),
            ("Hello", ("--no-chat",)),
            ("user: Hello\nassistant: ", ("--no-chat",)),
        )
    )
    assert chat != plain
    assert chat == by_hand


def test_plugins_that_were_named_run_and_agree(nanofw: Any) -> None:
    a, b = (
        json.loads(nanofw("generate", "Hello", *TINY, "--attention", name, "--json").out)
        for name in ("naive-gather", "vectorized-gather")
    )
    assert a["resolved"]["attention"]["name"] == "naive-gather"
    assert a["outputs"] == b["outputs"]


def test_stop_text_ends_the_output_before_it(nanofw: Any) -> None:
    text = json.loads(nanofw("generate", "Hello", *TINY, "--json").out)["outputs"][0]["text"]
    stop = text[2:4]
    output = json.loads(nanofw("generate", "Hello", *TINY, "--stop", "unseen", "--stop", stop, "--json").out)
    assert output["outputs"][0]["finish_reason"] == "stop"
    assert output["outputs"][0]["text"] == text[: text.index(stop)]


def test_sampling_depends_on_the_seed_alone(nanofw: Any) -> None:
    def tokens(*args: str) -> list[int]:
        found = json.loads(nanofw("generate", "Hello", *TINY, "--json", *args).out)["outputs"][0]["token_ids"]
        return list(found)

    greedy = tokens()
    first = tokens("--temperature", "1.5", "--seed", "1")
    assert tokens("--temperature", "1.5", "--seed", "1") == first
    assert tokens("--temperature", "1.5", "--seed", "2") != first
    assert tokens("--temperature", "1.5", "--seed", "2", "--top-k", "1") == greedy
    assert tokens("--temperature", "1.5", "--seed", "2", "--top-p", "1e-6") == greedy


def test_logprobs(nanofw: Any) -> None:
    output = json.loads(nanofw("generate", "Hello", *TINY, "--logprobs", "3", "--json").out)["outputs"][0]
    assert len(output["logprobs"]) == len(output["token_ids"])
    for token, entry in zip(output["token_ids"], output["logprobs"], strict=True):
        assert entry["token_id"] == token == entry["top"][0][0]
        assert entry["logprob"] == entry["top"][0][1] < 0
        assert len(entry["top"]) == 3
    lines = nanofw("generate", "Hello", *TINY, "--logprobs", "3").out.splitlines()
    assert sum("  of  " in line for line in lines) == 6


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--top-p", "2"), "top_p=2.0"),
        (("--max-tokens", "0"), "max_tokens=0"),
        (("--attention", "naive-gathr"), "did you mean 'naive-gather'?"),
        (("--model", "dummy:tiney"), "dummy:tiney"),
        (("--kv-blocks", "1", "--kv-memory", "1GiB"), "kv_blocks"),
        (("--option", "kv_cache.blocksize=8"), "did you mean 'block_size'?"),
        (("--dtype", "int8"), "dtype"),
        (("--device", "nosuch"), "device"),
    ],
)
def test_what_a_user_can_get_wrong_is_one_line(nanofw: Any, args: tuple[str, ...], words: str) -> None:
    ran = nanofw("generate", "Hello", "--model", "dummy:tiny", *args)
    assert words in ran.error_line


def test_a_prompt_that_cannot_run_is_one_line(nanofw: Any) -> None:
    ran = nanofw("generate", "x" * 100, *TINY, "--no-chat", "--max-model-len", "50")
    assert ran.code == 2
    assert "error: prompt 0: the prompt has " in ran.err
    assert ran.out == ""
