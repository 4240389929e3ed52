"""What tests of nanofw and of other people's plugins are made from.

Everything here is imported when first used: pytest loads `nanofw.testing.plugin` in every run, and torch must not come
with it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanofw.testing.attention_suite import AttentionSuite
    from nanofw.testing.kv_cache_suite import KVCacheSuite
    from nanofw.testing.model_suite import ModelSuite
    from nanofw.testing.runner_suite import RunnerSuite
    from nanofw.testing.sampler_suite import SamplerSuite
    from nanofw.testing.scheduler_suite import SchedulerSuite

_HOME = {
    "AttentionSuite": "attention_suite",
    "KVCacheSuite": "kv_cache_suite",
    "ModelSuite": "model_suite",
    "RunnerSuite": "runner_suite",
    "SamplerSuite": "sampler_suite",
    "SchedulerSuite": "scheduler_suite",
}

__all__ = ["AttentionSuite", "KVCacheSuite", "ModelSuite", "RunnerSuite", "SamplerSuite", "SchedulerSuite"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"nanofw.testing.{_HOME[name]}"), name)
    raise AttributeError(f"module 'nanofw.testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
