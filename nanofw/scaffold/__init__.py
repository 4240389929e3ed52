"""What `nanofw new` writes: a package with one plugin that works, its test, its benchmark.

The plugins are modules of this folder, right as they stand: the suites judge them here, and a new package gets a copy
under names of its own. What is no Python yet (`*.template`) has its places marked by `$`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources
from string import Template

from nanofw.component import Kind


@dataclass(frozen=True, slots=True)
class Starter:
    """What differs between kinds.

    Attributes:
        cls: the class in this folder's module of the kind.
        suite: which judges it. declares: lines of its test class beside `backend`.
        setting: field of `Config` that selects it. plain: the plugin to compare with.
        temperature: of the benchmark's requests.
    """

    cls: str
    suite: str
    setting: str
    plain: str
    declares: str = ""
    temperature: int = 0


STARTERS: dict[Kind, Starter] = {
    "attention": Starter("MyAttention", "AttentionSuite", "attention", "vectorized-gather"),
    "kv_cache": Starter("MyKVCache", "KVCacheSuite", "kv_cache", "paged"),
    "scheduler": Starter(
        "MyScheduler",
        "SchedulerSuite",
        "scheduler",
        "continuous",
        "\n    preempts = False  # it reserves all that a request can need, so it never puts one back",
    ),
    "runner": Starter("MyRunner", "RunnerSuite", "runner", "eager"),
    "model": Starter("MyModel", "ModelSuite", "model_impl", "transformers"),
    "sampler": Starter("MySampler", "SamplerSuite", "sampler", "default", temperature=1),
}


def render(kind: Kind, name: str) -> dict[str, str]:
    """The files of a new package: path within it to text.

    Args:
        kind: of the plugin. name: what it is selected by, e.g. "my-attention"; its module and class follow from it.
    """
    starter, module = STARTERS[kind], name.replace("-", "_")
    places = {
        "name": name,
        "module": module,
        "cls": class_name(name),
        "kind": kind,
        "noun": kind.replace("_", " ").replace("kv", "KV"),
        "suite": starter.suite,
        "setting": starter.setting,
        "option": starter.setting.replace("_", "-"),
        "plain": starter.plain,
        "declares": starter.declares,
        "temperature": str(starter.temperature),
    }
    plugin = _read(f"{kind}.py").replace(starter.cls, places["cls"]).replace(f"my-{kind.replace('_', '-')}", name)
    written = {
        f"test_{module}.py": "test",
        f"bench_{module}.py": "bench",
        "pyproject.toml": "pyproject",
        "README.md": "readme",
    }
    return {f"{module}.py": plugin} | {
        path: Template(_read(f"{template}.template")).substitute(places) for path, template in written.items()
    }


def class_name(name: str) -> str:
    """`MyAttention` of "my-attention"."""
    return "".join(part[:1].upper() + part[1:] for part in re.split("[-_]", name))


def _read(file: str) -> str:
    return resources.files(__name__).joinpath(file).read_text(encoding="utf-8")
