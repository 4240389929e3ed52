"""The examples in the documents run, page by page, in the order in which somebody would follow them.

Of a page's fenced blocks, in a folder of its own:

* `python` is executed; all of a page share their names. One that begins with `# NAME.py` is a file instead: written,
  so that later ones may import it, and given to pytest if it is called `test_*.py`.
* `toml` that begins with `# NAME.toml` is a file too; what is called `nanofw.toml` must be a configuration.
* `diff` that begins with `# NAME` changes that file: each hunk's old lines must stand in it once. `@@` separates hunks.
* `sh` is run, one command after another, where the page's files are.
* `text` is what something prints, and is only read.

A note before a block says what else is wanted of it:

* `<!-- not run: REASON -->` leaves it out.
* `<!-- fails: REASON -->`, of `sh` or a test file: it must not end well, and the `text` after it is what it says.
* `<!-- printed -->`, of `text`: its lines are among what was printed last, in this order. `...` stands for anything.
* `<!-- leaves: FILE, ... -->`, of `sh`: it makes these files, and they are not empty.
"""

from __future__ import annotations

import contextlib
import io
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
FENCE = re.compile(
    r"^(?:<!-- (?P<note>.*?) -->\n)?```(?P<language>\S*)[^\n]*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
DIRECTIVE = re.compile(r"\{\S+\}$")
NOTES = {
    "not run": ("python", "toml", "diff", "sh"),
    "fails": ("python", "sh"),
    "printed": ("text",),
    "leaves": ("sh",),
}
"""What a note may begin with, and before which languages."""
SMALLER = {
    "nanofw bench": "--batch-sizes 1,4 --output-tokens 24 --rounds 1",
    "nanofw explain": "--batch-sizes 2,4 --output-tokens 16",
}
"""What a command gets added here, where it is right or wrong, and nobody reads its times."""


@dataclass(frozen=True)
class Block:
    """A fenced block, and the line of the page where it begins."""

    language: str
    text: str
    line: int
    note: str | None

    @property
    def file(self) -> str | None:
        """The name that its first line gives it."""
        named = re.match(r"# (\S+\.(?:py|toml))\b", self.text)
        return named[1] if named else None

    @property
    def wanted(self) -> str:
        """What its note begins with, or nothing."""
        return (self.note or "").partition(":")[0]


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, without directives of Sphinx."""
    text = page.read_text()
    for found in FENCE.finditer(text):
        if not DIRECTIVE.match(found["language"]):
            line = text[: found.start("language")].count("\n") + 1
            yield Block(found["language"], found["text"], line, found["note"])


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
nanofw() { python -c 'from nanofw.testing import scaling
scaling.judge = lambda *_: []
from nanofw.cli import main
main()' "$@"; }
pip() { python -m pip "$@" --quiet --no-deps --no-build-isolation --no-index; }
pytest() { python -m pytest -q "$@"; }
"""
"""Commands as they are in the page's environment, which sees the outer one's packages but has no scripts.

Laws are counted and never timed: a test waits for no clock.
"""


def shell(text: str, folder: Path, environment: dict[str, str], fails: bool = False) -> str:
    """Run commands, which must end well, or must not; what they printed."""
    for command, smaller in SMALLER.items():
        text = re.sub(rf"^{command}(?! accept)(.*\\\n)*.*$", rf"\g<0> {smaller}", text, flags=re.MULTILINE)
    script = ["bash", "-euo", "pipefail", "-c", COMMANDS + text]
    pipe, out = subprocess.PIPE, subprocess.STDOUT
    done = subprocess.run(script, cwd=folder, env=environment, stdout=pipe, stderr=out, text=True, check=False)
    assert (done.returncode != 0) == fails, f"{text}\nended with {done.returncode}\n{done.stdout[-8000:]}"
    return done.stdout


def execute(block: Block, page: Path, names: dict[str, Any]) -> str:
    """Run Python here; what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile("\n" * block.line + block.text, str(page), "exec"), names)
    return printed.getvalue()


def write(block: Block, name: str, folder: Path) -> None:
    """Put a block where its first line says."""
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(block.text)


def change(block: Block, name: str, folder: Path) -> None:
    """Change a file as a diff says, wherever its lines stand."""
    file = folder / name
    text = file.read_text()
    for hunk in re.split(r"^@@.*\n", block.text.partition("\n")[2], flags=re.MULTILINE):
        lines = [(line[:1] or " ", line[1:]) for line in hunk.splitlines()]
        assert {sign for sign, _ in lines} <= set(" +-"), f"a line of a diff begins with a space, + or -: {hunk}"
        old, new = ("".join(f"{line}\n" for sign, line in lines if sign in signs) for signs in (" -", " +"))
        assert text.count(old) == 1, f"{name} has these lines {text.count(old)} times:\n{old}"
        text = text.replace(old, new)
    file.write_text(text)


def check_printed(said: str, printed: str) -> None:
    """The lines of a page are among those that were printed, in this order, however wide the spaces."""
    rest = iter([" ".join(line.split()) for line in printed.splitlines()])
    for line in (" ".join(line.split()) for line in said.splitlines()):
        pattern = ".*".join(map(re.escape, line.split("...")))
        assert any(re.fullmatch(pattern, other) for other in rest), f"{line!r} is not, or not there, in:\n{printed}"


def follow(page: Path, folder: Path, environment: dict[str, str]) -> None:
    """Do all that a page says."""
    names: dict[str, Any] = {"__name__": "page"}
    printed, failed = "", False
    for block in blocks(page):
        where = f"{name_of(page)}, line {block.line}"
        fails = block.wanted == "fails"
        if failed:
            assert block.language == "text", f"{where}: after what fails stands the text that it prints"
        match block.language:
            case _ if block.wanted == "not run":
                continue
            case "text":
                if failed or block.wanted == "printed":
                    try:
                        check_printed(block.text, printed)
                    except AssertionError as error:
                        raise AssertionError(f"{where}: {error}") from None
            case "python" if block.file is None:
                printed = execute(block, page, names)
            case "python" | "toml" if block.file is not None:
                write(block, block.file, folder)
                if Path(block.file).name.startswith("test_"):
                    printed = shell(f"pytest {block.file}", folder, environment, fails)
            case "diff":
                assert block.file is not None, f"{where}: a diff begins with the name of a file"
                change(block, block.file, folder)
            case "toml":
                tomllib.loads(block.text)
            case "sh":
                printed = shell(block.text, folder, environment, fails)
            case other:
                raise AssertionError(f"{where}: a block is python, toml, diff, sh or text, got {other!r}")
        failed = fails
        if block.wanted == "leaves":
            for name in (block.note or "").partition(": ")[2].split(", "):
                assert (folder / name).stat().st_size > 0, f"{where}: {name} is empty"
        if block.file == "nanofw.toml":
            Config.resolve({})
    assert not failed, f"{name_of(page)}: after what fails stands the text that it prints"


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


def test_a_note_is_one_of_the_known_ones_and_says_why() -> None:
    for page in PAGES:
        for block in blocks(page):
            if block.note is not None:
                assert block.language in NOTES.get(block.wanted, ()), f"{name_of(page)}:{block.line}: {block.note}"
                assert block.note == "printed" or re.match(r"[^:]+: \S", block.note), f"{name_of(page)}:{block.line}"


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        ("```sh\nfalse\n```", "ended with 1"),
        ("<!-- fails: it does not -->\n```sh\necho so\n```\n\n```text\nso\n```", "ended with 0"),
        ("<!-- fails: of course -->\n```sh\necho so; false\n```\n\n```text\nno\n```", "'no' is not"),
        ("<!-- fails: of course -->\n```sh\nfalse\n```", "after what fails"),
        ("```python\nprint(1, 2)\n```\n\n<!-- printed -->\n```text\n1  ...\n3\n```", "'3' is not"),
        ("```python\nprint(1)\nprint(2)\n```\n\n<!-- printed -->\n```text\n2\n1\n```", "'1' is not"),
        ("```python\n# a.py\nb = 1\n```\n\n```diff\n# a.py\n-b = 2\n+b = 3\n```", "a.py has these lines 0 times"),
        ("<!-- leaves: a.png -->\n```sh\ntouch a.png\n```", "a.png is empty"),
        ("```ruby\n1\n```", "got 'ruby'"),
    ],
)
def test_a_page_that_is_wrong_fails(
    page: str, complaint: str, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(page + "\n")
    with pytest.raises(AssertionError, match=complaint):
        follow(tmp_path / "page.md", tmp_path, environment)


def test_a_page_changes_its_files(tmp_path: Path) -> None:
    file, diff = "# a.py\nb = 1\n\nc = 2\n", "# a.py\n b = 1\n\n-c = 2\n+c = 3\n"
    page = tmp_path / "page.md"
    page.write_text(f"```python\n{file}```\n\n```diff\n{diff}```\n")
    for block, do in zip(blocks(page), (write, change), strict=True):
        do(block, "a.py", tmp_path)
    assert (tmp_path / "a.py").read_text() == "# a.py\nb = 1\n\nc = 3\n"


def test_pages_have_no_code_that_is_not_fenced() -> None:
    """Code that is only indented would be left out of these tests unseen."""
    for page in PAGES:
        bare = FENCE.sub("", page.read_text())
        assert not re.search(r"\n\n {4,}\S", bare), f"{name_of(page)} has indented code"
