"""Add notes to torch's errors under autocast: in which module and line they arose, and what to write instead."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from typing_extensions import final

from lightning_amp import _messages
from lightning_amp._compat import _modules
from lightning_amp._user_line import Place, innermost

_HALF = r"(?:c10::|at::)?(?P<half>Half|BFloat16)"
_FLOAT = "call `.float()` on the input to compute in float32"
_MIXED = f"a tensor that autocast made {{short}} meets a float32 tensor where autocast is off: {_FLOAT}"
_PUT = "values that autocast made {short} are put into a float32 tensor: call `.to(target.dtype)` on them"

_MIXTURES = (
    f"expected m1 and m2 to have the same dtype.*{_HALF}",
    f"mat1 and mat2 (?:to|must) have the same dtype.*{_HALF}",
    f"expected scalar type {_HALF} but found Float",
    f"expected scalar type Float but found {_HALF}",
    f"Input type .*{_HALF}.* and (?:bias|weight) type .* should be the same",
)
"""Messages about two different dtypes in one operation. In a `torch.autograd.Function` they have a different remedy."""

_REMEDIES = {
    f"value cannot be converted to type {_HALF} without overflow": (
        "{short} ends at {largest} and does not hold the number: write `torch.finfo(x.dtype).min` (or `.max`) for the"
        " tensor `x`, which fits every dtype"
    ),
    **dict.fromkeys(_MIXTURES, _MIXED),
    f"Index put requires the source and destination dtypes match.*{_HALF}": _PUT,
    rf"index_\w+\(\):.*{_HALF}.*same (?:scalar type|dtype)": _PUT,
    r"scatter(?:_\w+)?\(\): Expected self\.dtype to be equal to src\.dtype": (
        "If the values come from a layer, autocast made them {short}: call `.to(target.dtype)` on them"
    ),
    f"expected self and source to have the same dtype.*{_HALF}": _PUT,
    f"Expected out tensor to have dtype {_HALF}, but got float": (
        "under autocast the result is {short}: use the returned value instead of `out=`"
    ),
    f"Got unsupported ScalarType {_HALF}": "NumPy has no {short}: call `.float()` before `.numpy()`",
    f"not implemented for '{_HALF}'": "torch has no {short} kernel for it on this device: call `.float()` on the input",
    "unsafe to autocast": "",
}
"""The cause of an error and the fix, by a pattern of its message. They are tried in this order."""

_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_NAMES = {torch.float16: "Half", torch.bfloat16: "BFloat16"}
_MARK = "lightning_amp: raised"


def note(error: BaseException, module: nn.Module, dtype: torch.dtype, device_type: str, step: str) -> None:
    """Add a note to an error in which autocast is involved; its type, message and traceback stay.

    On Python 3.10, which has no notes, it is a line in the log. The note names `step` if no module's forward was
    running.
    """
    if not isinstance(error, (RuntimeError, TypeError)) or any(_MARK in n for n in getattr(error, "__notes__", ())):
        return
    pattern, match = next(((p, m) for p in _REMEDIES if (m := re.search(p, str(error)))), ("", None))
    if match is None or match.groupdict().get("half") not in (None, _NAMES[dtype]):
        return  # autocast does not cause it
    place = _Place.of(error, module)
    own = () if place.module is None else (*place.module.parameters(), *place.module.buffers())
    if any(tensor.dtype == dtype for tensor in own):
        return  # the user's own half-precision tensors, without autocast
    words = _words(pattern, place, dtype, device_type, step)
    add_note = getattr(error, "add_note", None)
    if add_note is None:
        _messages.info(words)
    else:
        add_note(words)


def _words(pattern: str, place: _Place, dtype: torch.dtype, device_type: str, step: str) -> str:
    short = _SHORT[dtype]
    where = f"`{place.name}` ({type(place.module).__name__})" if place.name else step
    if place.function:
        where = f"{place.function}, a `torch.autograd.Function`" + (f", in {where}" if place.name else "")
    line = "" if place.line is None else f", {place.line}"
    remedy = _REMEDIES[pattern].format(short=short, largest=f"{torch.finfo(dtype).max:,.5g}")
    if place.function and pattern in _MIXTURES:
        name = place.function.split(".")[0].strip("`")
        arguments = f"device_type={device_type!r}"
        remedy = (
            f"a `torch.autograd.Function` runs its forward under autocast and its backward without: decorate"
            f" `{name}.forward` with `torch.amp.custom_fwd({arguments}, cast_inputs=torch.float32)` and"
            f" `{name}.backward` with `torch.amp.custom_bwd({arguments})`"
        )
    remedy = remedy[:1].upper() + remedy[1:] if not remedy.startswith(short) else remedy
    return f"{_MARK} under {short} autocast in {where}{line}." + (f" {remedy}." if remedy else "")


@final
class _Place(NamedTuple):
    """The place where an error was raised: the module whose forward was running, the function, the user's line."""

    name: str
    module: nn.Module | None
    function: str
    line: Place | None

    @classmethod
    def of(cls, error: BaseException, root: nn.Module) -> _Place:
        names = {id(module): _modules.plain_name(name) for name, module in root.named_modules()}
        name, module, function = "", None, ""
        lines: list[tuple[str, int]] = []
        traceback = error.__traceback__
        while traceback is not None:
            frame = traceback.tb_frame
            lines.append((frame.f_code.co_filename, traceback.tb_lineno))
            names_of_arguments = frame.f_code.co_varnames[: frame.f_code.co_argcount]
            found = frame.f_locals.get(names_of_arguments[0]) if names_of_arguments else None
            if isinstance(found, nn.Module) and frame.f_code.co_name == "forward" and names.get(id(found)):
                name, module, function = names[id(found)], found, ""
            elif isinstance(found, FunctionCtx) and frame.f_code.co_name in ("forward", "backward"):
                function = f"`{type(found).__name__.removesuffix('Backward')}.{frame.f_code.co_name}`"
            traceback = traceback.tb_next
        return cls(name, module, function, innermost(lines))
