"""Baselines: which of them a run is compared with, and what that comparison says.

A run and a baseline are both what `pytest --benchmark-json` writes, with a block `nanofw` added by the gate. Only plain
values are read here, so recorded files can be judged anywhere.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nanofw.errors import ConfigError
from nanofw.measure.contention import BUSY
from nanofw.measure.judged import RULES, TIME, Rule

Run = Mapping[str, Any]
FINGERPRINT = ("device", "driver", "torch", "triton", "python")
"""Absolute times are comparable only where all of these are equal."""

Status = Literal["passed", "failed", "no baseline", "not judged"]


def fingerprint(machine: Mapping[str, Any]) -> dict[str, str | None]:
    """What absolute times depend on, of a description by `nanofw.measure.machine.describe()`."""
    gpu = machine["gpu"]
    device = gpu["name"] if gpu else f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads"
    return {"device": device, "driver": gpu["driver"] if gpu else None} | {k: machine[k] for k in FINGERPRINT[2:]}


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """In words, what differs between the fingerprints of two machine descriptions."""
    one, other = fingerprint(here), fingerprint(there)
    return [f"{key} {other[key]}, here {one[key]}" for key in FINGERPRINT if other[key] != one[key]]


def slug(machine: Mapping[str, Any]) -> str:
    """File name of the machine's baseline, without `.json`: its device in small letters."""
    device = re.sub(r"\((R|TM)\)", "", str(fingerprint(machine)["device"]), flags=re.IGNORECASE)
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


@dataclass(frozen=True, slots=True)
class Choice:
    """The baseline to compare with.

    Attributes:
        file: where it lies. run: what it holds; None where there is none to compare with.
        times: they are judged, because the machine is the same and nobody disturbed either run.
        why: a sentence that says what is judged.
    """

    file: Path | None
    run: Run | None
    times: bool
    why: str


def choose(folder: Path, machine: Mapping[str, Any], waited: float | None = None) -> Choice:
    """The baseline of this machine, else the one of its kind (GPU, or CPU) that is most like it.

    Args:
        folder: of the baselines.
        machine: that of the run, as described by `nanofw.measure.machine`.
        waited: share of its time that the run waited for a processor (`nanofw.measure.contention`), if it is known.

    Raises:
        ConfigError: a file in `folder` is not a baseline.
    """
    kind = "GPU" if machine["gpu"] else "CPU"
    best: tuple[int, Path, Run] | None = None
    for file in sorted(folder.glob("*.json")):
        run = read(file)
        there = run["machine_info"]["nanofw"]
        if (there["gpu"] is None) != (machine["gpu"] is None):
            continue
        likeness = (slug(there) == slug(machine)) * len(FINGERPRINT) - len(differences(machine, there))
        if best is None or likeness > best[0]:
            best = (likeness, file, run)
    if best is None:
        return Choice(None, None, False, f"no baseline for a {kind} in {os.path.relpath(folder)}: nothing is compared")
    _, file, chosen = best
    return against(file, chosen, machine, waited, f"baseline {file.name}")


def against(file: Path, run: Run, machine: Mapping[str, Any], waited: float | None, name: str) -> Choice:
    """Compare with this run, which `file` holds, and call it `name`. The others: see `choose`."""
    other = differences(machine, run["machine_info"]["nanofw"])
    shares = {"this run": waited, "the baseline's": run["nanofw"].get("waited")}
    busy = [f"{what} waited for a processor in {share:.0%} of its time" for what, share in shares.items() if share]
    if other:
        why = f"another machine ({'; '.join(other)}): only ratios, exponents and counts, no times"
    elif max(share or 0.0 for share in shares.values()) > BUSY:
        why = f"same machine, but busy ({', '.join(busy)}): ratios, exponents and counts, no times"
    else:
        return Choice(file, run, True, f"{name}, same machine: times, ratios, exponents and counts")
    return Choice(file, run, False, f"{name}, {why}")


def read(file: Path) -> dict[str, Any]:
    """A run or a baseline. Raises ConfigError if it cannot be read, or was not written under the gate."""
    try:
        run = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    try:
        fingerprint(run["machine_info"]["nanofw"])
        run["nanofw"].get("waited")
        records(run)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} was not written by pytest-benchmark under the gate (it lacks {error}): write it with "
            "pytest benchmarks --benchmark-json=FILE"
        ) from error
    return run  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Figure:
    """A judged figure: its rule, its median, and its best round."""

    rule: Rule
    median: float
    best: float


@dataclass(frozen=True, slots=True)
class Record:
    """One benchmark of a run. A test that ran several times (reruns, repeats) is one record of all its runs.

    Attributes:
        median, fastest: seconds.
        figures: by name. limits: its own limits by name, `time` among them; None: not judged.
    """

    median: float
    fastest: float
    figures: Mapping[str, Figure]
    limits: Mapping[str, float | None]


