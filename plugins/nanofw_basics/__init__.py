"""The plain plugin of each kind: what every faster one is compared with."""

import nanofw

nanofw_api = (1, 0)


@nanofw.hookimpl
def nanofw_register_model(register):  # type: ignore[no-untyped-def]
    """`transformers`: any decoder-only model of that library."""
    register("transformers", "nanofw_basics.transformers_model:TransformersModel")


@nanofw.hookimpl
def nanofw_register_kv_cache(register):  # type: ignore[no-untyped-def]
    """`paged`: fixed-size blocks from one pool. `prefix`: the same, and finds what earlier requests have computed.

    `contiguous`: one slab a request, the baseline.
    """
    register("contiguous", "nanofw_basics.contiguous_cache:ContiguousKVCache")
    register("paged", "nanofw_basics.paged_cache:PagedKVCache")
    register("prefix", "nanofw_basics.prefix_cache:PrefixKVCache")


@nanofw.hookimpl
def nanofw_register_scheduler(register):  # type: ignore[no-untyped-def]
    """`continuous` batching, and the `static` batching it replaced."""
    register("continuous", "nanofw_basics.continuous:ContinuousScheduler")
    register("static", "nanofw_basics.static:StaticScheduler")


@nanofw.hookimpl
def nanofw_register_runner(register):  # type: ignore[no-untyped-def]
    """`eager`: launch every operation of every step."""
    register("eager", "nanofw_basics.eager:EagerRunner")


@nanofw.hookimpl
def nanofw_register_sampler(register):  # type: ignore[no-untyped-def]
    """`default`: all of `SamplingParams`."""
    register("default", "nanofw_basics.sampler:DefaultSampler")
