"""Messages to the user, on lines of their own."""

from __future__ import annotations

import warnings

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_amp._terminal import own_lines


def info(text: str) -> None:
    """Log a line, as Lightning does."""
    with own_lines():
        rank_zero_info(text, stacklevel=5)


def warn_on_this_rank(text: str) -> None:
    """Warn on whichever rank this is; the text says which."""
    with own_lines():
        warnings.warn(text, stacklevel=2)


def warn(text: str) -> None:
    """Warn, as Lightning does."""
    with own_lines():
        rank_zero_warn(text, stacklevel=5)
