"""What errors of torch mean where autocast runs: which module, which line, and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from typing_extensions import final

from lightning_amp import _messages
from lightning_amp._compat import _modules
from lightning_amp._user_line import Place, innermost

_HALF = r"(?:c10::|at::)?(?P<half>Half|BFloat16)"
_MIXED = "a tensor that autocast made {short} meets one of float32 where autocast is off"
_FLOAT = "`.float()` on what goes in computes it in float32"
_PUT = "values that autocast made {short} are put into a float32 tensor: `.to(target.dtype)` on them"


@final
class _Known(NamedTuple):
    """An error.

    Attributes:
        pattern: Of its message.
        remedy: What it means, and what to write.
        mixes: Whether two dtypes meet: in a `torch.autograd.Function` that has a remedy of its own.

    """

    pattern: re.Pattern[str]
    remedy: str
    mixes: bool = False


def _known(pattern: str, remedy: str, *, mixes: bool = False) -> _Known:
    return _Known(re.compile(pattern), remedy, mixes)


_ERRORS = (
    _known(
        f"value cannot be converted to type {_HALF} without overflow",
        "{short} ends at {largest} and does not hold the number: `torch.finfo(x.dtype).min` (or `.max`), of the"
        " tensor `x` that it goes into, fits every dtype",
    ),
    _known(f"expected m1 and m2 to have the same dtype.*{_HALF}", f"{_MIXED}: {_FLOAT}", mixes=True),
    _known(f"mat1 and mat2 (?:to|must) have the same dtype.*{_HALF}", f"{_MIXED}: {_FLOAT}", mixes=True),
    _known(f"expected scalar type {_HALF} but found Float", f"{_MIXED}: {_FLOAT}", mixes=True),
    _known(f"expected scalar type Float but found {_HALF}", f"{_MIXED}: {_FLOAT}", mixes=True),
    _known(f"Input type .*{_HALF}.* and (?:bias|weight) type .* should be the same", f"{_MIXED}: {_FLOAT}", mixes=True),
    _known(f"Index put requires the source and destination dtypes match.*{_HALF}", _PUT),
    _known(rf"index_\w+\(\):.*{_HALF}.*same (?:scalar type|dtype)", _PUT),
    _known(
        r"scatter(?:_\w+)?\(\): Expected self\.dtype to be equal to src\.dtype",
        "If the values come from a layer, autocast made them {short}: `.to(target.dtype)` on them",
    ),
    _known(f"expected self and source to have the same dtype.*{_HALF}", _PUT),
    _known(
        f"Expected out tensor to have dtype {_HALF}, but got float",
        "under autocast the result is {short}: take what is returned in the place of `out=`",
    ),
    _known(f"Got unsupported ScalarType {_HALF}", "NumPy has no {short}: `.float()` before `.numpy()`"),
    _known(
        f"not implemented for '{_HALF}'",
        "torch has no {short} kernel for it on this device: `.float()` on what goes in",
    ),
    _known("unsafe to autocast", ""),
)
_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_NAMES = {torch.float16: "Half", torch.bfloat16: "BFloat16"}
_MARK = "lightning_amp: raised"


def note(error: BaseException, module: nn.Module, dtype: torch.dtype, device_type: str, step: str) -> None:
    """Add to an error that autocast has a part in what it means; its type, message and traceback stay.

    On Python 3.10, whose exceptions take no notes, it is a line in the log.

    Args:
        error: As it leaves the step.
        module: The attached one.
        dtype: What autocast computes in.
        device_type: Where.
        step: In what it was raised where no module's forward was running.

    """
    if not isinstance(error, (RuntimeError, TypeError)) or any(_MARK in n for n in getattr(error, "__notes__", ())):
        return
    text = str(error)
    for known in _ERRORS:
        match = known.pattern.search(text)
        if match is None:
            continue
        if match.groupdict().get("half") not in (None, _NAMES[dtype]):
            return  # autocast does not make it
        place = _Place.of(error, module)
        if place.module is not None and any(t.dtype == dtype for t in _own(place.module)):
            return  # the user's own half precision
        words = _words(known, place, dtype, device_type, step)
        add_note = getattr(error, "add_note", None)
        if add_note is None:
            _messages.info(words)
        else:
            add_note(words)
        return


def _words(known: _Known, place: _Place, dtype: torch.dtype, device_type: str, step: str) -> str:
    short = _SHORT[dtype]
    where = f"`{place.name}` ({type(place.module).__name__})" if place.name else step
    if place.function:
        where = f"{place.function}, a `torch.autograd.Function`" + (f", in {where}" if place.name else "")
    line = "" if place.line is None else f", {place.line}"
    remedy = known.remedy.format(short=short, largest=f"{torch.finfo(dtype).max:,.5g}")
    if place.function and known.mixes:
        name = place.function.split(".")[0].strip("`")
        arguments = f"device_type={device_type!r}"
        remedy = (
            f"a `torch.autograd.Function` runs its forward under autocast and its backward without: decorate"
            f" `{name}.forward` with `torch.amp.custom_fwd({arguments}, cast_inputs=torch.float32)` and"
            f" `{name}.backward` with `torch.amp.custom_bwd({arguments})`"
        )
    remedy = remedy[:1].upper() + remedy[1:] if not remedy.startswith(short) else remedy
    return f"{_MARK} under {short} autocast in {where}{line}." + (f" {remedy}." if remedy else "")


def _own(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


@final
class _Place(NamedTuple):
    """Where an error was raised: the module whose own forward was running, the function, the user's line."""

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
            found = _first_argument(frame)
            if isinstance(found, nn.Module) and frame.f_code.co_name == "forward" and names.get(id(found)):
                name, module, function = names[id(found)], found, ""
            elif isinstance(found, FunctionCtx) and frame.f_code.co_name in ("forward", "backward"):
                function = f"`{type(found).__name__.removesuffix('Backward')}.{frame.f_code.co_name}`"
            traceback = traceback.tb_next
        return cls(name, module, function, innermost(lines))


def _first_argument(frame: FrameType) -> Any:
    names = frame.f_code.co_varnames
    return frame.f_locals.get(names[0]) if names and frame.f_code.co_argcount else None
