"""Attentions that gather K and V before they attend: in Python loops, in one indexing operation, and fused after it."""

import nanofw

nanofw_api = (1, 0)


@nanofw.hookimpl
def nanofw_register_attention(register):  # type: ignore[no-untyped-def]
    """`naive-gather`, `vectorized-gather` and `flash`."""
    register("naive-gather", "nanofw_gather.naive:NaiveGather")
    register("vectorized-gather", "nanofw_gather.vectorized:VectorizedGather")
    register("flash", "nanofw_gather.flash:FlashGather")
