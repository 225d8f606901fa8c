"""The module that loses the precision of a step, and what was tried against it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import final, override

from lightning_amp.numerics import fidelity

WRONG_DB = 20.0
"""Below it, the error of an output is above a tenth of the output, or of its variation between samples."""
_BITS = {"fp16": 11, "bf16": 8, "fp8": 8}  # the significant bits of the format that autocast computes in


def bits_kept(sqnr_db: float, precision: str) -> str:
    """Write an SQNR as the number of correct bits: `1 of 8 bits`. A bit is worth 6.02 dB."""
    bits = _BITS.get(precision, 24)
    return f"{int(min(max(0.0, sqnr_db / 6.02), bits))} of {bits} bits"  # of NaN none


@final
class ModuleSums(NamedTuple):
    """The calls of one module in mixed precision, compared with the same calls in fp32."""

    kind: str  # class of the module
    num_calls: int
    num_values: int  # in the outputs
    inputs: Tensor  # `numerics.output_sums` of each input: [number, 6]
    outputs: Tensor  # of each output: [number, 6]

    def plus(self, more: ModuleSums) -> ModuleSums:
        """Add other calls. Calls with another number of inputs or outputs are left out."""
        if (self.inputs.shape, self.outputs.shape) != (more.inputs.shape, more.outputs.shape):
            return self
        number, values = self.num_calls + more.num_calls, self.num_values + more.num_values
        return ModuleSums(self.kind, number, values, self.inputs + more.inputs, self.outputs + more.outputs)


def worst_db(sums: Tensor) -> float:
    """Return the lowest SQNR of whole tensors and of the variation between samples; -inf if a value is not finite."""
    ratios = torch.stack([fidelity(part)[0] for row in sums for part in (row[:3], row[3:])]) if len(sums) else sums
    return float(ratios.nan_to_num(-torch.inf, torch.inf, -torch.inf).min()) if len(sums) else math.inf


@final
class TriedRemedy(NamedTuple):
    """A setting that was tried in a second run of a batch that shows the fault.

    Attributes:
        setting: The setting as code: `fp32_modules=['rotary']`.
        works: Whether it helps. A metric then keeps at most a quarter of its difference to fp32, and no gradient is
            lost. After a skipped step, loss and gradients are finite, and the loss equals the loss in fp32 within
            rounding. The error of the gradient is smaller than the gradient.
    """

    setting: str
    works: bool


@final
class LostPrecision(NamedTuple):
    """The module whose output is furthest from fp32 although its inputs are close, and what was tried.

    Attributes:
        module: Qualified name of the module.
        module_class: Its class.
        precision: The precision of the run.
        input_sqnr_db: The lowest SQNR of its inputs against fp32; infinite if all are equal.
        output_sqnr_db: The lowest SQNR of its outputs; minus infinity if an output is not finite, and fp32's is.
        tried: The settings that were tried.
        metric: The metric against which they were tried; empty for a gradient.
    """

    module: str
    module_class: str
    precision: str
    input_sqnr_db: float
    output_sqnr_db: float
    tried: tuple[TriedRemedy, ...] = ()
    metric: str = ""

    @override
    def __str__(self) -> str:
        named = f"`{self.module}` ({self.module_class})"
        output, inputs = (bits_kept(sqnr_db, self.precision) for sqnr_db in (self.output_sqnr_db, self.input_sqnr_db))
        if self.output_sqnr_db == -math.inf:
            text = f"{named}: its output is not finite in {self.precision}, although its inputs are, and fp32 is"
        elif self.output_sqnr_db < WRONG_DB:
            text = f"{named}: its output keeps {output} of fp32, and its inputs keep {inputs}"
        elif self.tried and not self.tried[0].works:
            text = f"no single module explains it: {named} loses most, and its output keeps {output} of fp32"
        else:
            text = f"of all modules {named} loses most, and its output still keeps {output} of fp32"
        return f"{text}\n  {describe_tried(self.tried)}" if self.tried else text


def describe_tried(tried: Sequence[TriedRemedy]) -> str:
    """Write the settings that work, or else that none does."""
    works = [f"{one.setting} (tried: works)" for one in tried if one.works]
    if works:
        return f"fix: {', or '.join(works)}"
    return f"tried, does not help: {', '.join(one.setting for one in tried)}"
