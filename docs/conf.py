"""Sphinx's settings of the documentation: `make docs` builds it into docs/_build/html, with warnings as errors."""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS / "_ext")]

import lightning_amp  # noqa: E402

REPOSITORY = re.search(r'^repository = "(.*)"$', (DOCS.parent / "pyproject.toml").read_text("utf-8"), re.MULTILINE)[1]
"""The address of the public repository; empty while pyproject.toml has none."""

DESCRIPTION = "Mixed precision for PyTorch Lightning that changes rounding, speed and memory, and nothing else."

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
    "links",
    "tables",
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
html_favicon = "_static/favicon.svg"
html_theme_options = {"navigation_with_keys": True}
if REPOSITORY:  # "view source" at the top of each page
    html_theme_options |= {"source_repository": REPOSITORY, "source_branch": "main", "source_directory": "docs/"}
linkcheck_anchors = False


def describe(app: Any, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Give each page a description, which search engines and chats show: its first paragraph."""
    paragraph = next(doctree.findall(nodes.paragraph), None) if doctree is not None else None
    words = DESCRIPTION if paragraph is None else " ".join(paragraph.astext().split())
    context["metatags"] = context.get("metatags", "") + f'<meta name="description" content="{escape(words[:300])}">'


def keep_out_of_the_navigation(app: Any, docname: str, source: list[str]) -> None:
    """Leave the headline page out of the navigation, without a warning, until it has a measured row."""
    if docname == "results/headline" and "**Not yet measured**" in source[0]:
        source[0] = f"---\norphan: true\n---\n\n{source[0]}"


def setup(app: Any) -> None:
    """Connect the functions above."""
    app.connect("html-page-context", describe)
    app.connect("source-read", keep_out_of_the_navigation)
