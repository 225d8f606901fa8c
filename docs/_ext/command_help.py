"""`{command-help} NAME`: what `lightning-amp NAME --help` prints, asked for while the page is built."""

from __future__ import annotations

import contextlib
import io
import os
from unittest import mock

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from lightning_amp.cli import main


class CommandHelp(SphinxDirective):
    """The help of a command, as it is printed in a terminal of 100 columns."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        printed = io.StringIO()
        with mock.patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1"}), contextlib.redirect_stdout(printed):
            status = main([*self.arguments, "--help"])
        if status != 0:
            raise self.error(f"`lightning-amp {' '.join(self.arguments)} --help` ended with {status}")
        block = nodes.literal_block(printed.getvalue(), printed.getvalue())
        block["language"] = "text"
        return [block]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True}
