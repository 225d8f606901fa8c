"""Log and warn on separate lines, so that no progress bar is broken."""

from __future__ import annotations

import warnings

from lightning_amp._compat._names import rank_zero_info, rank_zero_warn
from lightning_amp._terminal import own_lines


def info(*texts: str) -> None:
    """Log each text as a line through Lightning's logger, on rank 0."""
    with own_lines():
        for text in texts:
            rank_zero_info(text, stacklevel=5)


def warn_on_this_rank(text: str) -> None:
    """Warn on this rank. The text contains the number of the rank."""
    with own_lines():
        warnings.warn(text, stacklevel=2)


def warn(text: str) -> None:
    """Warn on rank 0."""
    with own_lines():
        rank_zero_warn(text, stacklevel=5)
