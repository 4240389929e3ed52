"""How the documentation is built: `tox -e docs`, or `sphinx-build -W docs docs/_build`. It needs no network."""

import inspect
from typing import Any

from docutils.nodes import Element, Node
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import nanofw
import nanofw.testing

project = "nanofw"
author = "the nanofw developers"
copyright = "the nanofw developers, Apache-2.0"
release = nanofw.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
nitpicky = False
smartquotes_action = "D"  # dashes; "auto" stays what one types
default_role = "code"  # docstrings are written to be read in the source: `name` is code

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 90
napoleon_use_rtype = False
napoleon_custom_sections = [
    ("Attributes", "params_style"),  # several that belong together share a line
    ("Class attributes a plugin declares", "params_style"),
    ("Class attributes a subclass sets", "params_style"),
    ("Attributes a subclass sets", "params_style"),
    ("Attributes a subclass may set", "params_style"),
]

html_theme = "furo"
html_title = "nanofw"
html_static_path: list[str] = []
html_show_sphinx = False
html_copy_source = False


class Checks(SphinxDirective):
    """`.. checks:: AttentionSuite`: what its checks say of themselves, group by group, in the order of the source."""

    required_arguments = 1

    def run(self) -> list[Node]:
        """Each group's first line as a rubric, and a definition list of its checks."""
        lines: list[str] = []
        for group in getattr(nanofw.testing, self.arguments[0]).__mro__:
            checks = {name: check for name, check in vars(group).items() if name.startswith("test_")}
            if checks:
                lines += [f".. rubric:: {first_line(group)}", ""]
            for name, check in checks.items():
                lines += [f"`{name}`", *(f"   {line}" for line in inspect.getdoc(check).splitlines()), ""]
        parent = Element()
        self.state.nested_parse(StringList(lines, self.get_location()), 0, parent)
        return parent.children


def first_line(documented: Any) -> str:
    """Of a docstring, without its full stop."""
    return inspect.getdoc(documented).partition("\n")[0].rstrip(".")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.add_directive("checks", Checks)
