"""What all checks of schedulers share: an engine whose every step is looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hypothesis import Phase

from nanofw.engine import Engine
from nanofw.scheduler import Scheduler
from nanofw.testing.audited import NAME, audited_engine, host_with


class SchedulerBase:
    """Base of the groups of checks.

    Class attributes a subclass sets:
        backend: the scheduler class.
        options: its options, as a user would set them.
        mixes: a long prompt is computed in chunks while others keep decoding.
        preempts: requests are put back when blocks run out (else they must reserve what they need).
        patience: steps within which the oldest request must have ended, however many come after it.
        max_examples, steps: lives that Hypothesis draws, and how long they are.
        phases: what Hypothesis does with them.
    """

    backend: ClassVar[type[Scheduler]]
    options: ClassVar[Mapping[str, Any]] = {}
    mixes: ClassVar[bool] = True
    preempts: ClassVar[bool] = True
    patience: ClassVar[int] = 300

    max_examples: ClassVar[int] = 25
    steps: ClassVar[int] = 40
    phases: ClassVar[Sequence[Phase]] = tuple(Phase)

    @classmethod
    def engine(cls, eos_token_ids: tuple[int, ...] = (), **changes: Any) -> Engine:
        """An engine with this scheduler and a `ContextModel`."""
        options = {**changes.pop("options", {}), "scheduler": cls.options}
        host = host_with("scheduler", cls.backend)
        return audited_engine(host, eos_token_ids, scheduler=NAME, options=options, **changes)
