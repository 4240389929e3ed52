"""The plugin host: broken plugins are kept apart and named, and nothing is swallowed (fault case A12)."""

import inspect
import sys
import textwrap
import warnings

import pluggy
import pytest

import nanofw
from nanofw import PluginHost, hookspecs
from nanofw.component import KINDS, Component
from nanofw.config import Config
from nanofw.errors import PluginError
from nanofw.plugins import PluginWarning, kind_of

GOOD = """
    import nanofw
    from nanofw import Attention

    nanofw_api = (1, 0)

    class Mine(Attention):
        def attend(self, q, kv, batch):
            return q

    @nanofw.hookimpl
    def nanofw_register_attention(register):
        register("{name}", Mine)
"""

HALF_WAY = """
    import nanofw
    from nanofw import Attention

    nanofw_api = (1, 0)

    class Mine(Attention):
        def attend(self, q, kv, batch):
            return q

    @nanofw.hookimpl
    def nanofw_register_attention(register):
        register("{name}", Mine)

    @nanofw.hookimpl
    def nanofw_register_scheduler(register):
        raise OSError("no scheduler today")

    @nanofw.hookimpl
    def nanofw_step_finished(event):
        raise AssertionError("a plugin that failed must not observe")
"""


UNAVAILABLE = """@classmethod
        def unavailable(cls):
            return "no GPU"

        """


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a module as a distribution with an entry point; it is gone after the test."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def install(entry, code, distribution=None, version="1.2"):
        module = f"fake_{entry.replace('-', '_')}"
        distribution = distribution or f"dist-{entry}"
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(code).format(name=entry))
        info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[nanofw]\n{entry} = {module}\n")
        return module

    yield install
    for name in set(sys.modules) - before:
        if name.startswith("fake_"):
            del sys.modules[name]


def load(**how):
    return PluginHost.load(disable=how.pop("disable", ()), **how)


def only(*names):
    return {"only": ("basics", "gather", *names)}


def status(host, plugin):
    (line,) = [s for s in host.statuses() if s.plugin == plugin]
    return line


def test_a_good_plugin(install):
    install("good", GOOD)
    host = load(**only("good"))
    found = host.get("attention", "good")
    assert found.load().__name__ == "Mine"
    assert (found.source.distribution, found.source.version) == ("dist-good", "1.2")
    line = status(host, "good")
    assert (line.kind, line.name, line.status, line.api) == ("attention", "good", "ok", "1.0")


def test_good_broken_and_half_way(install):
    """simonw/llm#1280: the host starts, the good one works, each bad one is named and undone."""
    install("good", GOOD)
    install("broken", "raise ImportError('libfoo.so is missing')")
    install("half-way", HALF_WAY)
    with pytest.warns(PluginWarning) as caught:
        host = load(**only("good", "broken", "half-way"))
    texts = sorted(str(w.message) for w in caught)
    assert texts == [
        "plugin 'broken' of dist-broken 1.2 was left out: ImportError: libfoo.so is missing",
        "plugin 'half-way' of dist-half-way 1.2 was left out: OSError: no scheduler today",
    ]
    assert host.get("attention", "good").load()
    assert host.get("scheduler", "continuous").load()
    for plugin, reason in (("broken", "libfoo.so is missing"), ("half-way", "no scheduler today")):
        line = status(host, plugin)
        assert line.status == "failed"
        assert reason in line.reason
    assert host.observers("nanofw_step_finished") is None
    with pytest.raises(PluginError, match="no attention named 'half-way'"):
        host.get("attention", "half-way")


def test_a_plugin_that_exits(install):
    install("exits", "import sys; sys.exit('needs a GPU')")
    with pytest.warns(PluginWarning, match="SystemExit: needs a GPU"):
        host = load(**only("exits"))
    assert status(host, "exits").status == "failed"


@pytest.mark.parametrize("code", ["raise ImportError('libfoo.so is missing')", HALF_WAY], ids=["import", "half-way"])
def test_strict(install, code):
    install("bad", code)
    with pytest.raises(PluginError, match=r"plugin 'bad' of dist-bad 1.2 was left out: .*(missing|today)"):
        load(**only("bad"), strict=True)


def test_naming_a_failed_plugin_is_an_error_with_the_reason(install, llm):
    """alteryx/featuretools#841: a failure that is swallowed is as bad."""
    install("half-way", HALF_WAY)
    with pytest.warns(PluginWarning):
        host = load(**only("half-way"))
    with pytest.raises(PluginError, match=r"no attention named 'half-way'.*plugin 'half-way' failed: OSError: no sch"):
        llm(host=host, attention="half-way")


