"""Which loss scaler a run uses, of the one that was passed and what its precision needs."""

from __future__ import annotations

from typing import Any

import torch

from lightning_amp._arguments import require
from lightning_amp.casting import Precision
from lightning_amp.scaling import DynamicLossScaler


def checked_scaler(scaler: Any) -> torch.amp.GradScaler | None:
    """The argument as a scaler; a number is a scale that never moves.

    Raises:
        ValueError: For anything else.

    """
    if isinstance(scaler, (int, float)):
        scaler = DynamicLossScaler.static(scaler)
    fine = scaler is None or isinstance(scaler, torch.amp.GradScaler)
    legal = "a `lightning_amp.DynamicLossScaler`, a `torch.amp.GradScaler`, a float for a static scale, or `None`"
    require(fine, "scaler", legal, scaler)
    return scaler


def settled_scaler(
    name: str, requested: Precision, given: torch.amp.GradScaler | None, current: torch.amp.GradScaler | None
) -> torch.amp.GradScaler | None:
    """The scaler of a run in precision `name`; `None` where none is needed.

    Args:
        name: The precision that is used.
        requested: The one that was asked for. `"auto"` and `"fp32"` leave a scaler unused, so that one configuration
            serves all machines.
        given: What the user passed.
        current: In use so far.

    Raises:
        ValueError: If one was passed to a precision that never uses one.

    """
    if name == "fp16":
        return given or current or DynamicLossScaler()
    if given is not None and requested not in ("auto", "fp32"):
        raise ValueError(
            f"`precision={requested!r}` does not use a loss scaler, got `scaler={given!r}`. Its range is that of fp32,"
            " so nothing underflows: leave `scaler` out, or use precision 'fp16'. With 'auto', one that is not needed"
            " is left unused."
        )
    return None
