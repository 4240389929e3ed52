"""The plugin host: finds plugins through the entry-point group `nanofw`, keeps broken ones apart, resolves names.

Ours and strangers' plugins have the same form and come the same way. Names are resolved to classes once, when an engine
is built; nothing here runs during a step.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Literal

import pluggy

from nanofw import hookspecs
from nanofw.component import KINDS, Component, Kind
from nanofw.errors import PluginError
from nanofw.hookspecs import API, PROJECT
from nanofw.options import listing, suggest

Status = Literal["ok", "unavailable", "failed", "blocked"]


class PluginWarning(UserWarning):
    """A plugin was left out; the text says which and why."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a plugin comes from.

    Attributes:
        plugin: name of its entry point.
        distribution, version: what installed it.
    """

    plugin: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}".rstrip()


@dataclass(frozen=True, slots=True)
class Registration:
    """One component under one name.

    Attributes:
        kind, name: what selects it.
        target: its class, or "package.module:Class".
        source: the plugin that registered it.
    """

    kind: Kind
    name: str
    target: type[Component] | str
    source: Source

    def load(self) -> type[Component]:
        """The component's class.

        Raises:
            PluginError: it cannot be imported, is not of its kind, or cannot run on this machine.
        """
        cls = self._import()
        if reason := cls.unavailable():
            raise PluginError(f"{self.label} is unavailable here: {reason}")
        return cls

    @property
    def label(self) -> str:
        """How messages name it."""
        return f'{self.kind} "{self.name}" (of {self.source})'

    def _import(self) -> type[Component]:
        target = self.target
        if isinstance(target, str):
            module, _, attribute = target.partition(":")
            try:
                target = getattr(importlib.import_module(module), attribute)
            except Exception as error:
                raise PluginError(f"{self.label} is unavailable here: {_describe(error)}") from error
        contract = _contract(self.kind)
        if not (isinstance(target, type) and issubclass(target, contract)):
            raise PluginError(f"{self.label} is not a subclass of nanofw.{contract.__name__}: {target!r}")
        if missing := sorted(getattr(target, "__abstractmethods__", ())):
            raise PluginError(f"{self.label} does not implement {listing(missing)}")
        return target


@dataclass(slots=True)
class PluginStatus:
    """One line of `nanofw plugins`.

    Attributes:
        kind: of the component; "observer" or "plugin" for a plugin that brought none.
        name: of the component, or else of the plugin.
        distribution, version: what installed it.
        api: the contracts' version that it was written for.
        status: "ok", "unavailable" on this machine, "failed" to load, or "blocked".
        reason: why it is not ok.
        plugin: name of its entry point.
    """

    kind: str
    name: str
    distribution: str
    version: str
    api: str
    status: Status
    reason: str = ""
    plugin: str = ""


@dataclass(slots=True)
class _Loaded:
    source: Source
    api: str
    status: Status
    reason: str = ""
    components: list[Registration] = field(default_factory=list)


class PluginHost:
    """Loaded plugins and the components they registered. Two hosts share nothing.

    Args:
        strict: a plugin that fails to load raises instead of warning.
    """

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._components: dict[tuple[Kind, str], Registration] = {}
        self._loaded: list[_Loaded] = []

    @classmethod
    def load(
        cls,
        disable: Collection[str] = (),
        only: Collection[str] | None = None,
        strict: bool = False,
        entry_points: Iterable[metadata.EntryPoint] | None = None,
    ) -> PluginHost:
        """Load installed plugins, one at a time.

        Args:
            disable: entry points to block before they are imported, by name.
            only: if given, every other entry point is blocked.
            strict: a plugin that fails raises instead of warning.
            entry_points: what to load instead of the installed group `nanofw`.

        Raises:
            PluginError: two plugins claim one name; or, when strict, a plugin fails.
        """
        host = cls(strict)
        found = sorted(
            metadata.entry_points(group=PROJECT) if entry_points is None else entry_points,
            key=lambda e: (e.name, e.value),
        )
        names = [e.name for e in found]
        for name in [*disable, *(only or ())]:
            if name not in names:
                host._complain(f"no plugin named {name!r} is installed{suggest(name, names)}; found {listing(names)}")
        seen: dict[tuple[str, str], str] = {}
        for entry in found:
            source = _source(entry)
            # An editable install beside a built copy lists the same entry point twice.
            if seen.setdefault((entry.name, entry.value), source.distribution) != source.distribution or (
                any(item.source == source for item in host._loaded)
            ):
                continue
            if entry.name in disable or (only is not None and entry.name not in only):
                host._loaded.append(_Loaded(source, "", "blocked", "disabled by configuration"))
                continue
            host._guard(source, entry.load)
        return host

    def register(self, plugin: object, name: str | None = None) -> None:
        """Register a plugin object directly, without an entry point. Raises PluginError if it fails."""
        name = name or str(getattr(plugin, "__name__", type(plugin).__name__))
        strict, self.strict = self.strict, True
        try:
            self._guard(Source(name, "(registered directly)", ""), lambda: plugin)
        finally:
            self.strict = strict

    def get(self, kind: Kind, name: str) -> Registration:
        """The component of `kind` that is selected by `name`.

        Raises:
            PluginError: there is none; the message lists those there are, and why plugins failed that might have it.
        """
        if found := self._components.get((kind, name)):
            return found
        names = sorted(n for k, n in self._components if k == kind)
        failed = [f"plugin {p.source.plugin!r} {p.status}: {p.reason}" for p in self._loaded if p.status != "ok"]
        reason = f" ({'; '.join(failed)})" if failed else ""
        raise PluginError(f"no {kind} named {name!r}{suggest(name, names)}; available: {listing(names)}{reason}")

    def statuses(self) -> list[PluginStatus]:
        """Every component, and every plugin that brought none, with its status here."""
        lines = []
        for item in self._loaded:
            common = (item.source.distribution, item.source.version, item.api)
            if not item.components:
                kind = "observer" if item.status == "ok" else "plugin"
                lines.append(
                    PluginStatus(kind, item.source.plugin, *common, item.status, item.reason, item.source.plugin)
                )
            for component in item.components:
                status: Status = "ok"
                reason = ""
                try:
                    component.load()
                except PluginError as error:
                    status, reason = "unavailable", str(error).partition(": ")[2] or str(error)
                lines.append(PluginStatus(component.kind, component.name, *common, status, reason, item.source.plugin))
        order = {kind: i for i, kind in enumerate(KINDS)}
        return sorted(lines, key=lambda s: (order.get(s.kind, len(order)), s.name))  # type: ignore[call-overload]

    def observers(self, hook: str) -> Callable[..., Any] | None:
        """The hook's caller, or None if nobody implements it: an observer that is not there costs nothing."""
        caller: pluggy.HookCaller = getattr(self._manager.hook, hook)
        return caller if caller.get_hookimpls() else None

    def _guard(self, source: Source, load: Callable[[], object]) -> None:
        """Load and register one plugin; undo it all if anything fails."""
        plugin: object = None
        pending: list[Registration] = []
        api = ""
        try:
            plugin = load()
            api = _check_api(plugin)
            _check_hook_names(plugin)
            self._manager.register(plugin, name=f"{source.distribution}:{source.plugin}")
            self._manager.check_pending()
            for kind in KINDS:
                self._collect(plugin, kind, source, pending)
        except (Exception, SystemExit) as error:  # a module may end in sys.exit() when something is missing
            if plugin is not None and self._manager.is_registered(plugin):
                self._manager.unregister(plugin)
            self._loaded.append(_Loaded(source, api, "failed", _describe(error)))
            self._complain(f"plugin {source.plugin!r} of {source} was left out: {_describe(error)}", error)
            return
        for item in pending:
            if clash := self._components.get((item.kind, item.name)):
                self._manager.unregister(plugin)
                raise PluginError(
                    f"{item.kind} {item.name!r} is registered twice, by {clash.source} (plugin "
                    f"{clash.source.plugin!r}) and by {item.source} (plugin {item.source.plugin!r}); "
                    f"block one of them, e.g. --no-plugin {item.source.plugin}"
                )
        self._components |= {(item.kind, item.name): item for item in pending}
        self._loaded.append(_Loaded(source, api, "ok", components=pending))

    def _collect(self, plugin: object, kind: Kind, source: Source, into: list[Registration]) -> None:
        def register(name: str, target: type[Component] | str) -> None:
            if any((item.kind, item.name) == (kind, name) for item in into):
                raise PluginError(f"it registers {kind} {name!r} twice")
            item = Registration(kind, name, target, source)
            if not isinstance(target, str):
                item._import()
            into.append(item)

        others = [p for p in self._manager.get_plugins() if p is not plugin]
        self._manager.subset_hook_caller(f"nanofw_register_{kind}", others)(register=register)

    def _complain(self, message: str, cause: BaseException | None = None) -> None:
        if self.strict:
            raise PluginError(message) from cause
        warnings.warn(message, PluginWarning, stacklevel=4)


