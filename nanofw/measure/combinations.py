"""Which plugins to measure: each one alone in place of a plain one, so that a difference has one cause."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanofw.component import KINDS
from nanofw.config import Config
from nanofw.plugins import PluginHost

FAST: Mapping[str, Any] = {
    "model_impl": "fused",
    "attention": "triton-paged",
    "runner": "cuda-graph",
    "sampler": "triton",
    "steps_in_flight": 1,
}
"""The fast path on a GPU, as a whole."""


def one_at_a_time(host: PluginHost, on_gpu: bool) -> dict[str, dict[str, Any]]:
    """Settings by name: "plain", "attention=flash", ..., and on a GPU "fast".

    Plugins that failed to load are not among them; those that cannot run here are, and say why when they are built.

    Args:
        host: loaded plugins, whoever they are from.
        on_gpu: the plain attention is then one that graphs can hold.
    """
    plain: dict[str, Any] = {"attention": FAST["attention"]} if on_gpu else {}
    usual = Config.build(plain)
    found = {"plain": plain}
    for status in host.statuses():
        field = "model_impl" if status.kind == "model" else status.kind
        if status.kind in KINDS and status.status != "failed" and status.name != getattr(usual, field):
            found[f"{status.kind}={status.name}"] = plain | {field: status.name}
    return found | ({"fast": dict(FAST)} if on_gpu else {})
