"""The conformance suite of a runner.

On one of your own:

    from nanofw.testing import RunnerSuite

    class TestMyRunner(RunnerSuite):
        backend = MyRunner
        options = {"buckets": [1, 2, 4, 8]}

Every step is run twice, by the runner and by plain eager launches over parts of the same kind, and compared: batch
sizes from 1 to one beyond its largest bucket, a step in flight or none, all kinds of steps. What surrounds a step in
memory is poisoned. A small decoder of this package is what runs; `make_model` and `make_attention` change that.
"""

from __future__ import annotations

from nanofw.testing.count_laws import CountLaws
from nanofw.testing.runner_honest import Honest
from nanofw.testing.runner_matches import Matches
from nanofw.testing.runner_memory import Memory


class RunnerSuite(Matches, Memory, Honest, CountLaws):
    """All checks of a runner: the eager tokens, no byte but its own, and a report that hides nothing."""
