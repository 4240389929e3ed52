"""A decoder written for speed: about five kernels a layer, for the Qwen3 and Llama families."""

import nanofw

nanofw_api = (1, 0)


@nanofw.hookimpl
def nanofw_register_model(register):  # type: ignore[no-untyped-def]
    """`fused`."""
    register("fused", "nanofw_fused.model:FusedModel")
