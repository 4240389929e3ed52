"""What `nanofw bench` and `nanofw explain` share: combinations of plugins, an engine for each, one work for all."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanofw.cli.console import one_thread, status
from nanofw.config import Config
from nanofw.errors import ConfigError
from nanofw.progress import watching

if TYPE_CHECKING:
    from nanofw.cli.settings import Settings
    from nanofw.engine import Engine
    from nanofw.measure.sweep import Workload
    from nanofw.plugins import PluginHost
    from nanofw.weights import ModelSource

PROMPT = "Explain what makes a good software engineer in your own words."
VARIED = ("model_impl", "attention", "kv_cache", "scheduler", "runner", "sampler")
DEFAULTS = {"model": "dummy:tiny", "attention": "naive-gather,vectorized-gather"}
QUICK_PROMPT_TOKENS = 192
"""Of the run without a model: long enough a context to tell its two attentions apart, short enough for a break."""

BatchSizes = Annotated[str, typer.Option(metavar="N,N,...", help="Batch sizes.")]
Prompt = Annotated[str | None, typer.Option(metavar="TEXT", help="Prompt of every request.")]
PromptTokens = Annotated[int | None, typer.Option(metavar="N", help="Random prompts of N tokens instead.")]
OutputTokens = Annotated[int, typer.Option(metavar="N", help="New tokens a request.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write a JSON report.")]
HtmlFile = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page.")]
PngFile = Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Write a picture of the scaling.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No live display.")]


@dataclass(frozen=True, slots=True)
class Experiment:
    """Engines to compare, by label, and the work that each does.

    Attributes:
        configs: what each engine was built from, in the same order.
        sizes: batch sizes, rising.
    """

    configs: list[Config]
    engines: dict[str, Engine]
    work: Workload
    sizes: list[int]

    @property
    def longest(self) -> int:
        """Tokens that the longest request reaches."""
        return max(map(len, self.work.prompts)) + self.work.output_tokens

    @property
    def model(self) -> str:
        """The model's name."""
        return self.configs[0].model


def prepare(
    settings: Settings,
    batch_sizes: str,
    prompt: str | None,
    prompt_tokens: int | None,
    output_tokens: int,
    quiet: bool,
    at_least: int = 1,
) -> Experiment:
    """Build the engines.

    Args:
        settings: with comma lists of plugins. The others: as on the command line.
        quiet: show nothing of loading and warming up.
        at_least: requests that an engine should take, even if no batch is that large.

    Raises:
        ConfigError: they make no experiment. PluginError, CheckpointError: of building.
    """
    sizes = _sizes(batch_sizes)
    if prompt is not None and prompt_tokens is not None:
        raise ConfigError("--prompt and --prompt-tokens both set the prompt: give one of them")
    quick = "model" not in settings.merged()
    merged = settings.merged(DEFAULTS)
    if quick and prompt is None and prompt_tokens is None:
        prompt_tokens = QUICK_PROMPT_TOKENS

    from nanofw.plugins import PluginHost
    from nanofw.weights import resolve

    if quick:
        one_thread()
    first = combinations(merged)[0]
    host = PluginHost.load(first.disable, first.plugins, first.strict)
    source = resolve(first.model, trust_remote_code=first.trust_remote_code, allow_pickle=first.allow_pickle)
    work = _workload(source, max(sizes), prompt, prompt_tokens, output_tokens, first.seed)
    longest = max(map(len, work.prompts)) + output_tokens
    # Engines live side by side here, so each takes only what the largest batch needs, unless told otherwise.
    configs = combinations({"max_num_seqs": max(*sizes, at_least), "max_model_len": longest} | merged)
    if max(sizes) > configs[0].max_num_seqs:
        raise ConfigError(f"batch size {max(sizes)} exceeds max_num_seqs={configs[0].max_num_seqs}")
    with status(quiet) as say, watching(say):
        return Experiment(configs, _engines(configs, host, source), work, sizes)


def combinations(merged: Mapping[str, Any]) -> list[Config]:
    """One `Config` for each combination of the plugins that are given as comma lists. Raises ConfigError."""
    lists = []
    for kind in VARIED:
        names = [name.strip() for name in str(merged.get(kind) or getattr(Config(), kind)).split(",")]
        if not all(names) or len(set(names)) < len(names):
            raise ConfigError(f"{kind} must be one name or several distinct ones, got {merged[kind]!r}")
        lists.append(names)
    return [Config.build(merged, dict(zip(VARIED, names, strict=True))) for names in itertools.product(*lists)]


def label_of(config: Config, configs: list[Config]) -> str:
    """What tells a combination from the others: the names of the kinds that vary, or else its attention."""
    varying = [kind for kind in VARIED if len({getattr(c, kind) for c in configs}) > 1] or ["attention"]
    return " + ".join(getattr(config, kind) for kind in varying)


def _engines(configs: list[Config], host: PluginHost, source: ModelSource) -> dict[str, Engine]:
    """One engine a combination; those with the same model plugin share the loaded model."""
    from nanofw.build import build_engine, build_model

    impls = dict.fromkeys(config.model_impl for config in configs)
    models = {impl: build_model(next(c for c in configs if c.model_impl == impl), host, source) for impl in impls}
    return {label_of(c, configs): build_engine(c, host, source, models[c.model_impl]) for c in configs}


def _workload(
    source: ModelSource, batch: int, prompt: str | None, prompt_tokens: int | None, output_tokens: int, seed: int
) -> Workload:
    from nanofw.measure.sweep import Workload

    tokenizer = source.load_tokenizer()
    if prompt_tokens is not None:
        vocab_size = source.config.vocab_size
        return Workload.random(batch, prompt_tokens, output_tokens, vocab_size, seed)
    if tokenizer is None:
        raise ConfigError(f"{source.name} has no tokenizer: give --prompt-tokens")
    return Workload([tokenizer.encode(prompt if prompt is not None else PROMPT)], output_tokens)


def _sizes(text: str) -> list[int]:
    try:
        sizes = sorted({int(size) for size in text.split(",")})
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 1:
        raise ConfigError(f"--batch-sizes takes numbers from 1 up, e.g. 1,2,4,8,16; got {text!r}")
    return sizes


def check_writable(file: Path | None) -> None:
    """Say now, not after minutes of measuring, that the report has nowhere to go."""
    if file is None:
        return
    there = file.exists()
    try:
        file.open("a").close()
        if not there:
            file.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from error
