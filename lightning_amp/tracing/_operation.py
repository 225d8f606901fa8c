"""Which operation is to blame for a value, or a gradient, that is not finite; read from two runs of one step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import nn
from typing_extensions import final

from lightning_amp._compat import _modules
from lightning_amp._user_line import is_own_project
from lightning_amp.tracing._operation_calls import FUNCTION, BackwardCall, OperationCall
from lightning_amp.tracing._operation_watch import OperationWatch
from lightning_amp.tracing._operations import SUMMING

InFp32 = Literal["", "finite", "not finite"]


@final
@dataclass(frozen=True, slots=True)
class Operation:
    """The operation that made the first value, or gradient, that is not finite. Immutable.

    Attributes:
        name: As torch calls it: `"exp"`, `"div"`, `"linear"`, `"cross_entropy"`.
        file: Path of the line that ran it: the innermost one that `is_users`; empty if unknown.
        line: Its number.
        code: Its text.
        module: Qualified name of the module whose own code that is; empty for the LightningModule itself, `None`
            outside of all.
        module_class: Its class.
        in_backward: Whether its backward made it, from a finite gradient that arrived.
        is_sum: In a backward: the gradients that came from several places were finite, their sum was not.
        dtype: Of the result, or gradient, such as `"float16"`.
        shape: Of the same.
        largest_input: Largest finite magnitude of what went in; in a backward of the gradient that arrived.
        largest_in_fp32: Largest magnitude of the result in fp32; `None` if unknown.
        kind: What stands out, as in :class:`~lightning_amp.tracing._operation_calls.Facts`: `"zero"`, `"masked"`, ...
        kind_in_fp32: The same in fp32: a divisor may be 0 in half precision alone.
        index: Where, of the first.
        count: At how many places.
        followed_by: Name of the first operation that took the result, if that is not finite; rather one that adds up.

    """

    name: str
    file: str = ""
    line: int = 0
    code: str = ""
    module: str | None = None
    module_class: str | None = None
    in_backward: bool = False
    is_sum: bool = False
    dtype: str | None = None
    shape: tuple[int, ...] = ()
    largest_input: float | None = None
    largest_in_fp32: float | None = None
    kind: str = ""
    kind_in_fp32: str = ""
    index: tuple[int, ...] = ()
    count: int = 0
    followed_by: str = ""

    @property
    def is_users(self) -> bool:
        """Return whether the line is one of the user's, not of an installed package."""
        return bool(self.file) and is_own_project(self.file)


def blamed_in_half(
    half: OperationWatch, exact: OperationWatch, made_loss: OperationCall | None
) -> OperationCall | None:
    """Find the first operation that lost finite values of fp32.

    What is not finite in fp32 either, while the loss there is, is so on purpose: a mask.

    Args:
        half: Of the step as it was.
        exact: Of the same step in fp32, with what `half` found as what is wanted.
        made_loss: The operation that made the loss not finite; `None`: of all that are not finite, the first.

    """
    calls = half.bad if made_loss is None else made_loss.chain
    for call in calls:
        there = exact.measured.get(call.key)
        if call.facts.kind == "literal" and not call.makes_nan:
            continue
        if there is None or there.num_nonfinite < call.num_nonfinite:
            return call
    return None


def blamed_in_fp32(made_loss: OperationCall | None, bad: Iterable[OperationCall]) -> OperationCall | None:
    """Find the operation that made a loss not finite, in a run to which precision does not matter.

    Of an infinity that was written somewhere on purpose, the one that made a NaN of it.

    Args:
        made_loss: As of :func:`blamed_in_half`.
        bad: All that are not finite, to choose from if that is unknown.

    """
    if made_loss is None:
        return next((call for call in bad if not call.takes_nonfinite and call.facts.kind != "literal"), None)
    masked = next((call for call in made_loss.chain if call.facts.kind == "masked"), None)
    if masked is not None:
        return masked
    for root in made_loss.roots:
        if root.facts.kind != "literal" or root.makes_nan:
            return root
        return next((call for call in made_loss.chain if call.makes_nan and call.number > root.number), root)
    return made_loss


def operation(
    module: nn.Module,
    found: OperationCall | BackwardCall,
    there: OperationCall | None = None,
    bad: Iterable[OperationCall] = (),
) -> Operation:
    """Describe what was found.

    Args:
        module: The whole, for the classes of its parts.
        found: In the step as it was, or in fp32 where that is not finite either.
        there: The same operation in fp32, if it was measured.
        bad: All operations of the run in which it was found, whose results are not finite.

    """
    call = found if isinstance(found, OperationCall) else found.call
    classes = {_modules.plain_name(name): type(m).__name__ for name, m in module.named_modules()}
    facts, in_fp32 = call.facts, "" if there is None else there.facts.kind
    kind = facts.kind
    if isinstance(found, BackwardCall):
        kind = "zero" if call.smallest is not None and float(call.smallest) == 0 else ""
        if call.known_as == FUNCTION:
            kind = "function"
        if there is not None and there.smallest is not None and float(there.smallest) == 0:
            in_fp32 = "zero"
    largest_in_fp32 = None if there is None or there.num_nonfinite else there.largest_output
    takers = [other.name for other in bad if any(source is call for source in other.sources)]
    taker = next((name for name in takers if name in SUMMING), next(iter(takers), ""))
    place = call.key.place
    dtype = found.dtype
    return Operation(
        call.name,
        "" if place is None else place.file,
        0 if place is None else place.line,
        "" if place is None else place.code,
        call.module,
        None if call.module is None else classes.get(call.module),
        isinstance(found, BackwardCall),
        isinstance(found, BackwardCall) and found.is_sum,
        None if dtype is None else str(dtype).removeprefix("torch."),
        found.shape,
        found.largest_input if isinstance(found, OperationCall) else found.largest,
        largest_in_fp32,
        kind,
        in_fp32,
        facts.index,
        facts.count,
        taker,
    )
