"""`nanofw bench`: the batch-scaling experiment, for any combinations of plugins."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanofw.cli.console import quiet_libraries, resolved_lines, stdout, tell
from nanofw.cli.settings import Settings, with_settings
from nanofw.config import Config
from nanofw.errors import ConfigError

if TYPE_CHECKING:
    from nanofw.engine import Engine
    from nanofw.measure.sweep import Workload
    from nanofw.plugins import PluginHost
    from nanofw.weights import ModelSource

PROMPT = "Explain what makes a good software engineer in your own words."
VARIED = ("model_impl", "attention", "kv_cache", "scheduler", "runner", "sampler")
DEFAULTS = {"model": "dummy:tiny", "attention": "naive-gather,vectorized-gather"}
QUICK_PROMPT_TOKENS = 192
"""Of the run without a model: long enough a context to tell its two attentions apart, short enough for a break."""


@with_settings()
def bench(
    ctx: typer.Context,
    settings: Settings,
    batch_sizes: Annotated[str, typer.Option(metavar="N,N,...", help="Batch sizes.")] = "1,2,4,8,16",
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Prompt of every request.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(metavar="N", help="Random prompts of N tokens instead.")] = None,
    output_tokens: Annotated[int, typer.Option(metavar="N", help="New tokens a request.")] = 128,
    rounds: Annotated[int, typer.Option(metavar="N", help="Measurements of each point.")] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write a JSON report.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No live display.")] = False,
) -> None:
    """Measure throughput over batch sizes, for every combination of plugins given as comma lists.

    Defaults here: dummy:tiny, naive-gather and vectorized-gather; about two minutes on two CPU cores.

    Example: nanofw bench --model smollm2 --attention vectorized-gather --scheduler static,continuous
    """
    if ctx.invoked_subcommand:
        _refuse_options(ctx)
        return
    sizes = _sizes(batch_sizes)
    if prompt is not None and prompt_tokens is not None:
        raise ConfigError("--prompt and --prompt-tokens both set the prompt: give one of them")
    quick = "model" not in settings.merged()
    merged = settings.merged(DEFAULTS)
    if quick and prompt is None and prompt_tokens is None:
        prompt_tokens = QUICK_PROMPT_TOKENS
    _check_writable(json_file)

    quiet_libraries()
    from nanofw.cli import bench_view
    from nanofw.measure import machine, records
    from nanofw.measure.sweep import sweep
    from nanofw.plugins import PluginHost
    from nanofw.weights import resolve

    if quick:
        _one_thread()
    first = combinations(merged)[0]
    host = PluginHost.load(first.disable, first.plugins, first.strict)
    source = resolve(first.model, trust_remote_code=first.trust_remote_code, allow_pickle=first.allow_pickle)
    work = _workload(source, max(sizes), prompt, prompt_tokens, output_tokens, first.seed)
    longest = max(map(len, work.prompts)) + output_tokens
    # Engines live side by side here, so each takes only what the largest batch needs, unless told otherwise.
    configs = combinations({"max_num_seqs": max(sizes), "max_model_len": longest} | merged)
    if max(sizes) > configs[0].max_num_seqs:
        raise ConfigError(f"batch size {max(sizes)} exceeds max_num_seqs={configs[0].max_num_seqs}")
    engines = _engines(configs, host, source)

    with bench_view.live(quiet, rounds) as watch:
        runs = sweep(engines, work, sizes, rounds, first.seed, watch)

    console, found = stdout(), {}
    described = machine.describe()
    console.print(f"{first.model} on {machine.summary(described)}", soft_wrap=True)
    for config, (label, engine) in zip(configs, engines.items(), strict=True):
        found[label] = records.points(config, {batch: runs[label, batch] for batch in sizes})
        console.print(bench_view.table(label, found[label]))
        console.print("\n".join([*resolved_lines(engine.resolved), *engine.notes]), style="dim", soft_wrap=True)
        for reason, steps in engine.runner.report.fallbacks.items():
            console.print(f"{steps} steps left the path {engine.runner.report.path}: {reason}", soft_wrap=True)
    console.print("\n" + "; ".join(bench_view.sentence(label, p) for label, p in found.items()) + ".", soft_wrap=True)
    if json_file is not None:
        kept = {"rounds": rounds, "seed": first.seed, "batch_sizes": sizes, "output_tokens": output_tokens}
        ran = {label: records.ran(engine) for label, engine in engines.items()}
        everything = [p for of_label in found.values() for p in of_label]
        json_file.write_text(json.dumps(records.report(described, kept, ran, everything), indent=2) + "\n")
        tell([f"wrote {json_file}"])


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


def _one_thread() -> None:
    """Run the tiny model on one thread, unless OMP_NUM_THREADS says otherwise.

    Its operations are too small to share out, and threads that wait for each other measure who else uses the machine.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def _refuse_options(ctx: typer.Context) -> None:
    """A subcommand measures nothing, so no option of the measurement may stand before it."""
    given = [name for name in ctx.params if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    if given:
        raise ConfigError(f"bench {ctx.invoked_subcommand} measures nothing and takes no {', '.join(given)}")


def _check_writable(file: Path | None) -> None:
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
