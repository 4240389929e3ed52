"""Typed options of plugins: from a table of a config file or `key=value` texts to a plugin's `Options` dataclass."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from nanofw.errors import ConfigError


def build_options(cls: type[Any], values: Mapping[str, Any], where: str) -> Any:
    """Make an instance of the dataclass `cls` from `values`.

    Args:
        cls: the plugin's `Options`.
        values: what the user set. Texts are read as the field's type ("16" as an int, "true" as a bool).
        where: how an error names the plugin, e.g. `kv_cache "paged"`.

    Raises:
        ConfigError: unknown key (the known ones are listed), wrong type, or what the dataclass itself refuses.
    """
    hints = typing.get_type_hints(cls)
    known = [f.name for f in dataclasses.fields(cls)]
    for key in values:
        if key not in known:
            raise ConfigError(f"{where} has no option {key!r}{suggest(key, known)}; it takes {listing(known)}")
    converted = {key: convert(value, hints[key], f"{where}: option {key!r}") for key, value in values.items()}
    try:
        return cls(**converted)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error


def convert(value: Any, hint: Any, where: str) -> Any:
    """Check `value` against a type, reading a text as that type. Raises ConfigError that starts with `where`."""
    origin = get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        for member in sorted(get_args(hint), key=lambda m: m is str):
            try:
                return convert(value, member, where)
            except ConfigError:
                continue
    elif origin is Literal:
        for allowed in get_args(hint):
            if value == allowed or value == str(allowed):
                return allowed
    elif origin is tuple:
        items = value.split(",") if isinstance(value, str) else value
        if isinstance(items, (list, tuple)):
            member = get_args(hint)[0]
            return tuple(convert(i.strip() if isinstance(i, str) else i, member, where) for i in items)
    elif hint is type(None):
        if value is None or value == "none":
            return None
    elif hint is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in _BOOLS:
            return _BOOLS[value.lower()]
    elif hint in (int, float):
        if isinstance(value, (int, float)) and not isinstance(value, bool) and hint(value) == value:
            return hint(value)
        if isinstance(value, str):
            try:
                return hint(value)
            except ValueError:
                pass
    elif isinstance(value, hint):
        return value
    raise ConfigError(f"{where} must be {describe(hint)}, got {value!r}")


_BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def describe(hint: Any) -> str:
    """A type in words for an error: "an integer", "one of 'a', 'b'"."""
    origin = get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(m) for m in get_args(hint))
    if origin is Literal:
        return f"one of {listing(repr(a) for a in get_args(hint))}"
    if origin is tuple:
        return f"a list, each item {describe(get_args(hint)[0])}"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a text", type(None): "none"}
    return names.get(hint) or str(getattr(hint, "__name__", hint))


def suggest(word: str, known: typing.Iterable[str]) -> str:
    """` (did you mean 'x'?)` if a known word is close, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def listing(words: typing.Iterable[str]) -> str:
    """Words joined by commas, "nothing" for none."""
    return ", ".join(words) or "nothing"
