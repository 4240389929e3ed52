"""What all six kinds of plugin share: typed options, and saying why they cannot run on this machine."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from nanofw.laws import FLAT, Law

Kind = Literal["model", "attention", "kv_cache", "scheduler", "runner", "sampler"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Options of a plugin that has none."""


class Component(ABC):
    """Base of the six contracts.

    A plugin with options declares a frozen dataclass as `Options`; its fields are what a user may set, their types are
    checked, and an unknown one is an error. The instance reaches the plugin as `self.options`.
    """

    Options: ClassVar[type[Any]] = NoOptions
    """The dataclass of its options."""
    options: Any
    laws: ClassVar[tuple[Law, ...]] = FLAT
    """What it promises about its cost, judged by its suite. A plugin that works request by request says so here."""
    path: str = ""
    """What really runs, where a plugin has several ways. Shown with its name in `engine.resolved` and every record."""

    @classmethod
    def unavailable(cls) -> str | None:
        """Why this plugin cannot run on this machine at all ("needs an NVIDIA GPU"), or None if it can."""
        return None
