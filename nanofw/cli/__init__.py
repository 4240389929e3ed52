"""The command line, one file a command. Nothing heavy is imported until a command needs it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn, TextIO

import typer
from typer.core import TyperGroup

from nanofw import __version__
from nanofw.cli import bench, bench_accept, check, diff, explain, generate, model, new, plugins, report
from nanofw.errors import NanofwError

_NOISY = r"(torch|transformers|huggingface_hub|tokenizers|safetensors|accelerate|triton|gguf)(\..*)?"
"""Modules whose warnings are for their own developers, not for somebody who types a command."""


_UsageError: Any = typer.BadParameter.__base__
"""Of click, which newer versions of typer bring along as a module of their own."""


class Commands(TyperGroup):
    """Turns what a user can cause into one line and a status: errors 2, Ctrl-C 130. Bugs keep their traceback."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """Read the options that stand before a command."""
        with _errors_as_lines():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        with _errors_as_lines(), _warnings_as_lines():
            return super().invoke(ctx)


app = typer.Typer(
    cls=Commands,
    name="nanofw",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate")(generate.generate)
app.add_typer(bench_app := typer.Typer(), name="bench")
bench_app.callback(invoke_without_command=True)(bench.bench)
bench_app.command("accept")(bench_accept.accept)
app.command("explain")(explain.explain)
app.command("report")(report.report)
app.command("diff")(diff.diff)
app.command("plugins")(plugins.plugins)
app.command("new")(new.new)
app.command("check")(check.check)
app.add_typer(model.app, name="model")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"nanofw {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """LLM inference in which every moving part is a plugin, proven right and shown to scale.

    Settings come from the command line, then NANOFW_* variables, then nanofw.toml (or pyproject.toml), then defaults.

    Start with: nanofw bench
    """


def main() -> None:
    """Entry point of the `nanofw` command."""
    app(prog_name="nanofw")


@contextmanager
def _errors_as_lines() -> Iterator[None]:
    try:
        yield
    except NanofwError as error:
        _fail(str(error))
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help
            raise
        path = error.ctx.command_path if error.ctx else "nanofw"
        _fail(f"{error.format_message().rstrip('.')} (see {path} --help)")
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _fail(message: str) -> NoReturn:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    raise typer.Exit(2) from None


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Print our warnings as `warning: ...` on stderr, and none of the noise of the libraries below."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)

    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
            warnings.simplefilter("default", UserWarning)
            warnings.filterwarnings("ignore", module=_NOISY)
        warnings.showwarning = show
        yield
