"""How the documentation is built: `tox -e docs`, or `sphinx-build -W docs docs/_build`. It needs no network."""

import nanofw

project = "nanofw"
author = "the nanofw developers"
copyright = "the nanofw developers, Apache-2.0"
release = nanofw.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
nitpicky = False
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
