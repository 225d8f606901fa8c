"""The operation that made the first value of a step that is not finite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from typing_extensions import final

OpKind = Literal[
    "", "empty", "ignored", "masked", "zero", "negative", "one", "cast", "literal", "infinite", "sum", "function",
    "state",
]  # fmt: skip


@final
@dataclass(frozen=True, slots=True)
class Op:
    """The operation that made the first value, or gradient, that is not finite.

    Attributes:
        name: Its name in torch: `"exp"`, `"div"`, `"linear"`, `"cross_entropy"`.
        file: Path of the innermost line that ran it outside of torch, Lightning and this package; empty if unknown.
        line: Number of that line.
        code: Text of that line.
        module: Qualified name of the module whose own code contains the line; empty for the LightningModule itself,
            `None` outside of all modules.
        in_backward: Whether its backward made the first non-finite gradient.
        is_sum: Whether it is a sum of gradients that overflowed although each gradient was finite.
        dtype: Dtype of the result or gradient, such as `"float16"`.
        shape: Shape of the result or gradient.
        result: `"nan"`, `"inf"` or `"-inf"`.
        largest_input: Largest finite magnitude among its inputs; in a backward among the gradients that arrived.
        largest_in_fp32: Largest magnitude of the result in fp32, or of the true gradient; `None` if unknown.
        kind: A property of its arguments that explains the result. `"empty"`: a reduction over no values. `"ignored"`:
            a loss that ignores every label of the batch. `"masked"`: a row that is minus infinity throughout.
            `"zero"`: a divisor, or the argument of a root or logarithm, is 0. `"negative"`: the argument of a root or
            logarithm is below 0. `"one"`: a standard deviation of one value. `"cast"`: a cast to a dtype that cannot
            hold the value. `"literal"`: the code writes an infinity there. `"infinite"`: a product, sum or difference
            with an infinite argument. `"sum"`: a sum of finite values. `"function"`: an autograd Function of the user.
            `"state"`: an input is NaN, and no operation of the step made it. Empty: nothing special.
        kind_in_fp32: The same for the run in fp32, because a divisor may round to 0 in half precision only.
        count: For a sum, the number of values per result.
        is_summed: Whether an operation that adds values up takes its result, or a division, as in a softmax by hand.

    """

    name: str
    file: str = ""
    line: int = 0
    code: str = ""
    module: str | None = None
    in_backward: bool = False
    is_sum: bool = False
    dtype: str = ""
    shape: tuple[int, ...] = ()
    result: Literal["", "nan", "inf", "-inf"] = ""
    largest_input: float | None = None
    largest_in_fp32: float | None = None
    kind: OpKind = ""
    kind_in_fp32: OpKind = ""
    count: int = 0
    is_summed: bool = False
