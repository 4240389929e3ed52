"""What all commands have in common: help, version, errors, interruptions."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import nanofw as package
from nanofw.plugins import PluginHost

COMMANDS = ("generate", "bench", "explain", "report", "diff", "plugins", "new", "check", "model")
SUBCOMMANDS = ("bench accept", "model pull")


def test_version(nanofw: Any) -> None:
    ran = nanofw("--version")
    assert (ran.code, ran.out) == (0, f"nanofw {package.__version__}\n")


def test_help_names_every_command(nanofw: Any) -> None:
    ran = nanofw("--help")
    assert ran.code == 0
    told = [line.split()[1] for line in ran.out.partition(" Commands ")[2].splitlines() if line.startswith("│ ")]
    assert sorted(told) == sorted(COMMANDS)  # a line for each
    assert "Start with: nanofw bench" in ran.out


@pytest.mark.parametrize("command", [*COMMANDS, *SUBCOMMANDS])
def test_help_of_a_command_fits_a_screen_and_has_an_example(nanofw: Any, command: str) -> None:
    ran = nanofw(*command.split(), "--help", COLUMNS="80", TERMINAL_WIDTH="80")
    assert ran.code == 0
    (example,) = [line for line in ran.out.splitlines() if line.strip().startswith("Example: ")]
    assert f"nanofw {command}" in example
    assert len(ran.out.strip().splitlines()) <= 40


def test_settings_that_are_seldom_needed_are_one_option_away(nanofw: Any) -> None:
    for name in ("--kv-blocks", "--trust-remote-code"):
        assert name not in nanofw("bench", "--help").out
        assert name in nanofw("bench", "--help-all").out
    assert "--help-all" in nanofw("bench", "--help").out


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom nanofw.cli import main\nsys.argv = ['nanofw', 'generate', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('heavy:', [m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--max-tokens" in done.stdout
    assert done.stdout.splitlines()[-1] == "heavy: []"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("generat", "No such command 'generat'. Did you mean 'generate'? (see nanofw --help)"),
        ("--nosuch", "No such option: --nosuch (see nanofw --help)"),
        ("generate", "Missing argument 'PROMPT' (see nanofw generate --help)"),
        ("generate x --nosuch", "No such option: --nosuch"),
        ("generate x --attention", "Option '--attention' requires an argument"),
        ("bench --rounds x", "Invalid value for '--rounds': "),
        ("bench x", "No such command"),
        ("model pul", "No such command 'pul'"),
        ("model pull smolm2", "cannot pull 'smolm2' (did you mean 'smollm2'?)"),
    ],
)
def test_what_cannot_be_read_is_one_line(nanofw: Any, args: str, words: str) -> None:
    assert words in nanofw(*args.split()).error_line


@pytest.mark.parametrize("args", [(), ("model",)])
def test_a_group_alone_shows_its_help(nanofw: Any, args: tuple[str, ...]) -> None:
    ran = nanofw(*args)
    assert ran.code == 2
    assert "Usage: nanofw" in ran.out + ran.err
    assert "error: " not in ran.err


def test_ctrl_c_is_quiet(nanofw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PluginHost, "load", interrupted)
    ran = nanofw("plugins")
    assert (ran.code, ran.out, ran.err) == (130, "", "")


def test_a_bug_keeps_its_traceback(nanofw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(PluginHost, "load", broken)
    ran = nanofw("plugins")
    assert isinstance(ran.exception, RuntimeError)
    assert "error: " not in ran.err
