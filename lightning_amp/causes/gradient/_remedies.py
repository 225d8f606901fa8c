"""Try settings against a gradient that mixed precision loses, by running the same batch with each of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import final

from lightning_amp._compat import _modules
from lightning_amp._text import exact, literal
from lightning_amp.casting import Fp32Modules
from lightning_amp.causes._attempts import Attempt, first_that_works
from lightning_amp.findings import LOW_DB, TOTAL, GradientFault, TriedRemedy
from lightning_amp.numerics import fidelity, fidelity_sums, widest_dtype
from lightning_amp.precision import AmpPrecision
from lightning_amp.shadow import (
    Lockstep,
    OutputComparison,
    RowsBy,
    StepWatch,
    TrainingPass,
    gather,
    rows_of_parameters,
)

_MOST_MODULES = 4
_MIDDLE_SCALE = 2.0**10
_ROUNDED_AWAY_DB = 20.0

Gradients = dict[str, Tensor]


@final
class GradientRemedies:
    """Runs a batch in fp32, and then with one setting after the other until the gradient is close to fp32.

    Make it while the trainer is at the start of a batch. All ranks must call this, each with its own batch. The module
    does not change.

    Cost: one step in fp32, one or two in the training's precision, and one for each setting.
    """

    def __init__(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int, by: RowsBy, scale: float
    ) -> None:
        self._trainer, self._module, self._batch, self._batch_idx = trainer, module, batch, batch_idx
        self._by: RowsBy = by
        self._loss_scale = scale

    def try_all(self, fault: GradientFault, recommended_scale: float | None) -> list[TriedRemedy]:
        """Try settings, the cheapest first, until one works.

        All gradients so far fit into fp16 at `recommended_scale`.
        """
        if fault.kind in ("nan", "infinite") or not isinstance(self._trainer.precision_plugin, AmpPrecision):
            return []
        outputs = OutputComparison()
        looks = outputs.recording if fault.kind == "rounding" else None
        try:
            fp32_pass = TrainingPass(self._trainer, self._module, upcast=True)
            fp32_run = self._run(fp32_pass, None, look=looks)
        except Exception:  # such as out of memory; this rank continues, because other ranks may have enough memory
            fp32_run = {}
        attempts = (
            Attempt(setting, partial(self._measure, fault, fp32_run, setting, run))
            for setting, run in self._settings(fault, recommended_scale, outputs)
        )
        ranks = Lockstep(self._trainer)
        return [tried for _, tried in first_that_works(ranks, attempts, lambda tried: tried.works)]

    # -- settings ------------------------------------------------------------------------------------------------------

    def _settings(
        self, fault: GradientFault, recommended_scale: float | None, outputs: OutputComparison
    ) -> Generator[tuple[str, Callable[[], Gradients]]]:
        """Iterate over settings, written as in code, each with a function that runs the step with it."""
        precision = fault.total.precision
        if fault.kind == "length":
            return
        if precision == "fp16" and recommended_scale is not None and self._is_worth_trying(fault, recommended_scale):
            yield self._scale_setting(recommended_scale), partial(self._in_precision, scale=recommended_scale)
        if precision != "fp8":
            for name in self._fp32_candidates(fault, outputs):
                yield f"`fp32_modules=[{name!r}]`", partial(self._in_precision, fp32=(name,))
        if precision in ("fp16", "fp8"):
            yield "'bf16'", partial(self._in_precision, precision="bf16", scale=1.0)

    def _is_worth_trying(self, fault: GradientFault, scale: float) -> bool:
        return scale != self._loss_scale and not (fault.kind == "rounding" and scale < self._loss_scale)

    def _scale_setting(self, scale: float) -> str:
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        if scale < 1:  # dividing the loss has the same effect, and keeps the loss scale away from both of its limits
            return f"dividing the loss by {literal(_MIDDLE_SCALE / scale)}"
        least = getattr(scaler, "min_scale", 0.0)
        falls = isinstance(scaler, torch.amp.GradScaler) and scaler.get_backoff_factor() < 1
        if falls and least <= scale < self._loss_scale:
            return f"a loss scale of {exact(scale)}, to which it falls by itself"
        return f"`DynamicLossScaler(init_scale={literal(scale)})`"

    def _fp32_candidates(self, fault: GradientFault, outputs: OutputComparison) -> list[str]:
        """Name modules whose output is rounded away, the module whose gradient is lost first, and its parents."""
        names = {_modules.plain_name(name) for name, _ in self._module.named_modules() if name}
        first = fault.row.name if self._by == "module" else fault.row.name.rpartition(".")[0]
        first = "" if fault.row.name == TOTAL else first
        candidates = [first]
        if outputs.reference:
            with contextlib.suppress(Exception):
                amp_pass = TrainingPass(self._trainer, self._module)
                self._run(amp_pass, amp_pass.forward_context(), scale=self._loss_scale, look=outputs.comparing)
            candidates = [*_rounded_away(outputs)[:2], first]
            outputs.forget()
        while "." in first:
            first = first.rpartition(".")[0]
            candidates.append(first)
        mine = [name for name in dict.fromkeys(candidates) if name in names][:_MOST_MODULES]
        return gather(self._trainer, mine)[0]

    # -- runs ----------------------------------------------------------------------------------------------------------

    def _in_precision(self, *, precision: str = "", scale: float | None = None, fp32: Sequence[str] = ()) -> Gradients:
        step = TrainingPass(self._trainer, self._module, precision=precision)
        if fp32:
            Fp32Modules(step.module, fp32, self._trainer.strategy.root_device.type, active=True)
        return self._run(step, step.forward_context(), scale=self._loss_scale if scale is None else scale)

    def _run(
        self,
        step: TrainingPass,
        context: AbstractContextManager[Any] | None,
        *,
        scale: float = 1.0,
        watch: StepWatch | None = None,
        look: Callable[[LightningModule], AbstractContextManager[None]] | None = None,
    ) -> Gradients:
        try:
            watch = watch or StepWatch(step.module, scale)
            with contextlib.nullcontext() if look is None else look(step.module):
                step.run(self._batch, self._batch_idx, context=context, scale=scale, step_watch=watch, fp32_draws=True)
            return step.true_gradients()
        finally:
            step.close()

    def _measure(
        self, fault: GradientFault, fp32_run: Gradients, setting: str, run: Callable[[], Gradients]
    ) -> TriedRemedy:
        """Return the SQNR of the lost gradient, or of all gradients if it is lower; the same on all ranks."""
        row_of = rows_of_parameters(self._module, self._by)
        device = self._trainer.strategy.root_device
        sums = torch.zeros((2, 3), dtype=widest_dtype(device), device=device)
        try:
            amp_run = run()
            for name, gradient in fp32_run.items():
                one = fidelity_sums(gradient, amp_run.get(name, torch.zeros_like(gradient))).to(sums)
                sums[0] += one
                if fault.row.name in (TOTAL, row_of[name] or type(self._module).__name__):
                    sums[1] += one
        except Exception:  # a setting that cannot run does not help
            sums.fill_(math.nan)
        if self._trainer.world_size > 1:
            sums = self._trainer.strategy.reduce(sums, reduce_op="sum")
        total, lost = (float(fidelity(row)[0]) for row in sums.cpu())
        sqnr_db = math.nan if math.isnan(total + lost) else min(total, lost)
        return TriedRemedy(setting, sqnr_db, works=sqnr_db >= LOW_DB)


def _rounded_away(outputs: OutputComparison) -> list[str]:
    """Name the modules whose output is far from fp32, without the modules around them. This waits for the device."""
    sums: dict[str, Tensor] = {}
    for call, _ in outputs.calls:
        if call.name and call.sums is not None:
            added = call.sums[:, :3].sum(0)
            sums[call.name] = sums[call.name] + added if call.name in sums else added
    low = [name for name, added in sums.items() if float(fidelity(added)[0]) < _ROUNDED_AWAY_DB]
    return [name for name in low if not any(other.startswith(f"{name}.") for other in low)]
