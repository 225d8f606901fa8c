"""Which line of the user's code is being run, and which module's own code it is."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from lightning_amp._user_line import Place, is_users, owner_of

_ROOMS = str(Path(__file__).parent.parent)
_WATCHERS = tuple(f"{_ROOMS}/{room}/" for room in ("tracing", "advice"))
_OPTIMIZERS = str(Path(str(torch.optim.__file__)).parent)
_MODES = {"__torch_function__", "__torch_dispatch__"}
_MEASURING = tuple(f"{_ROOMS}/{room}/" for room in ("tracing", "numerics"))
_ASKING = {f"{_ROOMS}/tracing/_operation_watch.py", __file__}
_CALLING = nn.Module.__call__.__code__.co_filename
"""Where the wrappers around each forward are: no code of the module."""


def user_place(boundary: str) -> Place | None:
    """Return the innermost line that is neither of torch, of Lightning nor of this package.

    Args:
        boundary: The file at which to stop: what called it is not what runs.

    Returns:
        The line; where only libraries are between here and the boundary, `None`.

    """
    for frame in _frames(boundary):
        file = frame.f_code.co_filename
        if is_users(file):
            return Place(file, frame.f_lineno)
    return None


def running_place(boundary: str) -> tuple[Place | None, bool]:
    """Return the innermost line that is not torch's, and whether it is the user's: of no library that we know.

    Args:
        boundary: As of :func:`user_place`.

    """
    for frame in _frames(boundary):
        file = frame.f_code.co_filename
        if owner_of(file) not in ("torch", "Python") and not file.startswith(_WATCHERS):
            return Place(file, frame.f_lineno), is_users(file)
    return None, False


def running_code(names: Mapping[int, str], boundary: str) -> tuple[Place | None, str | None] | None:
    """Return the innermost line of no library, and the innermost module one of whose own methods is running.

    Args:
        names: Qualified names of the modules that count, by their `id`; none: no module is looked for.
        boundary: As of :func:`user_place`.

    Returns:
        Both, each `None` where there is none; `None` alone where nobody's code is running, or what measures it.

    """
    place: Place | None = None
    module: str | None = None
    is_inside, seeks_module = True, bool(names)
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if file == boundary:
            break
        owner = owner_of(file)
        if is_inside and owner not in ("torch", "Python") and file not in _ASKING:
            is_inside = False
            if file.startswith(_MEASURING):
                return None
        if place is None and is_users(file) and code.co_name not in _MODES:
            place = Place(file, frame.f_lineno)
        if seeks_module and code.co_argcount and file != _CALLING:
            first = frame.f_locals.get(code.co_varnames[0])  # `self`, by whatever name
            if isinstance(first, nn.Module) and (module := names.get(id(first))) is not None:
                seeks_module = False
        if place is not None and not seeks_module:
            break
        frame = frame.f_back
    return None if place is None and module is None else (place, module)


def called_by_optimizer() -> bool:
    """Return whether an optimizer of torch is reading: its counts of steps are on the host."""
    frame = inspect.currentframe()
    for _ in range(12):
        if frame is None:
            return False
        if frame.f_code.co_filename.startswith(_OPTIMIZERS):
            return True
        frame = frame.f_back
    return False


def _frames(boundary: str) -> Iterator[FrameType]:
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename != boundary:
        yield frame
        frame = frame.f_back
