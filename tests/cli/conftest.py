from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from nanofw.cli import app

ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str
    exception: BaseException | None

    @property
    def error_line(self) -> str:
        """The one line on stderr that says what is wrong; everything else about the failure is checked here."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert self.code == 2
        assert len(lines) == 1
        assert "Traceback" not in self.err
        assert self.out == ""
        return lines[0]


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No config file, no variables, one thread, and nobody knows how busy the machine is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nanofw.measure.contention._SCHEDULED", tmp_path / "unknown")
    for name in list(os.environ):
        if name.startswith("NANOFW_") and name != "NANOFW_CACHE":
            monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def nanofw() -> Callable[..., Ran]:
    """The command line, in this process."""

    def run(*args: str, **env: str) -> Ran:
        result = CliRunner().invoke(app, list(args), env=env)
        exception = None if isinstance(result.exception, SystemExit) else result.exception
        return Ran(result.exit_code, ANSI.sub("", result.stdout), ANSI.sub("", result.stderr), exception)

    return run


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Install a distribution of one module that is a plugin: `install("name", source)`."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def write(name: str, source: str) -> Path:
        (site / f"{name}.py").write_text(textwrap.dedent(source))
        info = site / f"{name}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[nanofw]\n{name} = {name}\n")
        return site

    return write
