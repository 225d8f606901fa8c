"""Keep messages and progress bars on separate lines of the terminal."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Generator, Iterator

_LOGGERS = ("lightning.pytorch.utilities.rank_zero", "lightning_amp")


@contextlib.contextmanager
def own_lines() -> Generator[None, None, None]:
    """Keep messages logged inside this context on other lines than Lightning's progress bars, of tqdm or rich.

    A bar of tqdm is cleared and drawn again below the message. Rich redirects `sys.stderr` and draws its bar again
    below the text that arrives there. Log handlers made earlier, such as Lightning's, bypass it, so they are pointed to
    the redirected `sys.stderr`.
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
    """Iterate over the handlers that receive our messages."""
    for name in _LOGGERS:
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            yield from (handler for handler in logger.handlers if isinstance(handler, logging.StreamHandler))
            logger = logger.parent if logger.propagate else None
