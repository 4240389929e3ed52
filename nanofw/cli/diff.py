"""`nanofw diff`: do two sets of plugins generate the same, and if not, where does it begin?"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanofw.cli.console import quiet_libraries
from nanofw.cli.experiment import PROMPT, VARIED
from nanofw.cli.settings import Settings, with_settings
from nanofw.config import Config, parse_option
from nanofw.errors import ConfigError
from nanofw.options import listing, suggest

if TYPE_CHECKING:
    from nanofw.diff import Divergence, Report

SET = "KIND=NAME,KIND.KEY=VALUE,..."


@with_settings()
def diff(
    settings: Settings,
    a: Annotated[str, typer.Argument(metavar="A", help=f"Plugins and their options: {SET}", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="The same, to compare with A", show_default=False)],
    prompts: Annotated[
        list[str] | None, typer.Option("--prompt", metavar="TEXT", help="A prompt; repeatable.", show_default=False)
    ] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Most tokens to generate.")] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say whether two sets of plugins generate the same, and where not.

    Exits with 0 if all tokens are the same, with 1 if not.

    Example: nanofw diff attention=naive-gather attention=vectorized-gather
    """
    merged = settings.merged()
    config_a, config_b = (Config.build(merged, plugin_set(text)) for text in (a, b))
    quiet_libraries()
    from nanofw.diff import compare
    from nanofw.plugins import PluginHost
    from nanofw.weights import resolve

    config = config_a  # the two differ in plugins alone
    host = PluginHost.load(config.disable, config.plugins, config.strict)
    source = resolve(config.model, trust_remote_code=config.trust_remote_code, allow_pickle=config.allow_pickle)
    tokenizer = source.load_tokenizer()
    ids = [tokenizer.encode(prompt) for prompt in prompts or [PROMPT]]
    report = compare(config_a, config_b, host, source, ids, max_tokens)
    if as_json:
        print(json.dumps(_record(report), indent=2))
    elif report.divergence is None:
        print(f"equal ({_prompts(report)}, {report.tokens} tokens)")
    else:
        print(f"different: {report.differ} of {_prompts(report)}")
        print("\n".join(describe(report.divergence, tokenizer)))
    raise typer.Exit(0 if report.equal else 1)


def plugin_set(text: str) -> dict[str, Any]:
    """Read `attention=naive-gather,kv_cache.block_size=32` as settings. Raises ConfigError."""
    found: dict[str, Any] = {}
    options: dict[str, dict[str, Any]] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"([\w.-]+)\s*=\s*(\S+)", item)
        if not match:
            raise ConfigError(f"a set of plugins has the form {SET}; got {item!r}")
        key, value = match.groups()
        if "." in key:
            for kind, table in parse_option(f"{key}={value}").items():
                options.setdefault(kind, {}).update(table)
        elif (kind := key.replace("-", "_")) in VARIED:
            found[kind] = value
        else:
            raise ConfigError(f"no kind of plugin is called {key!r}{suggest(key, VARIED)}; kinds are {listing(VARIED)}")
    return found | {"options": options}


def describe(found: Divergence, tokenizer: Any) -> list[str]:
    """The divergence in sentences."""

    def show(token: int | None) -> str:
        if token is None:
            return "nothing (it had ended)"
        return f"{token} {tokenizer.decode([token], skip_special_tokens=False)!r}"

    lines = [
        f"prompt {found.prompt}, step {found.step}: A gives {show(found.token_a)}, B gives {show(found.token_b)}",
        f"fed the same tokens, the likeliest next one leads by {found.margin_a:.3g} in A and {found.margin_b:.3g} in B "
        "(log-probability)",
    ]
    if (layer := found.layer) is None:
        lines.append(
            "no attention layer differs beyond rounding on these tokens, neither in one step nor token by token: look "
            "at runner, scheduler, KV cache and sampler, or at rounding if the lead is small"
        )
        return lines
    where = f"layer {layer.layer}, position {layer.position}"
    how = "all tokens in one step" if layer.replay == "prefill" else "one token a step"
    if layer.what == "model":
        lines.append(f"q, k or v differ first at {where} ({how}): by {layer.error_b:.3g}, allowed {layer.allowed:.3g}")
    else:
        lines.append(
            f"attention diverges first at {where} ({how}): A is off by {layer.error_a:.3g} and B by "
            f"{layer.error_b:.3g}, where rounding allows {layer.allowed:.3g}"
        )
    return lines


def _prompts(report: Report) -> str:
    return f"{report.prompts} prompt{'s' * (report.prompts > 1)}"


def _record(report: Report) -> dict[str, Any]:
    record = asdict(report)
    resolved = {"a": record.pop("resolved_a"), "b": record.pop("resolved_b")}
    return {"equal": report.equal, **record, "resolved": resolved}
