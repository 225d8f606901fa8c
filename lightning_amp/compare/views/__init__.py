"""Present a judged comparison as Markdown and as a page with charts; these files decide nothing.

Read `_words.py` first.
"""

from lightning_amp.compare.views._page import page
from lightning_amp.compare.views._words import blocks, markdown

__all__ = ["blocks", "markdown", "page"]
