"""Attention over the paged cache in place, and sampling, in Triton."""

import nanofw

nanofw_api = (1, 0)


@nanofw.hookimpl
def nanofw_register_attention(register):  # type: ignore[no-untyped-def]
    """`triton-paged`: split-KV decode and fused prefill."""
    register("triton-paged", "nanofw_triton.attention:TritonPagedAttention")


@nanofw.hookimpl
def nanofw_register_sampler(register):  # type: ignore[no-untyped-def]
    """`triton`: arg-max and temperature in two launches."""
    register("triton", "nanofw_triton.sampler:TritonSampler")
