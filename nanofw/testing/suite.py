"""Base of the shipped suites: checks are methods, their cases come from what the plugin declares.

A check is an ordinary test method, so it can also be called by hand, without pytest:

    for name, check in MySuite.checks():
        check()

`@cases(make)` gives a check one test per case; `@drawn(make)` gives it cases from a Hypothesis strategy. A method with
`@given` that two classes inherit trips a health check of Hypothesis, and it would draw what one of them cannot do; so
each subclass gets its own copy.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

F = TypeVar("F", bound=Callable[..., None])


def environment_seed() -> int:
    """`NANOFW_TEST_SEED` of the environment, 0 if it is not set: with another one, cases have other numbers."""
    return int(os.environ.get("NANOFW_TEST_SEED", "0"))


def cases(make: Callable[[Any], Iterable[Any]]) -> Callable[[F], F]:
    """Run a check once for each case of `make(suite class)`; `str(case)` is the test's id."""

    def mark(check: F) -> F:
        check.make_cases = make  # type: ignore[attr-defined]
        return check

    return mark


def drawn(make: Callable[[Any], st.SearchStrategy[Any]]) -> Callable[[F], F]:
    """Run a check on cases drawn from the strategy `make(suite class)`."""

    def mark(check: F) -> F:
        check.make_strategy = make  # type: ignore[attr-defined]
        return check

    return mark


class Suite:
    """A conformance suite. Subclass it, name the plugin's class, and pytest finds the checks.

    Attributes a subclass sets:
        backend: the plugin's class.
        options: its options, as a user would set them.
        xfail: known failures: a glob over test ids (`"test_decode_matches[fp16-d256-*]"`) to the reason. Strict: one
            that passes, or matches nothing, fails.
        max_examples: cases that Hypothesis draws for each property.
        thin: of the cases of each check, only every so many-th runs: for a backend that is slow to test, in an
            interpreter for one.
    """

    backend: ClassVar[Any] = None
    options: ClassVar[Mapping[str, Any]] = {}
    xfail: ClassVar[Mapping[str, str]] = {}
    max_examples: ClassVar[int] = 30
    thin: ClassVar[int] = 1

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.backend is None:
            return
        for name in dir(cls):
            check = getattr(cls, name)
            if hasattr(check, "make_strategy"):
                setattr(cls, name, _bind(cls, check))

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Called by pytest: one test for each case."""
        if self.backend is None:
            raise pytest.UsageError(
                f"{type(self).__name__} does not say what to judge: give it the plugin's class (backend = MyPlugin)"
            )
        make = getattr(metafunc.function, "make_cases", None)
        if make is not None:
            found = list(make(type(self)))[:: self.thin]
            metafunc.parametrize("case", found, ids=[str(case) for case in found])

    @classmethod
    def checks(cls, name: str = "test_") -> Iterator[tuple[str, Callable[[], None]]]:
        """Every check whose name starts with `name`, as its test id and a call without arguments.

        Cases come from `@cases` and from `pytest.mark.parametrize`, ids as pytest makes them.
        """
        for method in (method for method in dir(cls) if method.startswith(name)):
            check = getattr(cls(), method)
            if hasattr(check, "make_cases"):
                for case in list(check.make_cases(cls))[:: cls.thin]:
                    yield f"{method}[{case}]", functools.partial(check, case)
            elif check is not None:  # a subclass switches a check off so
                yield from _parametrized(method, check)


def _parametrized(name: str, check: Any) -> Iterator[tuple[str, Callable[[], None]]]:
    marks = [(*mark.args, mark.kwargs.get("ids", str)) for mark in getattr(check, "pytestmark", ())]
    for values in itertools.product(*(possible for _, possible, _ in marks)):
        parts = [text(value) for (_, _, text), value in zip(marks, values, strict=True)]
        named = {argument: value for (argument, _, _), value in zip(marks, values, strict=True)}
        yield f"{name}[{'-'.join(parts)}]" if parts else name, functools.partial(check, **named)


def _bind(cls: type[Suite], check: Any) -> Any:
    """A copy of `check` that belongs to `cls` alone and draws its cases from what `cls` declares."""
    plain, make = getattr(check, "plain_check", check), check.make_strategy

    def bound(self: Suite, case: Any) -> None:
        plain(self, case)

    bound.__name__, bound.__doc__ = plain.__name__, plain.__doc__
    bound.__qualname__, bound.__module__ = f"{cls.__qualname__}.{plain.__name__}", cls.__module__
    test = given(case=st.deferred(lambda: make(cls)))(bound)
    # No deadline: the first call of a kernel compiles it.
    test = settings(max_examples=cls.max_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])(test)
    test.plain_check, test.make_strategy = plain, make  # type: ignore[attr-defined]
    return test
