"""What is being done now, for whoever looks on: loading, warming up, capturing. It costs nothing when nobody does.

with watching(print):
    llm = LLM("smollm2")  # prints what takes its time
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Watcher = Callable[[str], None]

_watcher: ContextVar[Watcher | None] = ContextVar("nanofw_progress", default=None)


def doing(what: str) -> None:
    """Tell what comes next, and may take seconds. For plugins too; never in a step."""
    if (watcher := _watcher.get()) is not None:
        watcher(what)


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Have `watcher` told inside the block."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)
