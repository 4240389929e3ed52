"""A closer look at the engines of an experiment: where their steps go, what their plugins promise, what is possible."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanofw.cli.console import status, tell
from nanofw.errors import NanofwError

if TYPE_CHECKING:
    from nanofw.cli.experiment import Experiment
    from nanofw.engine import Engine
    from nanofw.measure.explain import Breakdown
    from nanofw.measure.records import Looked
    from nanofw.measure.roofline import Roof


def closer(it: Experiment, reasons: bool, quiet: bool) -> Looked:
    """The roofline; and with `reasons`, breakdowns and the verdicts of all laws, which take about a minute."""
    from nanofw.measure.records import Looked
    from nanofw.measure.roofline import floor, roof_of

    spec = next(iter(it.engines.values())).runner.parts.model.spec
    roof, context = roof_of(spec.device, spec.dtype), middle(it)
    roofline = [{"batch": b, "tok_s": 1e3 * b / floor(spec, b, context, roof).ms} for b in it.sizes]
    if not reasons:
        return Looked(roof, roofline)
    return Looked(roof, roofline, breakdowns(it, roof, quiet), laws(it, quiet))


def middle(it: Experiment) -> int:
    """Tokens of a request in the middle of its output."""
    return it.longest - it.work.output_tokens // 2


def breakdowns(it: Experiment, roof: Roof, quiet: bool) -> dict[str, list[Breakdown]]:
    """Each engine at each batch size, in the middle of its output."""
    from nanofw.measure.explain import explain, growth

    context = middle(it)
    found: dict[str, list[Breakdown]] = {}
    with status(quiet) as say:
        for label, engine in it.engines.items():
            say(f"{label}: with what its counts grow")
            fits = growth(engine, context)
            found[label] = []
            for batch in it.sizes:
                say(f"{label}: a step at batch {batch}")
                found[label].append(explain(engine, batch, context, roof, fits))
    return found


def laws(it: Experiment, quiet: bool) -> dict[str, list[dict[str, Any]]]:
    """Verdicts on the laws of all plugins that ran, each judged by itself beside plain ones.

    Without pytest, which the suites need, none; and that is said.
    """
    try:
        from nanofw.testing import laws as counted
        from nanofw.testing import scaling
    except ModuleNotFoundError as error:
        tell([f"laws are not judged: that needs {error.name} (pip install 'nanofw[test]')"])
        return {}
    found: dict[str, list[dict[str, Any]]] = {}
    with status(quiet) as say:
        for config, engine in zip(it.configs, it.engines.values(), strict=True):
            for kind, cls in classes(engine).items():
                name, options = f"{kind} {engine.resolved[kind].name}", config.options.get(kind, {})
                if name in found:
                    continue
                say(f"{name}: its laws")
                found[name] = []
                for judge in (counted.judge, scaling.judge):
                    try:
                        verdicts = judge(cls, options)
                    except NanofwError as error:  # it does not serve the small model that laws are judged with
                        found[name].append({"law": "", "holds": None, "found": f"not judged: {error}"})
                        continue
                    found[name] += [{"law": str(v.law), "holds": v.holds, "found": v.text} for v in verdicts]
    return found


def classes(engine: Engine) -> dict[str, Any]:
    """The class of each plugin of an engine, by kind."""
    parts = engine.runner.parts
    built = {"model": parts.model, "attention": parts.attention, "kv_cache": engine.kv_cache}
    built |= {"scheduler": engine.scheduler, "runner": engine.runner, "sampler": parts.sampler}
    return {kind: type(part) for kind, part in built.items()}
