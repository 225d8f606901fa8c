"""Records of the first value of a step that is not finite, and of the operation that made it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from typing_extensions import final

from lightning_amp._user_line import is_own_project

DiagnosisCause = Literal["batch", "weights", "forward", "loss", "backward", "none"]
Where = Literal["output", "input", "parameter"]


@final
@dataclass(frozen=True, slots=True)
class Operation:
    """The operation that made the first value, or gradient, that is not finite.

    Attributes:
        name: Its name in torch: `"exp"`, `"div"`, `"linear"`, `"cross_entropy"`.
        file: Path of the innermost line that ran it outside of torch, Lightning and this package; empty if unknown.
        line: Number of that line.
        code: Text of that line.
        module: Qualified name of the module whose own code contains the line; empty for the LightningModule itself,
            `None` outside of all modules.
        module_class: Class of that module.
        in_backward: Whether its backward made a non-finite gradient from a finite one.
        is_sum: Whether it is a sum of gradients that overflowed although each gradient was finite.
        dtype: Dtype of the result or gradient, such as `"float16"`.
        shape: Shape of the result or gradient.
        largest_input: Largest finite magnitude among its inputs; in a backward among the gradients that arrived.
        largest_in_fp32: Largest magnitude of the result in fp32; `None` if unknown.
        kind: The special value among its arguments, as in :class:`~lightning_amp.tracing._operation_calls.Facts`:
            `"zero"`, `"masked"`, ...
        kind_in_fp32: The same for the fp32 run, because a divisor may round to 0 in half precision only.
        index: Index of the first special value.
        count: Number of special values.
        followed_by: The first operation that used a non-finite result; preferably one that adds values up.

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
        """Return whether the line is in the user's own code and not in an installed package."""
        return bool(self.file) and is_own_project(self.file)


@final
@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The place where the first non-finite value of a step appeared.

    Attributes:
        cause: `"batch"`: the batch has non-finite values. `"weights"`: a parameter or buffer of the module has
            non-finite values. `"forward"`: the output of the module overflowed, from finite inputs and weights.
            `"loss"`: all modules were fine, but the loss was not finite. `"backward"`: the loss was finite, only its
            scaled gradient overflowed. `"none"`: everything was finite.
        module: Qualified name of the module, the empty string for the outermost; `None` if no module is named.
        module_class: Class of the module.
        where: In a forward: `"output"`; or `"input"`, if the module received a non-finite value although every module
            before it was finite: an operation outside of any module overflowed. In a backward: `"parameter"`, the
            gradient of a parameter; or `"input"`, the gradient that the module computed for its input. `"output"` is
            the gradient that arrived from the loss or from operations outside of any module.
        parameter: In a backward the qualified name of the parameter; with cause `"weights"` the parameter or buffer
            that is not finite.
        dtype: Dtype of the first non-finite output or gradient, such as `"float16"`.
        shape: Shape of that output or gradient.
        largest_input: Largest finite magnitude of the module's inputs.
        largest_weight: Largest finite magnitude of the module's own parameters.
        largest_gradient: Largest magnitude, scaled, of the gradients that are finite.
        entries: With cause `"batch"`: the parts of the batch with non-finite values, and how many each has.
        in_fp32: Whether the same step is finite in fp32; empty if no fp32 step was run. Two diagnoses are compared
            without this field and the next one.
        operation: The operation and its line; `None` if no operation was searched for or found.

    """

    cause: DiagnosisCause
    module: str | None = None
    module_class: str | None = None
    where: Where | None = None
    parameter: str | None = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    largest_input: float | None = None
    largest_weight: float | None = None
    largest_gradient: float | None = None
    entries: tuple[tuple[str, int], ...] = ()
    in_fp32: Literal["", "finite", "not finite"] = field(default="", compare=False)
    operation: Operation | None = field(default=None, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Return plain types, for JSON."""
        return asdict(self)
