"""A runner that replays the whole decode step, sampling included, as one CUDA graph."""

import nanofw

nanofw_api = (1, 0)


@nanofw.hookimpl
def nanofw_register_runner(register):  # type: ignore[no-untyped-def]
    """`cuda-graph`."""
    register("cuda-graph", "nanofw_cudagraph.runner:CudaGraphRunner")