@pytest.mark.parametrize("how", [{"disable": ("broken",)}, only()], ids=["disable", "only"])
def test_blocked_before_import(install, how):
    """What takes a plugin out must work even if importing it would end the program."""
    module = install("broken", "import os; os._exit(3)")
    if "only" not in how:
        how = how | {"disable": (*how["disable"], *other_plugins("broken"))}
    host = load(**how)
    assert module not in sys.modules
    assert (status(host, "broken").status, status(host, "broken").reason) == ("blocked", "disabled by configuration")


def other_plugins(*mine):
    """Installed entry points but ours and `mine`: tests do not depend on what else is installed."""
    from importlib import metadata

    return [e.name for e in metadata.entry_points(group="nanofw") if e.name not in ("basics", "gather", *mine)]


def test_environment_blocks_plugins(install, monkeypatch):
    module = install("broken", "import os; os._exit(3)")
    config = Config.resolve({}, environ={"NANOFW_PLUGINS": "basics,gather"}, directory="/nonexistent")
    PluginHost.load(config.disable, config.plugins, config.strict)
    assert module not in sys.modules


def test_a_blocked_name_that_is_not_installed_is_said(install):
    install("good", GOOD)
    with pytest.warns(PluginWarning, match=r"no plugin named 'godo' is installed \(did you mean 'good'\?\)"):
        load(only=("basics", "gather", "godo"))


def test_one_name_twice_names_both_distributions(install):
    same = GOOD.replace("{name}", "mine")
    install("first", same)
    install("second", same)
    with pytest.raises(PluginError) as caught:
        load(**only("first", "second"))
    for part in ("attention 'mine' is registered twice", "dist-first 1.2", "dist-second 1.2", "--no-plugin second"):
        assert part in str(caught.value)


def test_an_entry_point_listed_twice_loads_once(install):
    """An editable install beside a built copy."""
    install("good", GOOD)
    from importlib import metadata

    entry = next(e for e in metadata.entry_points(group="nanofw") if e.name == "good")
    host = PluginHost.load(entry_points=[entry, entry])
    assert len([s for s in host.statuses() if s.plugin == "good"]) == 1


BAD_FORMS = {
    "misspelt": (
        "import nanofw\nnanofw_api = (1, 0)\n@nanofw.hookimpl\ndef nanofw_register_atention(register): pass",
        r"unknown hook 'nanofw_register_atention' \(did you mean 'nanofw_register_attention'\?\)",
    ),
    "misspelt-unmarked": (
        "nanofw_api = (1, 0)\ndef nanofw_register_atention(register): pass",
        "unknown hook 'nanofw_register_atention'",
    ),
    "unmarked": (
        "nanofw_api = (1, 0)\ndef nanofw_register_attention(register): pass",
        "nanofw_register_attention is not marked as a hook: put @nanofw.hookimpl above it",
    ),
    "wrong-argument": (
        "import nanofw\nnanofw_api = (1, 0)\n@nanofw.hookimpl\ndef nanofw_register_attention(registry): pass",
        "registry",
    ),
    "no-api": ("", r"it must declare the API it was written for, e.g. nanofw_api = \(1, 0\) \(got None\)"),
    "odd-api": ("nanofw_api = '1.0'", "got '1.0'"),
    "newer-major": ("nanofw_api = (2, 0)", "written for API 2.0, and this nanofw offers 1.0"),
    "newer-minor": ("nanofw_api = (1, 1)", "written for API 1.1, and this nanofw offers 1.0"),
    "not-a-class": (GOOD.replace("Mine)", "print)"), "is not a subclass of nanofw.Attention"),
    "wrong-kind": (GOOD.replace("_attention", "_scheduler"), "is not a subclass of nanofw.Scheduler"),
    "abstract": (GOOD.replace("def attend", "def atend"), "does not implement attend"),
    "twice": (GOOD + '        register("{name}", Mine)\n', "registers attention 'twice' twice"),
}


@pytest.mark.parametrize("form", BAD_FORMS)
def test_bad_forms(install, form):
    code, reason = BAD_FORMS[form]
    install(form, code)
    with pytest.warns(PluginWarning, match=reason):
        host = load(**only(form))
    assert status(host, form).status == "failed"
    assert host.get("attention", "naive-gather")


