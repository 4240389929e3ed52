"""Faults planted into copies of right plugins: each must be found by the check that is there for it, for its reason.

A suite that finds nothing wrong proves nothing until it has found something. In a test file:

    faults = Faults(AttentionSuite)

    @faults.plant("test_one_key_dominates[fp32-*]", "has all the weight, but its value is not the output")
    class DropsTheLastKey(MyAttention):
        ...

    @pytest.mark.parametrize("fault", faults, ids=str)
    def test_is_found(fault):
        fault.must_be_found()

The runs are the same each time: Hypothesis draws its cases from a fixed seed here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from hypothesis import settings

from nanofw.testing.plugin import matches

C = TypeVar("C", bound=type[Any])


@dataclass(frozen=True, slots=True)
class Fault:
    """A broken plugin.

    Attributes:
        suite: the class that judges it; a subclass is made of it for this fault alone.
        backend: the broken plugin.
        check: a glob over test ids: which checks must find it.
        reason: a regular expression that the message of the first of them that fails must match.
    """

    suite: type[Any]
    backend: type[Any]
    check: str
    reason: str

    def __str__(self) -> str:
        return f"{self.backend.__name__}-{self.check.partition('[')[0]}"

    def must_be_found(self) -> None:
        """Raises AssertionError if no check that the glob names fails, or if the first one fails for another reason."""
        tried = []
        with _same_cases_each_time():
            for name, check in judge(self.suite, self.backend).checks():
                if not matches(self.check, name):
                    continue
                tried.append(name)
                if (message := failure(check)) is None:
                    continue
                if re.search(self.reason, message, re.DOTALL):
                    return
                raise AssertionError(f"{name} finds {self}, but says {message!r}, which {self.reason!r} does not match")
        if not tried:
            raise AssertionError(f"{self.suite.__name__} has no check {self.check!r}")
        raise AssertionError(f"{self} was found by none of {', '.join(tried)}")


class Faults(list[Fault]):
    """The faults that one suite must find.

    Args:
        suite: the suite, or a subclass of it with what the right plugin declares. attributes: set on that subclass.
    """

    def __init__(self, suite: type[Any], **attributes: Any) -> None:
        super().__init__()
        self.suite = type(suite.__name__, (suite,), {**attributes, "__test__": False})

    def plant(self, check: str, reason: str) -> Callable[[C], C]:
        """Decorate a broken plugin: which checks must find it (a glob over test ids), and what they must say."""

        def add(backend: C) -> C:
            self.append(Fault(self.suite, backend, check, reason))
            return backend

        return add


def judge(suite: type[Any], backend: type[Any], **attributes: Any) -> type[Any]:
    """A subclass of `suite` for `backend`, as a test file would write it; pytest does not collect it."""
    return type(backend.__name__, (suite,), {"backend": backend, "__test__": False, **attributes})


def failure(check: Callable[[], None]) -> str | None:
    """What a check says when it fails, None if it passes or skips.

    A failure that was met while another one was on its way, as when all is put away, comes after it.
    """
    try:
        check()
    except pytest.skip.Exception:
        return None
    except (Exception, pytest.fail.Exception) as error:  # a broken plugin may end in any way
        said: list[str] = []
        met: BaseException | None = error
        while met is not None:
            said.insert(0, f"{type(met).__name__}: {met}")
            met = met.__cause__ or met.__context__
        return "\n".join(said)
    return None


@contextmanager
def _same_cases_each_time() -> Iterator[None]:
    """Hypothesis derives its cases from the test, and keeps no record of what failed: it is meant to fail."""
    before = settings.get_current_profile_name()
    settings.register_profile("nanofw-planted", settings.get_profile(before), derandomize=True, database=None)
    settings.load_profile("nanofw-planted")
    try:
        yield
    finally:
        settings.load_profile(before)
