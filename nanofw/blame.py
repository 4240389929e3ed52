"""Which plugin an error comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanofw.engine import Resolved


def blame(error: BaseException, parts: Mapping[str, object], plugins: Mapping[str, Resolved]) -> str | None:
    """Name the plugin whose method was running, the innermost if one called another: "raised by sampler 'default' ...".

    Args:
        error: as caught. parts: the component that serves each kind. plugins: what they are called.

    Returns:
        None if no plugin had a hand in it.
    """
    found, trace = None, error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        found = next((kind for kind, part in parts.items() if part is owner), found)
        trace = trace.tb_next
    if found is None or found not in plugins:
        return None
    plugin = plugins[found]
    return f"raised by {found} {plugin.name!r} of {plugin.distribution} {plugin.version}".rstrip()
