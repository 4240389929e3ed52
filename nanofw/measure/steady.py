"""An engine in the middle of decoding, to look at its steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nanofw.request import SamplingParams

if TYPE_CHECKING:
    from nanofw.engine import Engine

SETTLED = 3
"""First tokens of a request: by then every step in flight is a decode step."""


@contextmanager
def steady(engine: Engine, batch: int, context: int) -> Iterator[None]:
    """`batch` requests that decode, each with `context` tokens, prompt and generated ones; then they are aborted.

    Inside, each `engine.step()` is a decode step of all of them, as long as `engine.max_model_len` has room.

    Args:
        engine: idle. It is idle again afterwards.
        batch: requests that decode.
        context: tokens each of them has at the beginning.

    Raises:
        RequestError: such requests do not fit the engine.
    """
    prompt = max(context - SETTLED, 1)
    params = SamplingParams(temperature=0, max_tokens=engine.max_model_len - prompt, ignore_eos=True)
    names = [f"steady-{number}" for number in range(batch)]
    try:
        for number, name in enumerate(names):
            ids = [(7 * number + place) % engine.vocab_size for place in range(prompt)]
            engine.add(name, ids, params, stream=False)
        while min(engine.table.known[r.row] if r.row >= 0 else 0 for r in engine.requests.values()) < context:
            engine.step()
        yield
    finally:
        for name in names:
            engine.abort(name)
        while engine.has_work:
            engine.step()
