"""Did other programs take the processor away while something was measured? Then its times say little."""

from __future__ import annotations

from pathlib import Path

BUSY = 0.05
"""Share of its time that a process may wait for a processor before its times are not compared."""

_SCHEDULED = Path("/proc/self/schedstat")


class Contention:
    """Watches from when it is made."""

    def __init__(self) -> None:
        self._start = _times()

    @property
    def waited(self) -> float | None:
        """Share of the time in which this process wanted to run and waited for a processor; None if nobody knows.

        It is the scheduler's own account (Linux, Documentation/scheduler/sched-stats.rst) of the main thread, so in a
        container it is about this container.
        """
        now = _times()
        if now is None or self._start is None:
            return None
        ran, waited = (after - before for after, before in zip(now, self._start, strict=True))
        return round(waited / (ran + waited), 4) if ran + waited else 0.0


def notices(waited: float | None) -> list[str]:
    """A sentence about what that makes of the times; none if they can be trusted, or if nobody knows."""
    if waited is None or waited <= BUSY:
        return []
    return [
        f"other programs ran beside this one, which waited for a processor in {waited:.0%} of its time: "
        "times say little, counts and ratios within a round hold"
    ]


def _times() -> tuple[int, int] | None:
    """Nanoseconds that the main thread ran and waited so far."""
    try:
        ran, waited, _ = map(int, _SCHEDULED.read_text().split())
    except (OSError, ValueError):
        return None
    return ran, waited
