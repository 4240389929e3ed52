"""The check of count laws: what a plugin promises about its work is counted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nanofw.errors import PluginError
from nanofw.laws import CountLaw
from nanofw.testing.laws import counts_of, judge_counts
from nanofw.testing.suite import Suite, cases


def declared(suite: type[Suite]) -> Iterator[CountLaw]:
    """The count laws on the backend's class."""
    yield from (law for law in suite.backend.laws if isinstance(law, CountLaw))


class CountLaws(Suite):
    """What the backend promises about its cost is true. Counts, not times: the same on every machine."""

    @cases(declared)
    def test_count_laws(self, case: CountLaw) -> None:
        """The work of a decode step grows with what the backend declares, and with nothing else.

        Fails for a loop that is not declared, or a declared one that is gone, and prints the fit. Source: an engine
        whose attention looped over requests in Python made 16 tok/s at batch 1 and 23 at batch 16.
        """
        try:
            grid = counts_of(self.backend, self.options)
        except PluginError as error:
            pytest.skip(str(error))
        (verdict,) = judge_counts([case], grid)
        if not verdict.holds:
            raise AssertionError(verdict.text)
