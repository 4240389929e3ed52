"""Two attentions that gather K and V before they attend: in Python loops, and in one indexing operation."""

import nanofw

nanofw_api = (1, 0)


@nanofw.hookimpl
def nanofw_register_attention(register):  # type: ignore[no-untyped-def]
    """`naive-gather` and `vectorized-gather`."""
    register("naive-gather", "nanofw_gather.naive:NaiveGather")
    register("vectorized-gather", "nanofw_gather.vectorized:VectorizedGather")
