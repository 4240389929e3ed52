"""`nanofw explain`: why a combination of plugins is as fast as it is, and not faster."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from nanofw.cli import experiment
from nanofw.cli.console import quiet_libraries, stdout, tell
from nanofw.cli.experiment import BatchSizes, JsonFile, OutputTokens, Prompt, PromptTokens, Quiet
from nanofw.cli.settings import Settings, with_settings
from nanofw.errors import ConfigError

FORMAT = 1
"""Version of the JSON report."""


@with_settings()
def explain(
    settings: Settings,
    batch_sizes: BatchSizes = "1,4,16",
    prompt: Prompt = None,
    prompt_tokens: PromptTokens = None,
    output_tokens: OutputTokens = 128,
    json_file: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Say where the time of a decode step goes, and what holds it back.

    For every combination of plugins, as in bench: times, counts, largest costs, roofline.

    Example: nanofw explain --attention naive-gather,vectorized-gather
    """
    experiment.check_writable(json_file)
    quiet_libraries()
    from nanofw.cli import explain_view as view
    from nanofw.cli.look import breakdowns
    from nanofw.measure import contention, machine, roofline
    from nanofw.measure.bottleneck import amount
    from nanofw.measure.explain import FIT_BATCHES
    from nanofw.measure.telemetry import sampled

    if output_tokens < 16:
        raise ConfigError(f"--output-tokens must be at least 16 (their middle is looked at), got {output_tokens}")
    it = experiment.prepare(
        settings, batch_sizes, prompt, prompt_tokens, output_tokens, quiet, at_least=max(FIT_BATCHES)
    )
    spec = next(iter(it.engines.values())).runner.parts.model.spec
    roof = roofline.roof_of(spec.device, spec.dtype)
    others = contention.Contention()
    with sampled(spec.device) as telemetry:
        found = breakdowns(it, roof, quiet)
    waited = others.waited

    console, described = stdout(), machine.describe()
    console.print(f"{it.model} on {machine.summary(described)}", soft_wrap=True)
    console.print(
        f"this {roof.device} reads {amount(roof.read_bandwidth)}/s and computes {roof.flops / 1e9:,.0f} GFLOP/s "
        f"in {roof.dtype} at best (measured)",
        soft_wrap=True,
    )
    for label, each in found.items():
        console.print(view.table(label, each))
        console.print("\n".join(view.growth(each[-1])), style="dim", soft_wrap=True)
        console.print(view.costs(each[-1]))
        console.print("\n".join(view.sentences(each)), soft_wrap=True)
    for notice in [*contention.notices(waited), *(telemetry.notices() if telemetry else [])]:
        console.print(f"note: {notice}", soft_wrap=True)
    if json_file is not None:
        report: dict[str, Any] = {
            "format": FORMAT,
            "machine": described,
            "roof": asdict(roof),
            "telemetry": telemetry.record() if telemetry else None,
            "waited": waited,
            "combinations": {label: [asdict(b) for b in each] for label, each in found.items()},
        }
        json_file.write_text(json.dumps(report, indent=2) + "\n")
        tell([f"wrote {json_file}"])
