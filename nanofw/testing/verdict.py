"""All that can be said of one plugin: is it right, does it keep its laws, does it scale, and what next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nanofw.component import Component, Kind
from nanofw.errors import PluginError
from nanofw.laws import CountLaw
from nanofw.testing.session import Failure, run_suite


@dataclass(frozen=True, slots=True)
class Ruling:
    """What was measured of a law.

    Attributes:
        law: in words.
        holds: whether it holds.
        found: what was measured, in words.
    """

    law: str
    holds: bool
    found: str


@dataclass(slots=True)
class Verdict:
    """What was found.

    Attributes:
        plugin: as the user named it.
        kind, cls: its kind and class.
        passed, failures, skipped: checks of its suite; skipped ones by their reason.
        laws, scaling: rulings on laws that are counted, and on those that are timed.
        notes: why laws could not be judged.
        next_step: one sentence.
    """

    plugin: str
    kind: Kind
    cls: str
    passed: int = 0
    failures: list[Failure] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    laws: list[Ruling] = field(default_factory=list)
    scaling: list[Ruling] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    next_step: str = ""

    @property
    def right(self) -> bool:
        """Whether checks passed, and none failed."""
        return self.passed > 0 and not self.failures

    @property
    def good(self) -> bool:
        """Right, and every law that could be judged holds."""
        return self.right and all(ruling.holds for ruling in (*self.laws, *self.scaling))


def judge(
    plugin: str,
    kind: Kind,
    backend: type[Component],
    options: Mapping[str, Any],
    watch: Callable[[int, int], None] = lambda done, of: None,
) -> Verdict:
    """Run its suite, then count, then time. A wrong plugin is not timed: it is fast for free.

    Args:
        plugin: what to call it.
        kind, backend, options: the plugin, and its options as a user would set them.
        watch: see `run_suite`.
    """
    outcome = run_suite(kind, backend, options, watch)
    verdict = Verdict(plugin, kind, f"{backend.__module__}:{backend.__qualname__}")
    verdict.passed, verdict.failures, verdict.skipped = (
        outcome.passed,
        outcome.failures,
        dict(outcome.skipped.most_common()),
    )
    _judge_laws(verdict, backend, options)
    verdict.next_step = advice(verdict, backend)
    return verdict


def _judge_laws(verdict: Verdict, backend: type[Component], options: Mapping[str, Any]) -> None:
    # Late: pytest rewrites the assertions of what it is the first to import.
    from nanofw.testing import laws, scaling

    judges = [(laws.judge, verdict.laws)]
    if verdict.right:
        judges.append((scaling.judge, verdict.scaling))
    for judge_them, into in judges:
        try:
            into += [Ruling(str(v.law), v.holds, v.text) for v in judge_them(backend, options)]
        except PluginError as error:
            verdict.notes.append(str(error))
        except Exception as error:
            if verdict.right:
                raise
            verdict.notes.append(f"not judged while it is wrong ({type(error).__name__}: {error})")


def advice(verdict: Verdict, backend: type[Component]) -> str:
    """What to do next, in one sentence."""
    if verdict.failures:
        first = verdict.failures[0]
        check = first.check.partition("[")[0]
        return f"Begin with {check}: {first.purpose[:1].lower()}{first.purpose[1:]}"
    if not verdict.passed:
        return "No check ran: declare what it serves, or install what it needs (see the reasons above)."
    if broken := [ruling for ruling in (*verdict.laws, *verdict.scaling) if not ruling.holds]:
        return f"It is right, and breaks its law {broken[0].law}: keep it, or declare what is true."
    # Bytes may grow: that is the work itself. What the host does must not.
    work = [law for law in backend.laws if isinstance(law, CountLaw) and law.counter != "bytes_written"]
    if growing := [str(law) for law in work if law.grows_with]:
        return f"It is right and keeps its promises; now promise more: {listing(growing)} is what a batch pays for."
    return "It is right and its cost is flat: measure it with nanofw bench, beside others."


def listing(laws: list[str]) -> str:
    """Laws joined by commas and an "and"."""
    return " and ".join(filter(None, (", ".join(laws[:-1]), laws[-1])))
