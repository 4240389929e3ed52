"""`nanofw diff`: equal sets, a planted fault, and what it says about each."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nanofw.cli.diff import plugin_set
from nanofw.errors import ConfigError

TINY = ("--model", "dummy:tiny", "--max-tokens", "8")
WRONG = """
    import nanofw
    from nanofw_gather.vectorized import VectorizedGather

    nanofw_api = (1, 0)


    class Wrong(VectorizedGather):
        def attend(self, q, kv, batch):
            out = super().attend(q, kv, batch)
            return out * 1.5 if kv.index == 1 else out


    @nanofw.hookimpl
    def nanofw_register_attention(register):
        register("wrong", Wrong)
"""


def test_equal(nanofw: Any) -> None:
    sets = ("attention=naive-gather", "attention=vectorized-gather,scheduler=static,kv_cache.block_size=4")
    ran = nanofw("diff", *sets, *TINY, "--prompt", "Hello", "--prompt", "there")
    assert ran.code == 0
    assert ran.out.startswith("equal (2 prompts, ")
    report = json.loads(nanofw("diff", *sets, *TINY, "--json").out)
    assert report["equal"] is True
    assert report["divergence"] is None
    assert report["resolved"]["a"]["attention"]["name"] == "naive-gather"
    assert report["resolved"]["b"]["scheduler"]["name"] == "static"


def test_a_planted_fault_is_located(nanofw: Any, install: Any) -> None:
    install("wrong_attention", WRONG)
    args = ("diff", "attention=vectorized-gather", "attention=wrong", *TINY, "--prompt", "Hello", "--prompt", "there")
    ran = nanofw(*args)
    assert ran.code == 1
    assert "different: " in ran.out
    assert "attention diverges first at layer 1, position 0" in ran.out
    assert "A is off by" in ran.out
    ran = nanofw(*args, "--json")
    assert ran.code == 1
    found = json.loads(ran.out)["divergence"]
    assert found["layer"]["layer"] == 1
    assert found["layer"]["error_a"] <= found["layer"]["allowed"] < found["layer"]["error_b"]
    assert found["token_a"] != found["token_b"]
    assert found["margin_a"] > 0


def test_settings_common_to_both_come_from_the_shared_options(nanofw: Any) -> None:
    ran = nanofw("diff", "", "attention=naive-gather", *TINY, "--scheduler", "static", "--json")
    resolved = json.loads(ran.out)["resolved"]
    assert resolved["a"]["scheduler"]["name"] == resolved["b"]["scheduler"]["name"] == "static"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("atention=naive-gather", "did you mean 'attention'?"),
        ("attention", "has the form"),
        ("attention=nosuch", "nosuch"),
        ("nosuch.key=1", "nosuch"),
        ("kv_cache.blocksize=1", "did you mean 'block_size'?"),
    ],
)
def test_what_a_user_can_get_wrong_is_one_line(nanofw: Any, text: str, words: str) -> None:
    assert words in nanofw("diff", "", text, *TINY).error_line


def test_plugin_set() -> None:
    assert plugin_set("attention=a, kv-cache=b,kv_cache.block_size=4,kv_cache.x=y") == {
        "attention": "a",
        "kv_cache": "b",
        "options": {"kv_cache": {"block_size": "4", "x": "y"}},
    }
    assert plugin_set("") == {"options": {}}
    with pytest.raises(ConfigError, match="form"):
        plugin_set("attention=a=,b")
