"""All hooks of nanofw. A plugin is a module or object that implements some of them with `@nanofw.hookimpl`.

Hooks run when plugins are loaded and, for observers, once a step or request: never once a layer. A hook call costs
microseconds, and a model has dozens of layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import pluggy

if TYPE_CHECKING:
    from nanofw.attention import Attention
    from nanofw.component import Component
    from nanofw.events import EngineCreated, RequestFinished, StepFinished
    from nanofw.kv_cache import KVCache
    from nanofw.model import Model
    from nanofw.runner import Runner
    from nanofw.sampler import Sampler
    from nanofw.scheduler import Scheduler

PROJECT = "nanofw"
API = (1, 0)
"""Version of the contracts. A plugin declares the one it was written for as `nanofw_api`; the first number must match,
and the second may be lower than ours."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


C_contra = TypeVar("C_contra", bound="Component", contravariant=True)


class Register(Protocol[C_contra]):
    """Registers one component of a kind under the name users select it by.

    `target` is the class, or "package.module:Class" where importing it is costly or can fail: it is imported when first
    used, and an import error then becomes the reason why it is unavailable.
    """

    def __call__(self, name: str, target: type[C_contra] | str) -> None:
        """Register `target` as `name`."""


@hookspec
def nanofw_register_model(register: Register[Model]) -> None:
    """Register models: `register("transformers", TransformersModel)`."""


@hookspec
def nanofw_register_attention(register: Register[Attention]) -> None:
    """Register attentions: `register("naive-gather", NaiveGather)`."""


@hookspec
def nanofw_register_kv_cache(register: Register[KVCache]) -> None:
    """Register KV caches: `register("paged", PagedKVCache)`."""


@hookspec
def nanofw_register_scheduler(register: Register[Scheduler]) -> None:
    """Register schedulers: `register("continuous", ContinuousScheduler)`."""


@hookspec
def nanofw_register_runner(register: Register[Runner]) -> None:
    """Register runners: `register("eager", EagerRunner)`."""


@hookspec
def nanofw_register_sampler(register: Register[Sampler]) -> None:
    """Register samplers: `register("default", DefaultSampler)`."""


@hookspec
def nanofw_engine_created(event: EngineCreated) -> None:
    """Observe a new engine."""


@hookspec
def nanofw_step_finished(event: StepFinished) -> None:
    """Observe a step whose tokens have arrived. Runs on the engine's path: be quick."""


@hookspec
def nanofw_request_finished(event: RequestFinished) -> None:
    """Observe the end of a request."""
