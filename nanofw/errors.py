"""Errors that a user can cause, each one clear sentence: what, got, allowed, remedy.

The command line prints these as one line and exits with status 2; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations


class NanofwError(Exception):
    """Base of every error that nanofw raises on purpose."""


class ConfigError(NanofwError, ValueError):
    """A setting or plugin option is unknown, has the wrong type, or is out of range."""


class PluginError(NanofwError):
    """A plugin is missing, failed to load, clashes with another, or cannot serve what was asked of it."""


class CheckpointError(NanofwError):
    """A checkpoint cannot be found, is damaged, or does not hold what its config promises."""


class CapacityError(NanofwError):
    """The KV cache cannot hold what was asked of it."""


class RequestError(NanofwError, ValueError):
    """One request is refused; the engine and every other request go on."""


class EngineError(NanofwError, RuntimeError):
    """The engine cannot go on: it stalled, or a plugin broke its contract (the message names it)."""
