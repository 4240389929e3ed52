"""`nanofw plugins` is what one turns to when a plugin is broken, so broken plugins must not break it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

GOOD = """
    import nanofw

    nanofw_api = (1, 0)


    @nanofw.hookimpl
    def nanofw_register_attention(register):
        register("good", "nanofw_gather.vectorized:VectorizedGather")
        register("missing", "no_such_module:Nothing")
"""
RAISES = "raise OSError('libmissing.so: not found')"
HALF_WAY = """
    import nanofw

    nanofw_api = (1, 0)


    @nanofw.hookimpl
    def nanofw_register_attention(register):
        register("half", "nanofw_gather.vectorized:VectorizedGather")
        raise KeyError("second")
"""


@pytest.fixture
def three(install: Any) -> Path:
    install("good_one", GOOD)
    install("raises_one", RAISES)
    site: Path = install("half_way", HALF_WAY)
    return site


def listed(out: str) -> dict[tuple[str, str], dict[str, str]]:
    return {(row["kind"], row["name"]): row for row in json.loads(out)}


def test_ours_are_listed(nanofw: Any) -> None:
    ran = nanofw("plugins", "--json")
    assert ran.code == 0
    rows = listed(ran.out)
    row = rows["attention", "naive-gather"]
    assert row == {
        "kind": "attention",
        "name": "naive-gather",
        "distribution": "nanofw",
        "version": row["version"],
        "api": "1.0",
        "status": "ok",
        "reason": "",
    }
    assert rows["kv_cache", "paged"]["status"] == "ok"


@pytest.mark.usefixtures("three")
def test_each_broken_plugin_is_named_and_the_others_work(nanofw: Any) -> None:
    ran = nanofw("plugins", "--json")
    assert ran.code == 0
    rows = listed(ran.out)
    assert rows["attention", "good"]["status"] == "ok"
    assert rows["attention", "good"]["distribution"] == "good_one"
    assert rows["attention", "good"]["version"] == "1.2"
    assert rows["attention", "missing"]["status"] == "unavailable"
    assert "no_such_module" in rows["attention", "missing"]["reason"]
    assert rows["plugin", "raises_one"]["status"] == "failed"
    assert "libmissing.so" in rows["plugin", "raises_one"]["reason"]
    assert rows["plugin", "half_way"]["status"] == "failed"
    assert ("attention", "half") not in rows
    warned = ran.err.splitlines()
    assert len(warned) == 2
    assert all(line.startswith("warning: plugin ") for line in warned)
    assert {name for name in ("raises_one", "half_way") for line in warned if name in line} == {
        "raises_one",
        "half_way",
    }


@pytest.mark.usefixtures("three")
def test_strict_makes_it_an_error(nanofw: Any) -> None:
    assert "half_way" in nanofw("plugins", "--strict").error_line


@pytest.mark.usefixtures("three")
def test_blocked_plugins_are_not_imported(nanofw: Any) -> None:
    ran = nanofw("plugins", "--json", "--strict", "--no-plugin", "raises_one", "--no-plugin", "half_way")
    assert ran.code == 0
    assert ran.err == ""
    rows = listed(ran.out)
    assert rows["plugin", "raises_one"]["status"] == "blocked"
    assert "raises_one" not in sys.modules


@pytest.mark.usefixtures("three")
def test_table_shows_status_and_reason(nanofw: Any) -> None:
    lines = nanofw("plugins").out.splitlines()
    assert lines[0].split() == ["kind", "name", "distribution", "version", "api", "status", "reason"]
    (failed,) = [line for line in lines if "raises_one" in line]
    assert "failed" in failed
    assert "libmissing.so" in failed


def test_broken_plugin_does_not_break_the_installed_command(three: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from nanofw.cli import main; main()", "plugins"],
        env={**os.environ, "PYTHONPATH": str(three)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert "naive-gather" in done.stdout
    assert done.stderr.count("warning: ") == 2
    assert "Traceback" not in done.stderr


def test_naming_a_failed_plugin_says_why(nanofw: Any, three: Path) -> None:
    ran = nanofw("generate", "x", "--model", "dummy:tiny", "--attention", "half")
    assert "half_way" in ran.error_line
    assert "KeyError" in ran.error_line
