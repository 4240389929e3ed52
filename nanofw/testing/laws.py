"""Judge count laws: with what the work of one decode step grows, from counts alone.

Counts are taken over a grid of batch sizes and contexts and fitted to `a + b B + c B ctx` (`nanofw.measure.fit`);
slopes are judged, not `a`. The grid begins at B = 2: many things are special at 1.

    verdicts = judge(MyAttention)
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

from nanofw import API, hookimpl
from nanofw.attention import Attention, AttentionSpec
from nanofw.batch import Batch
from nanofw.component import Component, Kind
from nanofw.errors import PluginError
from nanofw.laws import TERMS, CountLaw, Law
from nanofw.measure.counters import Counts, count, step_counts
from nanofw.measure.fit import Fit, Grid
from nanofw.model import Model
from nanofw.options import build_options
from nanofw.plugins import PluginHost, kind_of

COUNTED, PLAIN = "counted", "plain-for-counts"
"""Names of the plugin that is judged, and of the attention beside it."""

BATCHES = (2, 3, 5, 8)
BLOCKS = (4, 8, 12)
"""Contexts, in blocks: a cache hands out whole ones, so others would add steps to what grows evenly."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found of a law.

    Attributes:
        law: the law.
        holds: whether it holds.
        text: the fit, or the ratio, in words, and what to do.
    """

    law: Law
    holds: bool
    text: str


def judge(component: type[Component], options: Mapping[str, Any] | None = None) -> list[Verdict]:
    """Judge every count law that a plugin's class declares.

    Args:
        component: the class.
        options: its options, as a user would set them.

    Raises:
        PluginError: it cannot serve the small model that its steps are counted with.
    """
    laws = [law for law in component.laws if isinstance(law, CountLaw)]
    return judge_counts(laws, counts_of(component, options or {})) if laws else []


def judge_counts(laws: list[CountLaw], grid: Grid) -> list[Verdict]:
    """Judge laws on counts that were taken."""
    return [_verdict(law, Fit.of(law.counter, grid)) for law in laws]


def _verdict(law: CountLaw, fit: Fit) -> Verdict:
    wrong = []
    for term in TERMS:
        name = term.replace("*", " ")
        if fit.grows_with(term) and term not in law.grows_with:
            wrong.append(f"declared slope in {name}: 0")
        if not fit.grows_with(term) and term in law.grows_with:
            wrong.append(f"declared: grows with {term}, which it does not")
    if not wrong:
        return Verdict(law, True, str(fit))
    undeclared = any("declared slope" in text for text in wrong)
    cause = "Something is done one by one: remove the loop" if undeclared else "It is better than it promises"
    grown = tuple(term for term in TERMS if fit.grows_with(term))
    said = f'CountLaw("{law.counter}"{f", grows_with={grown}" if grown else ""})'
    return Verdict(law, False, f"{fit}; {'; '.join(wrong)}. {cause}, or declare {said} in `laws`")


_counted: dict[tuple[type[Component], str], Grid] = {}


def counts_of(component: type[Component], options: Mapping[str, Any]) -> Grid:
    """Counts over the grid: of one layer's attention, or of whole steps with the plugin in a small engine.

    They are taken once for a class and its options.
    """
    key = component, repr(sorted(options.items()))
    if key not in _counted:
        _counted[key] = _count(component, dict(options))
    return _counted[key]


def _count(component: type[Component], options: dict[str, Any]) -> Grid:
    if issubclass(component, Attention):
        return _of_attention(component, options)
    if issubclass(component, Model):
        return _of_model(component, options)
    return _of_engine(component, options)


def _of_attention(component: type[Attention], options: dict[str, Any]) -> Grid:
    from nanofw.testing.attention_base import AttentionBase, run
    from nanofw.testing.layout import lay_out

    suite: Any = type("Counted", (AttentionBase,), {"backend": component, "options": options})
    found: dict[tuple[int, int], Counts] = {}
    for batch, context in _points(suite.block()):
        case = suite.case((context,) * batch)
        try:
            attention = suite().build(case.spec(suite.torch_device()))
        except pytest.skip.Exception as skip:
            raise PluginError(str(skip)) from None
        problem = lay_out(case, suite().numbers(case))
        step = functools.partial(run, attention, problem)
        if not found:
            step()  # the first makes what later ones find
        found[batch, context] = count(step)
    return found


def _of_model(component: type[Model], options: dict[str, Any]) -> Grid:
    """Decode steps over contexts that nobody computed: a model in Triton's interpreter would take minutes for them."""
    from nanofw.testing.by_hand import ByHand
    from nanofw.testing.plain_attention import PlainAttention
    from nanofw.weights import resolve

    device, dtype, block = torch.device("cpu"), torch.float32, 4
    model = component(resolve("dummy:tiny"), dtype, device, build_options(component.Options, options, "model"))
    attention = PlainAttention(AttentionSpec(model.spec.layers, dtype, device, block), None)
    found: dict[tuple[int, int], Counts] = {}
    for batch, context in itertools.product(BATCHES[:3], (8 * block, 16 * block)):
        hand = ByHand(model.spec, rows=batch, max_len=context + 1, blocks=batch * context, block_size=block)
        rows = [hand.open([1] * context) for _ in range(batch)]
        hand.table.computed[rows] = context - 1
        step = Batch.from_step(hand.plan(dict.fromkeys(rows, 1)), device)
        step = step.with_plan(attention.plan(step))
        forward = functools.partial(model.forward, step, attention, hand.cache.layers)
        if not found:
            forward()
        found[batch, context] = count(forward)
    return found


