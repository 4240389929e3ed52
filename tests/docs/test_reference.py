"""The reference is complete and true: what users and plugin authors can name is in it, as it is in the code."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import nanofw
import nanofw.testing
from nanofw import Config, NanofwError, errors, hookspecs
from nanofw.testing.session import SUITES

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = DOCS / "reference"
HOOKS = [name for name in vars(hookspecs) if name.startswith("nanofw_")]
ERRORS = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, NanofwError)]
DIRECTIVE = re.compile(r"^\.\. (?P<name>\w+):: (?P<argument>.+)\n(?P<options>(?: {3}:.*\n)*)", re.MULTILINE)
SOURCE = re.compile(r"\bSources?:\s+\S.*\.$", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Directive:
    """What a page renders from a docstring: `autoclass`, the object's full name, and its options."""

    page: str
    name: str
    argument: str
    options: tuple[str, ...]


@cache
def directives() -> tuple[Directive, ...]:
    """Those of all pages of the reference."""
    return tuple(
        Directive(page.name, found["name"], found["argument"], tuple(found["options"].split("\n")))
        for page in sorted(REFERENCE.glob("*.md"))
        for found in DIRECTIVE.finditer(page.read_text())
    )


def rendered(page: str | None = None) -> set[str]:
    """Names of the objects that a page renders by autodoc, or that all do."""
    return {d.argument for d in directives() if d.name.startswith("auto") and page in (None, d.page)}


def find(dotted: str) -> Any:
    """The object of a dotted name."""
    parts = dotted.removesuffix("()").split(".")
    for end in range(len(parts), 0, -1):
        if importlib.util.find_spec(parts[0]) and (module := try_import(".".join(parts[:end]))) is not None:
            found: Any = module
            for part in parts[end:]:
                found = getattr(found, part)
            return found
    raise ModuleNotFoundError(dotted)


