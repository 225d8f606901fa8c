"""Add notes to torch's errors about dtypes: the module and line, the half-precision or float64 tensor, and a fix."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from lightning_amp import _messages
from lightning_amp._compat import _modules
from lightning_amp._containers import tensors_in
from lightning_amp._text import named
from lightning_amp._user_line import innermost
from lightning_amp.casting import Choice

_SCALAR_TYPES = {torch.float16: "Half", torch.bfloat16: "BFloat16"}
_ABOUT_DTYPES = re.compile(r"[Tt]ype|implemented for")
_MARK = "lightning_amp: raised in"


def note(error: BaseException, choice: Choice, modules: Sequence[nn.Module], step: str) -> None:
    """Add a note to an error about dtypes, if autocast or a float64 batch has a part in it; its type and text stay.

    On Python 3.10, which has no notes, it is a line in the log. The note names `step` if no submodule's forward was
    running.
    """
    message = str(error)
    noted = any(_MARK in text for text in getattr(error, "__notes__", ()))
    if noted or not isinstance(error, (RuntimeError, TypeError)) or not _ABOUT_DTYPES.search(message):
        return
    where, function, doubles = _look(error, modules, step)
    half = str(choice.dtype).removeprefix("torch.")
    if "double" in message.lower():
        if not doubles:
            return
        text = (
            f"{named(doubles)} {'is' if len(doubles) == 1 else 'are'} float64, and the module is float32: have the"
            " dataset return float32 (NumPy's default is float64), or call `.float()`"
        )
    elif not choice.mixed or not re.search(rf"\b{_SCALAR_TYPES[choice.dtype]}\b|src\.dtype", message):
        return
    elif "without overflow" in message:
        text = f"{half} does not hold that number: write `torch.finfo(x.dtype).min` (or `.max`) for a tensor `x`"
    elif function:
        text = (
            f"run this `torch.autograd.Function` in fp32: `lightning_amp.precision.fp32_region({function}.apply)(...)`"
        )
    else:
        text = f"outputs of layers are {half} under autocast: call `.float()` on each {half} tensor of that operation"
    text = f"{_MARK} {where}. {text}."
    if hasattr(error, "add_note"):
        error.add_note(text)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        _messages.info(text)


def _look(error: BaseException, roots: Sequence[nn.Module], step: str) -> tuple[str, str, list[str]]:
    """Return where an error was raised, the `torch.autograd.Function` in whose backward, and what was float64.

    These are the arguments of the root's own method, such as `training_step`, unless the module is float64 itself.
    """
    names = {id(module): name for root in roots for name, module in root.named_modules() if name}
    is_double = any(p.dtype == torch.float64 for root in roots for p in root.parameters())
    where, function = step, ""
    doubles: list[str] = []
    lines: list[tuple[str, int]] = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        file, method = frame.f_code.co_filename, frame.f_code.co_name
        lines.append((file, line))
        arguments = inspect.getargvalues(frame)
        passed = (*arguments.args, arguments.varargs, arguments.keywords)
        values = {name: arguments.locals.get(name) for name in passed if name is not None}
        owner: Any = next(iter(values.values()), None)
        if any(owner is root for root in roots):
            if not method.startswith("_") and not is_double:
                found = (
                    f"{n}{path}" for n, v in values.items() for path, t in tensors_in(v) if t.dtype == torch.float64
                )
                doubles = doubles or [*found]
        elif method == "forward" and id(owner) in names:
            where, function = f"`{_modules.plain_name(names[id(owner)])}` ({type(owner).__name__})", ""
        elif method == "backward" and isinstance(owner, FunctionCtx):
            function = type(owner).__name__.removesuffix("Backward")
            where = f"the backward of `{function}`"
    place = innermost(lines)
    return where if place is None else f"{where}, {place}", function, doubles
