"""The picture of the architecture is true: its modules exist, none is missing, and its arrows are the real imports."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT / "nanofw", *sorted(path for path in (ROOT / "plugins").glob("nanofw_*") if path.is_dir())]


@pytest.fixture(scope="module")
def architecture() -> ModuleType:
    """docs/architecture.py, which draws the picture."""
    spec = importlib.util.spec_from_file_location("architecture", ROOT / "docs" / "architecture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def modules() -> dict[str, Path]:
    """Every module that there is, and its file."""
    found = {}
    for package in PACKAGES:
        for file in package.rglob("*.py"):
            parts = file.relative_to(package.parent).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = file
    return found


def test_the_picture_is_what_would_be_drawn_now(architecture: ModuleType) -> None:
    drawn = architecture.svg(architecture.arrows(architecture.imports()))
    assert drawn == architecture.PICTURE.read_text(), "imports have changed: python docs/architecture.py"


def test_every_module_has_one_place(architecture: ModuleType) -> None:
    held = [module for box in architecture.BOXES.values() for module in box.modules]
    everywhere = {"nanofw", *(f"nanofw.{name}" for name in architecture.EVERYWHERE)}
    there_are = modules()
    assert len(held) == len(set(held))
    assert not {*held, *everywhere} - there_are.keys(), "the picture names modules that there are not"
    assert not [module for module in there_are if architecture.home(module) is None and module not in everywhere]


def test_an_arrow_is_an_import_that_can_be_read_in_a_file(architecture: ModuleType) -> None:
    """Read here from the text of the files: at least one line for each arrow."""
    lines = set()
    for module, file in modules().items():
        for node in ast.walk(ast.parse(file.read_text())):
            targets = []
            if isinstance(node, ast.ImportFrom) and node.module:
                targets = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            lines |= {(architecture.home(module), architecture.home(target)) for target in targets}
    for importer, imported in re.findall(r"<title>(.+?) imports (.+?)</title>", architecture.PICTURE.read_text()):
        inside = [name for name, box in architecture.BOXES.items() if box.inside == imported] or [imported]
        assert any((importer, name) in lines for name in inside), f"{importer} imports {imported}"


def test_what_is_drawn_nowhere_uses_nothing_that_is(architecture: ModuleType) -> None:
    """So no arrow can be hidden behind a module that is left out."""
    graph = architecture.grimp.build_graph("nanofw", exclude_type_checking_imports=True, cache_dir=None)
    for name in architecture.EVERYWHERE:
        used = graph.find_modules_directly_imported_by(f"nanofw.{name}")
        assert not [module for module in used if architecture.home(module)], f"nanofw.{name}"
