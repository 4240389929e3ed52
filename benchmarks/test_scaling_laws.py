"""Does every plugin scale as it promises? Judged by interleaved rounds, as many as it takes: docs/explanation/laws.md.

pytest benchmarks/test_scaling_laws.py -s          every plugin that declares a scaling law
pytest benchmarks/test_scaling_laws.py -k naive    one of them
"""

from __future__ import annotations

from typing import Any

import pytest

from nanofw.build import resolve_device
from nanofw.config import Config
from nanofw.errors import PluginError
from nanofw.measure.replay import Replay
from nanofw.plugins import PluginHost
from nanofw.testing.scaling import LOOKS, judge_engine, scaling_laws

PLAIN = {"attention": "triton-paged"} if resolve_device("auto").type == "cuda" else {}
"""What serves beside the plugin under test: on a GPU, an attention that graphs can hold."""


def plugins() -> list[Any]:
    """Kind and name of each plugin with a scaling law. One that cannot run here may have some: it shows as skipped."""
    host, found = PluginHost.load(), []
    for status in host.statuses():
        marks = []
        try:
            if not scaling_laws(host.get(status.kind, status.name).load()):
                continue
        except PluginError as error:
            marks = [pytest.mark.skip(reason=str(error))]
        found.append(pytest.param(status.kind, status.name, id=f"{status.kind}={status.name}", marks=marks))
    return found


@pytest.mark.gate(time=None)
@pytest.mark.benchmark(group="decode step at the largest batch of a scaling law")
@pytest.mark.parametrize(("kind", "name"), plugins())
def test_scaling_laws(replay: Replay, host: PluginHost, quick: bool, kind: str, name: str) -> None:
    """The laws hold."""
    laws = scaling_laws(host.get(kind, name).load())
    config = Config.build({"model": "dummy:tiny"}, PLAIN, {"model_impl" if kind == "model" else kind: name})
    try:
        found = judge_engine(laws, config, host, LOOKS[:1] if quick else LOOKS)
    except PluginError as error:
        pytest.skip(str(error))
    largest = max(found.rates)
    texts = [verdict.text for verdict in found.verdicts]
    print("", *texts, sep="\n")
    replay([largest[0] / rate for rate in found.rates[largest]], laws=texts)
    broken = [verdict.text for verdict in found.verdicts if not verdict.holds]
    assert not broken, "\n".join(broken)