def records(run: Run) -> dict[str, Record]:
    """The records of a run by key: the test's id, from the benchmarks' folder on. A changed rootdir changes no key."""
    by_key: dict[str, list[Mapping[str, Any]]] = {}
    for bench in run["benchmarks"]:
        if "key" in bench:  # those of other folders have none
            by_key.setdefault(bench["key"], []).append(bench)
    found = {}
    for key, runs in by_key.items():
        last = runs[-1]["extra_info"]
        found[key] = Record(
            median=statistics.median(r["stats"]["median"] for r in runs),
            fastest=min(r["stats"]["min"] for r in runs),
            figures={
                name: Figure(
                    rule=RULES[rule],
                    median=statistics.median(r["extra_info"][name] for r in runs),
                    best=RULES[rule].best(r["extra_info"]["best"][name] for r in runs),
                )
                for name, rule in last.get("judged", {}).items()
            },
            limits=runs[-1].get("limits", {}),
        )
    return found


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the comparison says.

    Attributes:
        basis: what was compared with what.
        failures: one line for each thing that is worse beyond its limit, is gone, or is wrong.
        notes: what one should know besides: new benchmarks, skipped ones, better ones.
        compared: benchmarks that had something to be compared.
    """

    status: Status
    basis: str
    failures: Sequence[str] = ()
    notes: Sequence[str] = ()
    compared: int = 0


@dataclass(slots=True)
class _Findings:
    failures: list[str] = field(default_factory=list)
    better: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    compared: int = 0


def judge(run: Run, choice: Choice, unmeasured: Collection[str] = (), part: str | None = None) -> Verdict:
    """Compare a run with the baseline.

    Args:
        run: as `read` gives it.
        choice: the baseline.
        unmeasured: keys of benchmarks that exist and gave no figures this time (skipped, or failed).
        part: why only a part of the set was run, or None: then what the baseline holds and the run lacks is gone.
    """
    now, found = records(run), _Findings()
    for key, record in now.items():
        found.failures += _misspelt(key, record)
    if choice.run is None:
        status: Status = "failed" if found.failures else "no baseline"
        return Verdict(status, choice.why, found.failures)
    before = records(choice.run)
    for key, record in now.items():
        if key in before:
            _compare(key, before[key], record, choice.times, found)
        else:
            found.new.append(key)
    gone = [key for key in before if key not in now and key not in unmeasured]
    if part is None:
        found.failures += [
            f"{key}: removed or renamed; the baseline has it, no test by this name exists" for key in gone
        ]
    notes = [
        *_listed("in the baseline, not measured here", [key for key in before if key in unmeasured and key not in now]),
        *_listed("not in the baseline yet", found.new),
        *found.better,
    ]
    if part is not None:
        notes.append(f"only a part of the set was run ({part}): removed and renamed benchmarks are not looked for")
    return Verdict("failed" if found.failures else "passed", choice.why, found.failures, notes, found.compared)


def _misspelt(key: str, record: Record) -> Iterable[str]:
    for name in record.limits:
        if name != "time" and name not in record.figures:
            has = ", ".join(["time", *record.figures])
            yield f"{key}: a limit is set for {name!r}, which it does not record; it records {has}"


def _compare(key: str, before: Record, now: Record, times: bool, found: _Findings) -> None:
    compared = 0
    limit = now.limits.get("time", TIME.limit)
    if times and limit is not None:
        compared += 1
        what = f"{key}: time {_seconds(now.median)}, baseline {_seconds(before.median)}"
        pairs = ((before.median, now.median), (before.fastest, now.fastest))
        _weigh(what, TIME, limit, [TIME.worse(*pair) for pair in pairs], found)
    for name, figure in now.figures.items():
        limit = now.limits.get(name, figure.rule.limit)
        if limit is None or name not in before.figures:
            continue
        compared += 1
        was = before.figures[name]
        what = f"{key}: {name} {figure.median:.4g}, baseline {was.median:.4g}"
        pairs = ((was.median, figure.median), (was.best, figure.best))
        _weigh(what, figure.rule, limit, [figure.rule.worse(*pair) for pair in pairs], found)
    missing = [name for name in before.figures if name not in now.figures]
    found.failures += [f"{key}: {name} is in the baseline and no longer recorded" for name in missing]
    found.compared += bool(compared)


def _weigh(what: str, rule: Rule, limit: float, worse: Sequence[float], found: _Findings) -> None:
    """Worse, or better, is what is so by its median and by its best round: other people's load moves only the first."""
    if min(worse) > limit and not math.isclose(min(worse), limit):
        by = " and ".join(dict.fromkeys(map(rule.show, worse)))
        best_too = " (median and best round)" if " and " in by else ""
        found.failures.append(f"{what}: worse by {by}{best_too}, the limit is {rule.show(limit)}")
    if max(worse) < -limit:
        found.better.append(f"better: {what}")


def _listed(what: str, keys: Sequence[str]) -> list[str]:
    return [f"{what}: {', '.join(keys)}"] if keys else []


def _seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"
