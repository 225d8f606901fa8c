"""Sphinx's settings of the documentation: `make docs` builds it into docs/_build/html, with warnings as errors."""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS / "_ext")]

import lightning_amp  # noqa: E402

project = "lightning_amp"
author = "The lightning_amp authors"
copyright = author
version = release = lightning_amp.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "command_help",
    "events_of_a_step",
    "links",
]
exclude_patterns = ["_build", "_ext"]
nitpicky = True
nitpick_ignore_regex = [
    # Classes of other projects stand in signatures; building must not need the network that would link them.
    ("py:.*", r"(torch|lightning|torchmetrics|torchao|matplotlib|pathlib|os|collections|np|numpy)\..*"),
    # Types of the signatures that are written as they stand in the source.
    ("py:class", r"(?!lightning_amp\.[A-Z]).*"),
    ("py:obj", r"typing\..*"),
]

# -- pages ------------------------------------------------------------------------------------------------------------

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # the anchors that repositories' own viewers give to headings
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True

# -- the reference, from docstrings -----------------------------------------------------------------------------------

default_role = "code"  # single backticks in docstrings are code
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autosummary_generate = False
maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Cost", "notes_style")]

# -- what it looks like -----------------------------------------------------------------------------------------------

html_theme = "furo"
html_title = "lightning_amp"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
html_theme_options = {"navigation_with_keys": True}
linkcheck_anchors = False
