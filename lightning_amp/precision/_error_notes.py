"""Add notes to torch's errors about dtypes: the module and line, the half-precision or float64 tensor, and a fix."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lightning_amp import _messages
from lightning_amp._compat import _modules
from lightning_amp._containers import tensors_in
from lightning_amp._text import named
from lightning_amp._user_line import Place, is_users
from lightning_amp.casting import Choice

_HALF = {
    torch.float16: re.compile(r"Half|(?<!dtype=torch\.)\bfloat16\b|\bhalf precision\b"),
    torch.bfloat16: re.compile(r"BFloat16|(?<!dtype=torch\.)\bbfloat16\b"),
}
"""How torch's errors write a half-precision dtype; a tensor that a message prints, `dtype=torch.float16`, is none."""
_COMPLEX_HALF = re.compile(r"[Cc]omplex(?:<c10::)?Half")
_SUPPORTED = re.compile(r"\w+(?:, \w+)*,? or \w+")  # "Half, Float or Double": what would work, not what it got
_NO_KERNEL = "could not create a primitive descriptor"  # oneDNN's words, without the dtype
_UNNAMED = re.compile(rf"same d?types?$|src\.dtype|{_NO_KERNEL}")  # two dtypes differ, and the message names neither
_UNSUPPORTED = re.compile(r"not implemented for|[Nn]ot support|[Uu]nsupported")
_NO_FLOATS = re.compile(r"\b(?:bool|boolean|byte|int|integer|long)\b", re.IGNORECASE)
_FLOATS = re.compile(r"\b(?:float|double)", re.IGNORECASE)
_MARK = "lightning_amp: raised in"


def note(error: BaseException | None, choice: Choice, modules: Sequence[nn.Module], step: str) -> None:
    """Add a note to an error about dtypes, if autocast or a float64 batch has a part in it; its type and text stay.

    The dtypes that the error names decide, not the operation. There is no note if the operation wants booleans or
    integers, which `.float()` does not give. On Python 3.10, which has no notes, it is a line in the log. The note
    names `step` if no submodule's forward was running.
    """
    if not isinstance(error, (RuntimeError, TypeError, ValueError)):
        return
    if any(_MARK in text for text in getattr(error, "__notes__", ())):
        return
    message = str(error)
    received = _SUPPORTED.sub("", message)
    is_double = "double" in received.lower()
    is_half = choice.mixed and bool(_HALF[choice.dtype].search(received) or _UNNAMED.search(message))
    if not is_double and (not is_half or (_NO_FLOATS.search(message) and not _FLOATS.search(message))):
        return
    where, doubles = _look(error, modules, step)
    half = str(choice.dtype).removeprefix("torch.")
    if is_double:
        if not doubles:
            return
        text = (
            f"{named(doubles)} {'is' if len(doubles) == 1 else 'are'} float64, and the module is float32: have the"
            " dataset return float32 (NumPy's default is float64), or call `.float()`"
        )
    elif _NO_KERNEL in message:
        text = f"this CPU has no {half} kernel for that layer: keep the layer in fp32 with `fp32_modules`"
    elif "without overflow" in message:
        text = f"{half} does not hold that number: write `torch.finfo(x.dtype).min` (or `.max`) for a tensor `x`"
    else:
        why = f"outputs of layers are {half} under autocast"
        if _UNSUPPORTED.search(message):
            why += ", which that operation does not support"
        is_complex = _COMPLEX_HALF.search(message) is not None
        kind, cast = ("complex32", ".to(torch.complex64)") if is_complex else (half, ".float()")
        text = (
            f"{why}: call `{cast}` on each {kind} tensor of that operation. If it still fails, do so inside"
            " `with lightning_amp.precision.fp32_region():`"
        )
    text = f"{_MARK} {where}. {text}."
    if hasattr(error, "add_note"):
        error.add_note(text)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        _messages.info(text)


def _look(error: BaseException, roots: Sequence[nn.Module], where: str) -> tuple[str, list[str]]:
    """Return where an error was raised, and the float64 arguments of the root's own method, such as `training_step`.

    A module that is float64 itself may have such arguments. If no submodule's forward was running, it is `where`.
    """
    names = {id(module): name for root in roots for name, module in root.named_modules() if name}
    is_double = any(p.dtype == torch.float64 for root in roots for p in root.parameters())
    doubles: list[str] = []
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file, method = frame.f_code.co_filename, frame.f_code.co_name
        place = f", {Place(file, line)}" if is_users(file) else place
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
            where = f"`{_modules.plain_name(names[id(owner)])}` ({type(owner).__name__})"
    return where + place, doubles
