"""`nanofw bench`: the batch-scaling experiment, for any combinations of plugins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanofw.cli import experiment
from nanofw.cli.console import quiet_libraries, resolved_lines, stdout, tell
from nanofw.cli.experiment import BatchSizes, JsonFile, OutputTokens, PngFile, Prompt, PromptTokens, Quiet
from nanofw.cli.settings import Settings, with_settings
from nanofw.errors import ConfigError
from nanofw.report.read import need

if TYPE_CHECKING:
    from rich.console import Console

    from nanofw.cli.experiment import Experiment


@with_settings()
def bench(
    ctx: typer.Context,
    settings: Settings,
    batch_sizes: BatchSizes = "1,2,4,8,16",
    prompt: Prompt = None,
    prompt_tokens: PromptTokens = None,
    output_tokens: OutputTokens = 128,
    rounds: Annotated[int, typer.Option(metavar="N", help="Measurements of each point.")] = 3,
    json_file: JsonFile = None,
    html_file: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page; judges laws (minutes)."),
    ] = None,
    png_file: PngFile = None,
    quiet: Quiet = False,
) -> None:
    """Measure throughput over batch sizes, for combinations of plugins.

    Comma lists are combined. Without a model: a tiny one, two attentions, a minute.

    Example: nanofw bench --attention naive-gather,vectorized-gather --html a.html
    """
    if ctx.invoked_subcommand:
        _refuse_options(ctx)
        return
    for file in (json_file, html_file, png_file):
        experiment.check_writable(file)
    need(*(["jinja2", "matplotlib"] if html_file else ["matplotlib"] if png_file else []))
    quiet_libraries()
    from nanofw.cli import bench_view, look
    from nanofw.measure import contention, machine, records
    from nanofw.measure.sweep import sweep
    from nanofw.measure.telemetry import sampled

    it = experiment.prepare(settings, batch_sizes, prompt, prompt_tokens, output_tokens, quiet)
    seed = it.configs[0].seed
    device = next(iter(it.engines.values())).runner.parts.model.spec.device
    others = contention.Contention()
    with sampled(device) as telemetry, bench_view.live(quiet, rounds) as watch:
        runs = sweep(it.engines, it.work, it.sizes, rounds, seed, watch)
    waited = others.waited

    console, found = stdout(), {}
    described = machine.describe()
    console.print(f"{it.model} on {machine.summary(described)}", soft_wrap=True)
    for config, label in zip(it.configs, it.engines, strict=True):
        found[label] = records.points(config, {batch: runs[label, batch] for batch in it.sizes})
        console.print(bench_view.table(label, found[label]))
        _what_ran(console, it, label)
    console.print("\n" + "; ".join(bench_view.sentence(label, p) for label, p in found.items()) + ".", soft_wrap=True)
    for notice in [*contention.notices(waited), *(telemetry.notices() if telemetry else [])]:
        console.print(f"note: {notice}", soft_wrap=True)
    if json_file or html_file or png_file:
        kept = {"rounds": rounds, "seed": seed, "batch_sizes": it.sizes, "output_tokens": output_tokens}
        ran = {label: records.ran(engine) for label, engine in it.engines.items()}
        everything = [p for of_label in found.values() for p in of_label]
        looked = look.closer(it, reasons=html_file is not None, quiet=quiet) if html_file or png_file else None
        _write(
            records.report(described, kept, ran, everything, telemetry, looked, waited), json_file, html_file, png_file
        )


def _write(record: dict[str, Any], json_file: Path | None, html_file: Path | None, png_file: Path | None) -> None:
    """Whatever is asked for, all from the record."""
    from nanofw.report import page, plots

    if json_file is not None:
        json_file.write_text(json.dumps(record, indent=2) + "\n")
    if html_file is not None:
        html_file.write_text(page.page(record), encoding="utf-8")
    if png_file is not None:
        plots.png(plots.scaling(plots.curves(record), record["roofline"]), png_file)
    tell(f"wrote {file}" for file in (json_file, html_file, png_file) if file is not None)


def _what_ran(console: Console, it: Experiment, label: str) -> None:
    engine = it.engines[label]
    console.print("\n".join([*resolved_lines(engine.resolved), *engine.notes]), style="dim", soft_wrap=True)
    for reason, steps in engine.runner.report.fallbacks.items():
        console.print(f"{steps} steps left the path {engine.runner.report.path}: {reason}", soft_wrap=True)


def _refuse_options(ctx: typer.Context) -> None:
    """A subcommand measures nothing, so no option of the measurement may stand before it."""
    given = [name for name in ctx.params if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    if given:
        raise ConfigError(f"bench {ctx.invoked_subcommand} measures nothing and takes no {', '.join(given)}")
