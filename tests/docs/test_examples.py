"""The examples in the documents run, page by page, in the order in which somebody would follow them.

Of a page's fenced blocks, in a folder of its own:

* `python` is executed; all of a page share their names. One that begins with `# NAME.py` is a file instead: written,
  so that later ones may import it, and given to pytest if it is called `test_*.py`.
* `toml` that begins with `# NAME.toml` is a file too; what is called `nanofw.toml` must be a configuration.
* `sh` is run, one command after another, where the page's files are.
* `text` is what something prints, and is only read.

`<!-- not run: REASON -->` before a block leaves it out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nanofw.config import Config

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
FENCE = re.compile(r"^(?:<!-- (?P<why>.*?) -->\n)?```(?P<language>\S*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
DIRECTIVE = re.compile(r"\{\S+\}$")
SMALLER = {"nanofw bench": "--output-tokens 24 --rounds 1", "nanofw explain": "--batch-sizes 2,4 --output-tokens 8"}
"""What a command gets added here, where it is right or wrong, and nobody reads its times."""


@dataclass(frozen=True)
class Block:
    """A fenced block, and the line of the page where it begins."""

    language: str
    text: str
    line: int
    why_not: str | None

    @property
    def file(self) -> str | None:
        """The name that its first line gives it."""
        named = re.match(r"# (\S+\.(?:py|toml))\b", self.text)
        return named[1] if named else None


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, without directives of Sphinx."""
    text = page.read_text()
    for found in FENCE.finditer(text):
        if not DIRECTIVE.match(found["language"]):
            line = text[: found.start("language")].count("\n") + 1
            yield Block(found["language"], found["text"], line, found["why"])


def name_of(page: Path) -> str:
    """As the test calls it."""
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a virtual environment over this one: what a page installs is seen by its later commands only."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    outer = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "outer.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in outer))
    return os.environ | {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


COMMANDS = """
nanofw() { python -c 'from nanofw.cli import main; main()' "$@"; }
pip() { python -m pip "$@" --quiet --no-deps --no-build-isolation --no-index; }
pytest() { python -m pytest -q "$@"; }
"""
"""Commands as they are in the page's environment, which sees the outer one's packages but has no scripts."""


def shell(text: str, folder: Path, environment: dict[str, str]) -> None:
    """Run commands; they must end well."""
    for command, smaller in SMALLER.items():
        text = re.sub(rf"^{command}(?! accept).*$", rf"\g<0> {smaller}", text, flags=re.MULTILINE)
    script = ["bash", "-euo", "pipefail", "-c", COMMANDS + text]
    done = subprocess.run(script, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{text}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"


def write(block: Block, name: str, folder: Path) -> None:
    """Put a block where its first line says."""
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(block.text)


def follow(page: Path, folder: Path, environment: dict[str, str]) -> None:
    """Do all that a page says."""
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page):
        where = f"{name_of(page)}, line {block.line}"
        match block.language:
            case _ if block.why_not is not None or block.language == "text":
                pass
            case "python" if block.file is None:
                exec(compile("\n" * block.line + block.text, str(page), "exec"), names)
            case "python" | "toml" if block.file is not None:
                write(block, block.file, folder)
                if Path(block.file).name.startswith("test_"):
                    shell(f"pytest {block.file}", folder, environment)
            case "toml":
                tomllib.loads(block.text)
            case "sh":
                shell(block.text, folder, environment)
            case other:
                raise AssertionError(f"{where}: a block is python, toml, sh or text, got {other!r}")
        if block.file == "nanofw.toml":
            Config.resolve({})


@pytest.mark.parametrize("page", [page for page in PAGES if any(blocks(page))], ids=name_of)
def test_page(page: Path, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    try:
        follow(page, tmp_path, environment)
    finally:
        for name in set(sys.modules) - before:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
                del sys.modules[name]


def test_a_block_that_is_left_out_says_why() -> None:
    for page in PAGES:
        for block in blocks(page):
            assert block.why_not is None or re.match(r"not run: \S", block.why_not), f"{name_of(page)}:{block.line}"


def test_pages_have_no_code_that_is_not_fenced() -> None:
    """Code that is only indented would be left out of these tests unseen."""
    for page in PAGES:
        bare = FENCE.sub("", page.read_text())
        assert not re.search(r"\n\n {4,}\S", bare), f"{name_of(page)} has indented code"
