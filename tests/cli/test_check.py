"""`nanofw check`: what it finds right and wrong, what it says next, and that it runs pytest on nobody else's terms."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

FEW = "capabilities = Capabilities(dtypes={torch.float32}, head_sizes={32}, block_sizes={16})"
PLUGINS = f'''
import torch

from nanofw import Attention, Capabilities, CountLaw, Sampler, ScalingLaw
from nanofw.sampler import Sampled
from nanofw_gather.vectorized import VectorizedGather


class Loop(VectorizedGather):
    """Right, and asks the device for every length. (Its path reads like the name of a picture.)"""

    {FEW}
    laws = (CountLaw("host_reads"), CountLaw("launches"))

    def plan(self, batch):
        for length in batch.seq_lens:
            length.item()
        return super().plan(batch)


class Honest(Loop):
    laws = (CountLaw("host_reads", grows_with=("B",)), ScalingLaw(1, 2, at_least=0.001))


class TwoPercent(Loop):
    def attend(self, q, kv, batch):
        return super().attend(q * 1.02, kv, batch)


class Raises(Loop):
    def attend(self, q, kv, batch):
        raise IndexError("no such block")


class Elsewhere(Loop):
    @classmethod
    def unavailable(cls):
        return "needs another planet"


class Unfinished(Attention):
    pass


class First(Sampler):
    """Takes the first token, whatever is asked for."""

    def sample(self, logits, sampling):
        return Sampled(logits.new_zeros(len(logits), dtype=torch.int64))


number = 3
'''


@pytest.fixture
def check(nanofw: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command, with a module `mine` of plugins."""
    (tmp_path / "mine.py").write_text(PLUGINS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "mine", raising=False)
    return lambda *args, **env: nanofw("check", *args, **env)


def page(text: str) -> dict[str, list[str]]:
    """Lines of the page by their title."""
    found: dict[str, list[str]] = {"": []}
    title = ""
    for line in text.splitlines()[1:]:
        named = re.match(r"(right\?|laws\?|scaling\?|what next)\s+", line)
        title = named[1] if named else title
        found.setdefault(title, []).append(line.removeprefix(named[0] if named else "").strip())
    return found


def test_right_and_as_promised(check: Any, tmp_path: Path) -> None:
    ran = check("mine:Honest", "--json", "out.json")
    assert ran.code == 0
    found = page(ran.out)
    assert ran.out.splitlines()[0] == "mine:Honest: attention, mine:Honest"
    assert re.fullmatch(r"yes: \d\d+ checks passed, 0 failed, \d+ skipped", found["right?"][0])
    assert any("Honest does not serve: head size 64" in line for line in found["right?"][1:])
    assert found["laws?"] == ["holds  host_reads = 1 B"]
    assert found["scaling?"][0].startswith("holds  declared: decode throughput rises at least 0.001 times")
    assert found["what next"] == [
        "It is right and keeps its promises; now promise more: host_reads O(B) is what a batch pays for."
    ]
    written = json.loads(Path("out.json").read_text())
    assert (written["right"], written["good"], written["kind"], written["cls"]) == (
        True,
        True,
        "attention",
        "mine:Honest",
    )
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["mine.py", "out.json"]


def test_a_broken_law(check: Any) -> None:
    """The name of the class is printed as it is, though `:Loop:` would be a picture to rich."""
    ran = check("mine:Loop")
    assert ran.code == 1
    assert ran.out.splitlines()[0] == "mine:Loop: attention, mine:Loop"
    found = page(ran.out)
    assert found["right?"][0].startswith("yes: ")
    assert found["laws?"][0].startswith("broken host_reads = 1 B; declared slope in B: 0. Something is done one by one")
    assert found["laws?"][1] == "holds  launches = 0"
    assert found["scaling?"] == ["no scaling law is declared"]
    assert found["what next"] == ["It is right, and breaks its law host_reads O(1): keep it, or declare what is true."]


def test_wrong_numbers(check: Any) -> None:
    """The plainest check comes first, with what it found, where it stands and what it is for."""
    ran = check("mine:TwoPercent", "--json", "out.json")
    assert ran.code == 1
    found = page(ran.out)
    assert re.match(r"no: \d+ checks passed, \d+ failed", found["right?"][0])
    check_id, message, where = found["right?"][1:4]
    assert re.fullmatch(r"test_decode_matches\[fp32-d32-h8x2-b16\]( and \d+ more cases?)?", check_id)
    assert "off by" in message
    assert "is allowed, at query" in message
    assert re.search(r"testing/attention_matches\.py:\d+$", where)
    assert found["scaling?"] == ["not timed: a wrong plugin is fast for free"]
    assert found["what next"][0].startswith("Begin with test_decode_matches: one query a request")
    written = json.loads(Path("out.json").read_text())
    assert (written["right"], written["good"], written["scaling"]) == (False, False, [])
    assert len(written["failures"]) == int(re.search(r"(\d+) failed", found["right?"][0])[1])


def test_an_error_of_its_own(check: Any) -> None:
    """The plugin's line is named, not the one that called it; laws are said not to be judged."""
    ran = check("mine:Raises")
    found = page(ran.out)
    assert ran.code == 1
    assert found["right?"][2] == "IndexError: no such block"
    line = 1 + PLUGINS.splitlines().index('        raise IndexError("no such block")')
    assert found["right?"][3].endswith(f"mine.py:{line}")
    assert found["laws?"] == ["not judged"]
    assert "not judged while it is wrong (IndexError: no such block)" in found["scaling?"]


def test_another_kind(check: Any) -> None:
    found = page(check("mine:First").out)
    assert found["right?"][0].startswith("no: ")
    assert found["what next"][0].startswith("Begin with test_greedy_takes_the_first_of_the_largest: arg-max")


def test_what_pytest_is_told_elsewhere_does_not_count(check: Any, tmp_path: Path) -> None:
    """The user's own configuration, options and plugins are for the user's own tests."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (tmp_path / "conftest.py").write_text("raise RuntimeError('not for you')\n")
    assert check("mine:Honest", PYTEST_ADDOPTS="--neither-this", PYTEST_PLUGINS="nor_that").code == 0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            ("vectorized-gathre",),
            "no plugin is named 'vectorized-gathre' (did you mean 'vectorized-gather'?); there are ",
        ),
        (("mine:Nobody",), "mine:Nobody cannot be imported: AttributeError"),
        (("nobody:Mine",), "nobody:Mine cannot be imported: ModuleNotFoundError"),
        (("mine:number",), "mine:number is 3, and not a class"),
        (("mine:Unfinished",), "mine:Unfinished does not implement attend"),
        (("mine:Elsewhere",), "mine:Elsewhere is unavailable here: needs another planet"),
        (("mine:Honest", "--kind", "sampler"), "mine:Honest is of the kind attention, not sampler"),
        (("vectorized-gather", "--kind", "atention"), "did you mean 'attention'?"),
        (("mine:Honest", "--json", "no/such/out.json"), "no/such"),
    ],
)
def test_what_cannot_be_judged(check: Any, args: tuple[str, ...], says: str) -> None:
    ran = check(*args)
    assert ran.code == 2
    assert says in ran.err
    assert "Traceback" not in ran.err
