"""Attention kernels in Triton that read the paged cache in place."""

import nanofw

nanofw_api = (1, 0)


@nanofw.hookimpl
def nanofw_register_attention(register):  # type: ignore[no-untyped-def]
    """`triton-paged`: split-KV decode and fused prefill."""
    register("triton-paged", "nanofw_triton.attention:TritonPagedAttention")
