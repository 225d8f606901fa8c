"""`{events}`: one optimizer step as a table, from the list that the tests compare a recorded step with."""

from __future__ import annotations

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from lightning_amp.precision._events import EVENTS


class EventsDirective(SphinxDirective):
    """A numbered list of the events of one optimizer step."""

    def run(self) -> list[nodes.Node]:
        lines = [f"{i}. **{event.name}**: {event.about}" for i, event in enumerate(EVENTS, 1)]
        return self.parse_text_to_nodes("\n".join(lines))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("events", EventsDirective)
    return {"parallel_read_safe": True}
