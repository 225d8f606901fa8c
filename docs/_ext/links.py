"""Links that repository viewers and the site need differently, and links nobody wants to write by hand.

- A link to a file of `examples/` leads to its page in the gallery.
- A link to another file of the repository, which the site does not have, becomes its name.
- A public name in code marks leads to its place in the reference.
- A type in the reference has the name that users import, and not the private file of its class.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import desc, pending_xref
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform

import lightning_amp
from lightning_amp import precision

DOCS = Path(__file__).parents[1]
EXAMPLE = re.compile(r"\[(?P<text>[^]]*)\]\((?:\.\./)*examples/(?P<name>\w+)\.py\)")
OUTSIDE = re.compile(r"\[(?P<text>[^]]*)\]\((?:\.\./)+(?!docs/)(?P<path>[\w./-]+)\)")
PUBLIC = {name: f"lightning_amp.{name}" for name in lightning_amp.__all__ if name[0] != "_"} | {
    name: f"lightning_amp.precision.{name}" for name in precision.__all__ if name[0].islower()
}
PRIVATE = re.compile(r"\blightning_amp(?:\.\w+)*\._\w+\.(\w+)")
CODE = re.compile(r"(?:lightning_amp\.(?:precision\.)?)?(\w+)(?:\((?:\.\.\.)?\))?")


def lead_to_pages(app: Sphinx, docname: str, source: list[str]) -> None:
    """Rewrite links into the repository before a page is parsed."""
    up = "../" * docname.count("/")

    def leaves_the_site(match: re.Match[str]) -> str:
        here = (DOCS / docname).parent / match[0].rsplit("(", 1)[1].rstrip(")")
        return match[0] if DOCS in here.resolve().parents else match["text"]

    text = EXAMPLE.sub(rf"[\g<text>]({up}gallery/\g<name>.md)", source[0])
    source[0] = OUTSIDE.sub(leaves_the_site, text)


class PublicNames(SphinxTransform):
    """Turns code that is a public name into a reference, outside of headings, links and signatures."""

    default_priority = 300

    def apply(self, **kwargs: Any) -> None:
        """Replace the literals of this page."""
        for literal in list(self.document.findall(nodes.literal)):
            found = CODE.fullmatch(literal.astext())
            if found is None or found[1] not in PUBLIC or _is_inside_of_a_link(literal):
                continue
            target = PUBLIC[found[1]]
            reference = pending_xref(
                "", refdomain="py", reftype="obj", reftarget=target, refdoc=self.env.docname, refexplicit=True
            )
            literal.replace_self(reference)
            reference += literal


def _is_inside_of_a_link(node: nodes.Node) -> bool:
    while node.parent is not None:
        node = node.parent
        if isinstance(node, nodes.reference | nodes.title | nodes.term | pending_xref):
            return True
    return False


class PublicTypes(SphinxPostTransform):
    """Shows public names of types, after Sphinx has found their places by the private ones."""

    default_priority = 15  # after the resolution of references, which is 10

    def run(self, **kwargs: Any) -> None:
        """Change the entries of this page."""
        show_public_names(self.document)


def show_public_names(document: nodes.Element) -> None:
    """Replace private names in the entries of a page by public ones. A link to another place keeps its target."""
    for entry in document.findall(desc):
        for link in entry.findall(nodes.reference):
            place = link.get("refuri", "").partition("#")[2] or link.get("refid", "")
            if place and PRIVATE.fullmatch(link.get("reftitle", "")):
                link["reftitle"] = place
        for text in list(entry.findall(nodes.Text)):
            if PRIVATE.search(text):
                text.parent.replace(text, nodes.Text(PRIVATE.sub(r"\1", text)))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register them."""
    app.connect("source-read", lead_to_pages)
    app.add_transform(PublicNames)
    app.add_post_transform(PublicTypes)
    return {"parallel_read_safe": True}
