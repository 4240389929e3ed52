"""`nanofw new`: bad names write nothing, and what it writes works: installed, found, right, timed, benched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanofw.cli.new import new
from nanofw.component import KINDS
from nanofw.scaffold import STARTERS, class_name, render
from nanofw.testing.session import SUITES

FILES = {"my_attention.py", "test_my_attention.py", "bench_my_attention.py", "pyproject.toml", "README.md"}

SAMPLE = (
    "test_allocation_is_all_or_nothing or test_check_integrity_finds or test_any_budget or test_stop_ids or "
    "test_greedy or test_top_p or test_mixed_steps or (test_count_laws and (cache or scheduler))"
)
"""Checks of the kinds beside attention, a few of each: `nanofw.scaffold` is held to whole suites by hand."""


def ran(command: list[str], folder: Path, site: Path) -> str:
    """Standard output of a command that must end well."""
    env = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with a new package of each kind, and a folder where all are installed."""
    folder, site = tmp_path_factory.mktemp("packages"), tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for kind in KINDS:
            new(f"my-{kind.replace('_', '-')}", kind)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    ran([*pip, "--target", str(site), *(f"./{path.name}" for path in sorted(folder.iterdir()))], folder, site)
    return folder, site


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("9lives", "cannot name a plugin: it takes letters and digits"),
        ("my--attention", "cannot name a plugin"),
        ("../up", "cannot name a plugin"),
        ("lambda", "is no word of Python's own"),
        ("attention", "Attention is a class of nanofw itself"),
        ("vectorized-gather", "attention 'vectorized-gather' of nanofw"),
        ("gather", "is the name of an installed plugin"),
        ("nanofw", "is the name of an installed plugin"),
        ("torch", "a module 'torch' is installed already"),
    ],
)
def test_a_bad_name_writes_nothing(nanofw: Any, tmp_path: Path, name: str, says: str) -> None:
    assert says in nanofw("new", name).error_line
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_left_alone(nanofw: Any, tmp_path: Path) -> None:
    (tmp_path / "my-attention").mkdir()
    assert "my-attention exists already" in nanofw("new", "my-attention").error_line
    assert list((tmp_path / "my-attention").iterdir()) == []


def test_an_unknown_kind(nanofw: Any, tmp_path: Path) -> None:
    assert "did you mean 'sampler'?" in nanofw("new", "mine", "--kind", "samplr").error_line
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_and_said(nanofw: Any, tmp_path: Path) -> None:
    said = nanofw("new", "my-attention")
    assert said.code == 0
    assert {path.name for path in (tmp_path / "my-attention").iterdir()} == FILES
    for command in ("pip install -e my-attention", "pytest my-attention", "nanofw check my-attention"):
        assert command in said.out


@pytest.mark.parametrize("kind", KINDS)
def test_names_follow_from_the_name(kind: Any) -> None:
    files = render(kind, "quick-one_2")
    plugin, starter = files["quick_one_2.py"], STARTERS[kind]
    assert class_name("quick-one_2") == "QuickOne2"
    assert "class QuickOne2(" in plugin
    assert '    register("quick-one_2", QuickOne2)\n' in plugin
    assert starter.cls not in plugin
    assert 'quick-one_2 = "quick_one_2"' in files["pyproject.toml"]
    assert f"class TestQuickOne2({starter.suite}):\n    backend = QuickOne2" in files["test_quick_one_2.py"]
    assert starter.suite == SUITES[kind]
    assert not [path for path, text in files.items() if "$" in text or "my-" in text]
    compile(files["bench_quick_one_2.py"], "bench", "exec")


def test_a_new_attention_is_right_as_it_is(packages: tuple[Path, Path]) -> None:
    folder, site = packages
    out = ran([sys.executable, "-m", "pytest", "-q", "my-attention"], folder, site)
    assert " passed" in out
    assert "failed" not in out


def test_a_new_plugin_of_any_other_kind_is_right(packages: tuple[Path, Path]) -> None:
    folder, site = packages
    others = [f"my-{kind.replace('_', '-')}" for kind in KINDS if kind != "attention"]
    out = ran([sys.executable, "-m", "pytest", "-v", *others, "-k", SAMPLE], folder, site)
    assert "failed" not in out
    for name in others:
        assert f"test_{name.replace('-', '_')}.py::" in out, f"no check of {name} ran"


def test_it_is_found_and_benched(packages: tuple[Path, Path]) -> None:
    folder, site = packages
    command = [sys.executable, "-c", "from nanofw.cli import main; main()"]
    listed = {(p["kind"], p["name"]): p for p in json.loads(ran([*command, "plugins", "--json"], folder, site))}
    for kind in KINDS:
        found = listed[kind, f"my-{kind.replace('_', '-')}"]
        assert (found["status"], found["distribution"]) == ("ok", found["name"])
    pairs = ["--attention", "vectorized-gather,my-attention", "--batch-sizes", "1,2", "--output-tokens", "4"]
    out = ran([*command, "bench", *pairs, "--rounds", "1", "--prompt-tokens", "8", "--quiet"], folder, site)
    assert "attention: my-attention (my-attention 0.1.0)" in out


def test_its_benchmark_runs(packages: tuple[Path, Path]) -> None:
    folder, site = packages
    files = [str(path) for path in sorted(folder.glob("*/bench_*.py"))]
    assert len(files) == len(KINDS)
    out = ran([sys.executable, "-m", "pytest", "-q", "--benchmark-disable", *files, "-k", "4"], folder, site)
    assert "12 passed" in out  # at batch 4: the new one and the plain one beside it, of each kind