def _of_engine(component: type[Component], options: dict[str, Any]) -> Grid:
    from nanofw.build import build_engine, build_model
    from nanofw.config import Config
    from nanofw.testing.null import NullModel, NullSource
    from nanofw.testing.plain_attention import PlainAttention
    from nanofw.weights import resolve

    kind, block = kind_of(component), 16
    computes = kind in ("runner", "sampler")  # the others manage; a model would only hide what they do
    settings: dict[str, Any] = {
        "model": "dummy:tiny",
        "device": "cpu",
        "dtype": "float32",
        "max_num_seqs": max(BATCHES),
        "max_model_len": block * BLOCKS[-1] + 64,
        "kv_blocks": 1 + max(BATCHES) * 64,
        "attention": PLAIN,  # can be captured, as some runners demand
        "options": {kind: options},
        kind: COUNTED,
    }
    host = host_with(kind, component)
    host.register(_plugin("attention", PLAIN, PlainAttention))
    config = Config(**settings)
    source = resolve(config.model) if computes else NullSource()
    model = build_model(config, host, source) if computes else NullModel(source)
    engine = build_engine(config, host, source, model)
    # In the middle of a block: at its end a cache that shares blocks has work for each request, once in so many steps.
    points = [(batch, context + block // 2) for batch, context in _points(block)]
    step_counts(engine, *points[0])  # the first steps make what later ones find
    return {point: step_counts(engine, *point) for point in points}


def _points(block: int) -> Iterator[tuple[int, int]]:
    """(B, ctx). Contexts of around 64, 128 and 192 tokens where blocks are small."""
    scale = max(16 // block, 1) if block > 4 else 1
    for blocks in BLOCKS:
        for batch in BATCHES:
            yield batch, blocks * block * scale


def host_with(kind: Kind, component: type[Component], name: str = COUNTED) -> PluginHost:
    """The installed plugins and this one, registered under `name`."""
    host = PluginHost.load()
    host.register(_plugin(kind, name, component))
    return host


def _plugin(kind: Kind, name: str, component: type[Component]) -> ModuleType:
    @hookimpl
    def register_it(register: Callable[[str, type[Component]], None]) -> None:
        register(name, component)

    plugin = ModuleType(name)
    plugin.nanofw_api = API  # type: ignore[attr-defined]
    setattr(plugin, f"nanofw_register_{kind}", register_it)
    return plugin
