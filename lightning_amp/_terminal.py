"""Text on lines of its own while a progress bar is on the terminal."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Generator, Iterator

_LOGGERS = ("lightning.pytorch.utilities.rank_zero", "lightning_amp")


@contextlib.contextmanager
def own_lines() -> Generator[None, None, None]:
    """Keep what is logged or warned inside off the line of a progress bar of tqdm or rich, which are Lightning's.

    A bar of tqdm is cleared, and drawn again below. Rich draws its bar again below what arrives at `sys.stderr`, which
    it redirects; handlers that were made before, as Lightning's own, write past it, and are led there.
    """
    with contextlib.ExitStack() as stack:
        tqdm = sys.modules.get("tqdm")
        if tqdm is not None:
            stack.enter_context(tqdm.tqdm.external_write_mode(file=sys.stderr))
        real = getattr(sys.stderr, "rich_proxied_file", None)
        if real is not None:
            for handler in _handlers():
                if handler.stream is real:
                    handler.setStream(sys.stderr)
                    stack.callback(handler.setStream, real)
        yield


def _handlers() -> Iterator[logging.StreamHandler]:
    """Iterate over the handlers that our messages go through."""
    for name in _LOGGERS:
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            yield from (handler for handler in logger.handlers if isinstance(handler, logging.StreamHandler))
            logger = logger.parent if logger.propagate else None
