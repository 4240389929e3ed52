"""nanofw: a research framework for LLM inference in which every moving part is a plugin.

Everything here is imported when first used, so that `import nanofw` in a plugin's `__init__` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nanofw.hookspecs import API, hookimpl

if TYPE_CHECKING:
    from nanofw.attention import Attention, AttentionSpec, Capabilities
    from nanofw.batch import NULL_BLOCK, Batch, Sampling, Step
    from nanofw.config import Config
    from nanofw.engine import Engine
    from nanofw.errors import NanofwError
    from nanofw.kv_cache import KVCache, KVCacheSpec, LayerKV, LayerSpec
    from nanofw.laws import CountLaw, ScalingLaw
    from nanofw.llm import LLM
    from nanofw.model import Model, ModelSpec
    from nanofw.plugins import PluginHost
    from nanofw.request import CompletionOutput, Request, RequestOutput, SamplingParams
    from nanofw.runner import HostSampled, Parts, Pending, Runner, RunnerReport
    from nanofw.sampler import Sampled, Sampler
    from nanofw.scheduler import Limits, Schedule, Scheduler
    from nanofw.table import RequestTable

__version__ = "0.1.0"

_HOME = {
    "attention": ("Attention", "AttentionSpec", "Capabilities"),
    "batch": ("NULL_BLOCK", "Batch", "Sampling", "Step"),
    "config": ("Config",),
    "engine": ("Engine",),
    "errors": ("NanofwError",),
    "kv_cache": ("KVCache", "KVCacheSpec", "LayerKV", "LayerSpec"),
    "laws": ("CountLaw", "ScalingLaw"),
    "llm": ("LLM",),
    "model": ("Model", "ModelSpec"),
    "plugins": ("PluginHost",),
    "request": ("CompletionOutput", "Request", "RequestOutput", "SamplingParams"),
    "runner": ("HostSampled", "Parts", "Pending", "Runner", "RunnerReport"),
    "sampler": ("Sampled", "Sampler"),
    "scheduler": ("Limits", "Schedule", "Scheduler"),
    "table": ("RequestTable",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "API",
    "LLM",
    "NULL_BLOCK",
    "Attention",
    "AttentionSpec",
    "Batch",
    "Capabilities",
    "CompletionOutput",
    "Config",
    "CountLaw",
    "Engine",
    "HostSampled",
    "KVCache",
    "KVCacheSpec",
    "LayerKV",
    "LayerSpec",
    "Limits",
    "Model",
    "ModelSpec",
    "NanofwError",
    "Parts",
    "Pending",
    "PluginHost",
    "Request",
    "RequestOutput",
    "RequestTable",
    "Runner",
    "RunnerReport",
    "Sampled",
    "Sampler",
    "Sampling",
    "SamplingParams",
    "ScalingLaw",
    "Schedule",
    "Scheduler",
    "Step",
    "__version__",
    "hookimpl",
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"nanofw.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'nanofw' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
