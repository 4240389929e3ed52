"""Every hook works. That each is documented, and its example runs: `tests/docs`."""

import inspect

import pytest

import nanofw
from nanofw import PluginHost, hookspecs
from nanofw.component import KINDS
from nanofw.testing.audited import audited_engine

HOOKS = [name for name in vars(hookspecs) if name.startswith("nanofw_")]
REGISTRATIONS = [name for name in HOOKS if name.startswith("nanofw_register_")]
OBSERVATIONS = [name for name in HOOKS if name not in REGISTRATIONS]


def plugin(hook, function):
    """A plugin object whose one hook is `function`."""
    return type("Plugin", (), {"nanofw_api": nanofw.API, hook: staticmethod(nanofw.hookimpl(function))})


def plain_host():
    return PluginHost.load(only=("basics", "gather"))


def test_the_hooks():
    """One registration a kind, and three events. A new hook gets tests below because it is in this list."""
    assert [name.removeprefix("nanofw_register_") for name in REGISTRATIONS] == list(KINDS)
    assert [*OBSERVATIONS] == ["nanofw_engine_created", "nanofw_step_finished", "nanofw_request_finished"]


@pytest.mark.parametrize("hook", REGISTRATIONS)
def test_registration(hook):
    """What is registered under a name is what that name selects, for this kind and no other."""
    kind = hook.removeprefix("nanofw_register_")
    host = plain_host()
    default = {"model": "transformers"}.get(kind) or getattr(nanofw.Config(), kind)
    mine = type("Mine", (host.get(kind, default).load(),), {})
    host.register(plugin(hook, lambda register: register("mine", mine)), "mine")
    assert host.get(kind, "mine").load() is mine
    for other in set(KINDS) - {kind}:
        with pytest.raises(nanofw.NanofwError, match=f"no {other} named 'mine'"):
            host.get(other, "mine")


@pytest.mark.parametrize("hook", OBSERVATIONS)
def test_observation(hook):
    """The hook is called with the event that its signature names, and with nothing where it asks for nothing."""
    seen, calls = [], []
    host = plain_host()

    def observe(event):
        seen.append(event)

    host.register(plugin(hook, observe), "observer")
    host.register(plugin(hook, lambda: calls.append(1)), "counter")
    engine = audited_engine(host)
    engine.add("x", [1, 2], nanofw.SamplingParams(max_tokens=1))
    list(engine.run())
    annotation = inspect.signature(getattr(hookspecs, hook)).parameters["event"].annotation
    assert [type(event).__name__ for event in seen] == [annotation]
    assert len(calls) == 1
