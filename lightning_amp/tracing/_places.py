"""Find the running line of the user's code, and its module."""

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
_MEASURING = tuple(f"{_ROOMS}/{room}/" for room in ("tracing", "numerics"))
_ASKING = {f"{_ROOMS}/tracing/_trace.py", __file__}
_OPTIMIZERS = str(Path(str(torch.optim.__file__)).parent)
_LAYERS = str(Path(str(nn.__file__)).parent)
_GATHERING = str(Path(str(torch.__file__)).parent / "distributed" / "fsdp")
_LOGGING = str(Path("trainer") / "connectors" / "logger_connector")
_MODES = {"__torch_function__", "__torch_dispatch__"}
_CALLING = nn.Module.__call__.__code__.co_filename
"""The file of our wrappers around each forward. Its code does not belong to the module."""


def user_place(boundary: str) -> Place | None:
    """Return the innermost line outside of torch, Lightning and this package; `None` without one.

    Args:
        boundary: File where the search ends; callers of that file are not searched.

    """
    frames = (frame for frame in _frames(boundary) if is_users(frame.f_code.co_filename))
    return next((Place(frame.f_code.co_filename, frame.f_lineno) for frame in frames), None)


def running_place(boundary: str) -> tuple[Place | None, bool]:
    """Return the innermost line outside of torch, and whether it is the user's.

    An optimizer of torch reads values that are on the host, so it gets no line.

    Args:
        boundary: File where the search ends; callers of that file are not searched.

    """
    for frame in _frames(boundary):
        file = frame.f_code.co_filename
        if file.startswith(_OPTIMIZERS):
            break
        if owner_of(file) not in ("torch", "Python") and not file.startswith(_WATCHERS):
            return Place(file, frame.f_lineno), is_users(file)
    return None, False


def running_code(names: Mapping[int, str], boundary: str) -> tuple[Place | None, str | None] | None:
    """Return the innermost line of the user's code, and the innermost module with a running method.

    Args:
        names: Qualified names of modules, by their `id`; if empty, no module is searched for.
        boundary: File where the search ends; callers of that file are not searched.

    Returns:
        Line and module, each `None` if there is none. `None` instead of the pair if no user code runs, or if this
        package is measuring. Also while FSDP gathers parameters, into memory that has any values, and while Lightning
        adds a logged value to values of earlier steps and of other ranks.

    """
    place: Place | None = None
    module: str | None = None
    is_inside, is_in_layer, seeks_module = True, False, bool(names)
    for frame in _frames(boundary):
        code = frame.f_code
        file = code.co_filename
        is_in_layer = is_in_layer or (file.startswith(_LAYERS) and file != _CALLING)
        if is_inside and not is_in_layer and file.startswith(_GATHERING):
            return None
        if is_inside and owner_of(file) not in ("torch", "Python") and file not in _ASKING:
            is_inside = False
            if file.startswith(_MEASURING):
                return None
        if place is None and _LOGGING in file:
            return None
        if place is None and is_users(file) and code.co_name not in _MODES:
            place = Place(file, frame.f_lineno)
        if seeks_module and code.co_argcount and file != _CALLING:
            first = frame.f_locals.get(code.co_varnames[0])  # `self`, even if it has another name
            if isinstance(first, nn.Module) and (module := names.get(id(first))) is not None:
                seeks_module = False
        if place is not None and not seeks_module:
            break
    return None if place is None and module is None else (place, module)


def _frames(boundary: str) -> Iterator[FrameType]:
    """Iterate over the frames outside of this file outwards, up to the file `boundary`.

    A frame of this file would refer to itself, and keep the tensors of its callers until the next garbage collection.
    """
    frame = getattr(inspect.currentframe(), "f_back", None)
    while frame is not None and frame.f_code.co_filename != boundary:
        if frame.f_code.co_filename != __file__:
            yield frame
        frame = frame.f_back