def test_a_component_that_cannot_be_imported_is_unavailable(install):
    """Registered by name, imported when used: the plugin's other components go on."""
    install("lazy", GOOD + '        register("needs-foo", "fake_foo_missing:Foo")\n')
    host = load(**only("lazy"))
    lines = {s.name: s for s in host.statuses() if s.plugin == "lazy"}
    assert (lines["lazy"].status, lines["needs-foo"].status) == ("ok", "unavailable")
    assert "No module named 'fake_foo_missing'" in lines["needs-foo"].reason
    with pytest.raises(PluginError, match=r'attention "needs-foo" \(of dist-lazy 1.2\) is unavailable here: ModuleNot'):
        host.get("attention", "needs-foo").load()


def test_a_component_says_why_this_machine_cannot_run_it(install):
    install(
        "gpu",
        GOOD.replace("def attend", UNAVAILABLE + "def attend"),
    )
    host = load(**only("gpu"))
    assert (status(host, "gpu").status, status(host, "gpu").reason) == ("unavailable", "no GPU")
    with pytest.raises(PluginError, match="is unavailable here: no GPU"):
        host.get("attention", "gpu").load()


def plugin(**hooks):
    """A plugin object from functions, each made a hook."""
    marked = {name: staticmethod(nanofw.hookimpl(hook)) for name, hook in hooks.items()}
    return type("Plugin", (), {"nanofw_api": (1, 0), **marked})


def test_registered_directly():
    host = load(**only())
    seen = []

    def observe(event):
        seen.append(event)

    host.register(plugin(nanofw_step_finished=observe), "mine")
    host.observers("nanofw_step_finished")(event="x")
    assert seen == ["x"]
    assert status(host, "mine").kind == "observer"
    with pytest.raises(PluginError, match="must declare the API"):
        host.register(type("Plugin", (), {}))


def test_a_clash_leaves_nothing_behind():
    """A plugin that brings a new name and a taken one brings neither, and does not observe."""
    from nanofw_gather.naive import NaiveGather

    def register_both(register):
        register("new-name", NaiveGather)
        register("naive-gather", NaiveGather)

    host = load(**only())
    with pytest.raises(PluginError, match="registered twice"):
        host.register(plugin(nanofw_register_attention=register_both, nanofw_step_finished=lambda event: None))
    with pytest.raises(PluginError, match="no attention named 'new-name'"):
        host.get("attention", "new-name")
    assert host.observers("nanofw_step_finished") is None


def test_two_hosts_share_nothing():
    one, other = load(**only()), load(**only())
    one.register(plugin(nanofw_step_finished=lambda event: None))
    assert one.observers("nanofw_step_finished") is not None
    assert other.observers("nanofw_step_finished") is None


def test_every_hook_is_described_and_returns_nothing():
    """pluggy#68, #69, #71: first-result hooks with all-None or wrapped results surprise; there are none here."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    names = [n for n in vars(hookspecs) if n.startswith("nanofw_")]
    assert len(names) == 9
    for name in names:
        spec = getattr(hookspecs, name)
        assert not getattr(manager.hook, name).spec.opts["firstresult"]
        assert spec.__doc__
        assert inspect.signature(spec).return_annotation == "None"


def test_wrapped_hooks_work():
    """pluggy#71: a wrapper around a registration or an observer neither hides nor doubles it."""
    from nanofw_gather.naive import NaiveGather

    seen = []

    def observe(event):
        seen.append(event)

    @nanofw.hookimpl(wrapper=True)
    def around(event):
        seen.append("before")
        result = yield
        seen.append("after")
        return result

    @nanofw.hookimpl(wrapper=True)
    def wrapped(register):
        register("wrapped", NaiveGather)
        return (yield)

    host = load(**only())
    parts = {"nanofw_step_finished": staticmethod(around), "nanofw_register_attention": staticmethod(wrapped)}
    host.register(type("Plugin", (), {"nanofw_api": (1, 0), **parts}), "wrapper")
    host.register(plugin(nanofw_step_finished=observe), "inner")
    assert host.get("attention", "wrapped").load() is NaiveGather
    host.observers("nanofw_step_finished")(event="x")
    assert seen == ["before", "x", "after"]


def test_loading_says_nothing_when_all_is_well():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(**only())


def test_the_kind_of_a_class():
    class Nothing(Component):
        pass

    for kind, contract in zip(
        KINDS,
        (nanofw.Model, nanofw.Attention, nanofw.KVCache, nanofw.Scheduler, nanofw.Runner, nanofw.Sampler),
        strict=True,
    ):
        assert kind_of(type("Mine", (contract,), {})) == kind
    with pytest.raises(PluginError, match=r"Nothing is no plugin.*nanofw\.KVCache"):
        kind_of(Nothing)
