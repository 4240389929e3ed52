"""Options of a plugin: typed by its dataclass, whatever form a user gave them in."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from nanofw.component import NoOptions
from nanofw.errors import ConfigError
from nanofw.options import build_options, suggest


@dataclass(frozen=True)
class Options:
    size: int = 16
    rate: float = 0.5
    fast: bool = False
    name: str = "x"
    mode: Literal["full", "lean", 3] = "full"
    buckets: tuple[int, ...] = (1, 2)
    limit: int | None = None
    either: int | str = "all"
    tables: dict = field(default_factory=dict)

    def __post_init__(self):
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")


def build(**values):
    return build_options(Options, values, 'kind "mine"')


@pytest.mark.parametrize(
    ("key", "given", "expected"),
    [
        ("size", 8, 8),
        ("size", "8", 8),
        ("size", 8.0, 8),
        ("rate", 1, 1.0),
        ("rate", "0.25", 0.25),
        ("fast", True, True),
        ("fast", "true", True),
        ("fast", "ON", True),
        ("fast", "0", False),
        ("name", "8", "8"),
        ("mode", "lean", "lean"),
        ("mode", "3", 3),
        ("buckets", [4, 8], (4, 8)),
        ("buckets", "4, 8", (4, 8)),
        ("buckets", "4", (4,)),
        ("limit", "none", None),
        ("limit", "5", 5),
        ("limit", None, None),
        ("either", "7", 7),
        ("either", "some", "some"),
        ("tables", {"a": 1}, {"a": 1}),
    ],
)
def test_forms(key, given, expected):
    found = getattr(build(**{key: given}), key)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("key", "given", "message"),
    [
        ("sise", 8, r"has no option 'sise' \(did you mean 'size'\?\); it takes size, rate, fast, name, mode,"),
        ("qqq", 8, "has no option 'qqq'; it takes size"),
        ("size", "many", "option 'size' must be an integer, got 'many'"),
        ("size", 1.5, "option 'size' must be an integer, got 1.5"),
        ("size", "1.5", "option 'size' must be an integer, got '1.5'"),
        ("size", True, "option 'size' must be an integer, got True"),
        ("size", None, "option 'size' must be an integer, got None"),
        ("rate", "fast", "option 'rate' must be a number, got 'fast'"),
        ("fast", 1, "option 'fast' must be true or false, got 1"),
        ("fast", "maybe", "option 'fast' must be true or false, got 'maybe'"),
        ("name", 8, "option 'name' must be a text, got 8"),
        ("mode", "slow", "option 'mode' must be one of 'full', 'lean', 3, got 'slow'"),
        ("buckets", "4,x", "option 'buckets' must be an integer, got 'x'"),
        ("buckets", 4, "option 'buckets' must be a list, each item an integer, got 4"),
        ("limit", "x", "option 'limit' must be an integer or none, got 'x'"),
        ("tables", "x", "option 'tables' must be dict, got 'x'"),
        ("size", 0, "size must be at least 1, got 0"),
    ],
)
def test_wrong(key, given, message):
    with pytest.raises(ConfigError, match=rf'^kind "mine"(:| ).*{message}'):
        build(**{key: given})


def test_nothing_set_is_the_defaults():
    assert build() == Options()
    assert build_options(NoOptions, {}, "x") == NoOptions()


def test_a_plugin_without_options():
    with pytest.raises(ConfigError, match="runner \"eager\" has no option 'x'; it takes nothing"):
        build_options(NoOptions, {"x": 1}, 'runner "eager"')


def test_a_required_option():
    @dataclass
    class Needs:
        path: str

    with pytest.raises(ConfigError, match=r'kind "mine": .*path'):
        build_options(Needs, {}, 'kind "mine"')


def test_suggestions():
    assert suggest("paged", ["page", "slab"]) == " (did you mean 'page'?)"
    assert suggest("zzz", ["page", "slab"]) == ""