def try_import(name: str) -> ModuleType | None:
    """A module, or None if there is none of this name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def checks() -> Iterator[tuple[str, str]]:
    """Every check of every suite."""
    for suite in nanofw.testing.__all__:
        yield from ((suite, name) for name in dir(getattr(nanofw.testing, suite)) if name.startswith("test_"))


def sections(doc: str) -> dict[str, str]:
    """A Google-style docstring by its sections; what comes before the first is called ""."""
    parts = re.split(r"^([A-Z][\w ]*):\n(?= )", doc, flags=re.MULTILINE)
    return dict(zip(["", *parts[1::2]], [parts[0], *parts[2::2]], strict=True))


def described(section: str) -> set[str]:
    """Names that a section describes, those that share a line too."""
    return {
        name
        for line in re.findall(r"^ {4}(\w[\w, ]*): \S", section, flags=re.MULTILINE)
        for name in line.replace(" ", "").split(",")
    }


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_is_described_in_full(hook: str) -> None:
    """What it is for, each argument, errors and an example; and its page renders it with the signature of the code."""
    spec = getattr(hookspecs, hook)
    parts = sections(inspect.getdoc(spec))
    assert set(parts) == {"", "Args", "Raises", "Example"}
    assert "Called once" in parts[""], "it says when it is called"
    assert described(parts["Args"]) == {*inspect.signature(spec).parameters}
    assert described(parts["Raises"])
    assert "::\n\n" in parts["Example"]
    assert f"nanofw.hookspecs.{hook}" in rendered("hooks.md"), "no directive, or one with a signature of its own"


def test_hooks_have_the_order_of_the_code() -> None:
    shown = [d.argument for d in directives() if d.page == "hooks.md" and d.name == "autofunction"]
    assert shown == [f"nanofw.hookspecs.{hook}" for hook in HOOKS]


@pytest.mark.parametrize("name", nanofw.__all__)
def test_a_name_of_nanofw_is_there(name: str) -> None:
    text = (REFERENCE / "python.md").read_text()
    assert f"nanofw.{name}" in rendered() or f"`nanofw.{name}`" in text


@pytest.mark.parametrize("suite", nanofw.testing.__all__)
def test_a_suite_is_there(suite: str) -> None:
    """With all its checks, and under the heading that how-tos link to."""
    assert f"nanofw.testing.{suite}" in rendered("suites.md")
    assert ("suites.md", "checks", suite) in {(d.page, d.name, d.argument) for d in directives()}


def test_suites_have_the_headings_that_others_link_to() -> None:
    headings = re.findall(r"^## (.+)$", (REFERENCE / "suites.md").read_text(), flags=re.MULTILINE)
    assert headings[-6:] == ["Attentions", "KV caches", "Schedulers", "Runners", "Models", "Samplers"]
    assert sorted(SUITES.values()) == sorted(nanofw.testing.__all__)


@pytest.mark.parametrize(("suite", "check"), list(checks()))
def test_a_check_says_what_failing_means(suite: str, check: str) -> None:
    """What it is for in its first paragraph, what failing it means in the rest, and its source at the end."""
    purpose, _, rest = inspect.getdoc(getattr(getattr(nanofw.testing, suite), check)).partition("\n\n")
    assert len(purpose.split()) >= 4
    assert "Fails " in rest.replace("\n", " ")
    assert SOURCE.search(rest), "no source"


def test_a_suite_renders_each_check_once() -> None:
    """The directive goes by the classes of a suite: none of its checks is inherited from elsewhere, or overridden."""
    for suite in nanofw.testing.__all__:
        shown = [n for g in getattr(nanofw.testing, suite).__mro__ for n in vars(g) if n.startswith("test_")]
        assert sorted(shown) == sorted(name for of, name in checks() if of == suite)


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_there(name: str) -> None:
    assert {f"nanofw.errors.{name}", f"nanofw.{name}"} & rendered("python.md")
    assert len(inspect.getdoc(getattr(errors, name)).split()) >= 5


def test_every_setting_is_described() -> None:
    assert "nanofw.Config" in rendered("python.md")
    fields = {field.name for field in dataclasses.fields(Config)}
    assert described(sections(inspect.getdoc(Config))["Attributes"]) == fields


RENDERED = sorted(name for name in rendered() if not name.startswith("nanofw.hookspecs.nanofw_"))


@pytest.mark.parametrize("name", RENDERED)
def test_what_is_rendered_is_described(name: str) -> None:
    """Every field of a dataclass, every argument that has a description at all, and no first line that is misread."""
    found = find(name)
    if dataclasses.is_dataclass(found):
        parts = sections(inspect.getdoc(found))
        fields = {field.name for field in dataclasses.fields(found) if not field.name.startswith("_")}
        assert not fields - described(parts.get("Attributes", "")) - {*re.findall(r"\w+", parts[""])}
    public = [found] if not isinstance(found, type) else [found, *members(found)]
    for each in public:
        if isinstance(each, property):
            assert not misread(inspect.getdoc(each)), f"a colon in the first line of {each.fget.__qualname__}"
        elif inspect.isfunction(each) or inspect.ismethod(each):
            parts = sections(inspect.getdoc(each) or "")
            assert not misread(parts.get("Returns", "")), f"{each.__qualname__}: a colon in what it returns"
            arguments = parts.get("Args")
            names = {*inspect.signature(each).parameters} - {"self", "cls"}
            assert arguments is None or described(arguments) == names, f"{each.__qualname__} describes other arguments"


def misread(text: str) -> bool:
    """Whether Sphinx takes the beginning of a text, up to a colon in its first line, for a type."""
    return ": " in re.sub(r"`[^`]*`", "", text.lstrip("\n").partition("\n")[0])


def members(cls: type) -> list[Any]:
    """Its own public methods and properties."""
    own = {name: getattr(value, "__func__", value) for name, value in vars(cls).items() if not name.startswith("_")}
    return [value for value in own.values() if isinstance(value, property) or inspect.isfunction(value)]


def generator() -> Any:
    """`docs/command_line.py`."""
    spec = importlib.util.spec_from_file_location("command_line", DOCS / "command_line.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_the_command_line_is_current() -> None:
    page = (REFERENCE / "command-line.md").read_text()
    assert page == generator().page() + "\n", "write it anew: python docs/command_line.py"


def test_the_page_of_the_command_line_has_every_command_and_option() -> None:
    import typer

    from nanofw.cli import app

    page = (REFERENCE / "command-line.md").read_text()
    found = list(generator().commands(typer.main.get_command(app), "nanofw"))
    assert len(found) >= 11
    for name, command in found:
        assert f"\n## {name}\n" in page
        for parameter in command.params:
            shown = (
                parameter.opts[0]
                if parameter.param_type_name == "option"
                else parameter.metavar or parameter.name.upper()
            )
            assert f"`{shown}" in page, f"{name} {shown}"
    assert "&#" not in page