def kind_of(cls: type[Component]) -> Kind:
    """The kind of plugin that a class is, by the contract it derives from. Raises PluginError if it is none."""
    for kind in KINDS:
        if issubclass(cls, _contract(kind)):
            return kind
    contracts = listing([f"nanofw.{_contract(kind).__name__}" for kind in KINDS])
    raise PluginError(f"{cls.__name__} is no plugin: it must be a subclass of one of {contracts}")


def _contract(kind: Kind) -> type[Component]:
    """The class that components of `kind` derive from. Imported late: it needs torch."""
    name = {"kv_cache": "KVCache"}.get(kind, kind.capitalize())
    found: type[Component] = getattr(importlib.import_module(f"nanofw.{kind}"), name)
    return found


def _check_api(plugin: object) -> str:
    api = getattr(plugin, "nanofw_api", None)
    ours = f"{API[0]}.{API[1]}"
    if not (isinstance(api, tuple) and len(api) == 2 and all(isinstance(n, int) for n in api)):
        raise PluginError(f"it must declare the API it was written for, e.g. nanofw_api = {API} (got {api!r})")
    if api[0] != API[0] or api[1] > API[1]:
        raise PluginError(f"it was written for API {api[0]}.{api[1]}, and this nanofw offers {ours}")
    return f"{api[0]}.{api[1]}"


def _check_hook_names(plugin: object) -> None:
    """A function that looks like a hook but is not marked would be ignored without a word."""
    known = [name for name in vars(hookspecs) if name.startswith("nanofw_")]
    for name, value in inspect.getmembers(plugin, callable):
        if not name.startswith("nanofw_"):
            continue
        if name not in known:
            raise PluginError(f"unknown hook {name!r}{suggest(name, known)}; hooks are {listing(known)}")
        if not hasattr(value, f"{PROJECT}_impl"):
            raise PluginError(f"{name} is not marked as a hook: put @nanofw.hookimpl above it")


def _source(entry: metadata.EntryPoint) -> Source:
    dist = entry.dist
    if dist is None:
        return Source(entry.name, "(unknown distribution)", "")
    return Source(entry.name, str(dist.name), str(dist.version))


def _describe(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (
        text if isinstance(error, PluginError) else f"{type(error).__name__}: {text}" if text else type(error).__name__
    )
