"""What helps a gradient that mixed precision loses: the same batch once more with each setting that may."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from typing_extensions import final

from lightning_amp._compat import _modules
from lightning_amp._containers import tensors_in
from lightning_amp._text import exact, literal
from lightning_amp.casting import Fp32Modules
from lightning_amp.numerics import fidelity, fidelity_sums, widest_dtype
from lightning_amp.precision import AmpPrecision
from lightning_amp.reports import TOTAL, GradientLoss, Trial
from lightning_amp.shadow._ranks import gather
from lightning_amp.shadow._step_watch import StepWatch, lossy_derivatives, true_gradients, use
from lightning_amp.shadow._training_pass import TrainingPass

_MOST_MODULES = 4
_MIDDLE_SCALE = 2.0**10


@final
class GradientTrials:
    """Runs a batch in fp32, and then with one setting after the other until the gradient is near that of fp32.

    Args:
        trainer: At the start of a batch. All ranks must call, with the same arguments but for their batch.
        module: Is not changed.
        batch: Of the sample that lost its gradient.
        batch_idx: Its index.
        by: What a row of the table is.
        scale: The loss scale.

    Cost: a step in fp32, one or two as training takes them, and one for each setting.

    """

    def __init__(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int, by: str, scale: float
    ) -> None:
        self._trainer, self._module, self._batch, self._batch_idx = trainer, module, batch, batch_idx
        self._loss_scale = scale
        self._device_type = trainer.strategy.root_device.type
        self._row_of = {n: n.rpartition(".")[0] if by == "module" else n for n in _modules.plain_parameters(module)}
        self._by = by
        self._true: dict[str, Tensor] = {}

    def run(self, found: GradientLoss, recommended_scale: float | None) -> list[Trial]:
        """Try what may help, in the order of what it costs; stop at the first that does.

        Args:
            found: What is lost.
            recommended_scale: The largest loss scale at which the gradients so far fit into fp16.

        """
        plugin = self._trainer.precision_plugin
        if found.kind in ("nan", "infinite") or not isinstance(plugin, AmpPrecision):
            return []
        outputs = _Outputs() if found.kind == "rounding" else None
        try:
            exact = TrainingPass(self._trainer, self._module, upcast=True)
            self._true = self._run(exact, None, watching=outputs)
        except Exception:  # out of memory; other ranks may go on, and this one with them
            self._true = {}
        trials: list[Trial] = []
        for setting, attempt in self._settings(found, recommended_scale, outputs):
            trials.append(Trial(setting, self._measure(found, attempt)))
            if trials[-1].works:
                break
        return trials

    def scaled_grad_helps(self) -> bool:
        """Return whether derivatives inside of the loss are near those of fp32 with `scaled_grad`, on all ranks."""
        helps = False
        try:
            exact = TrainingPass(self._trainer, self._module, upcast=True)
            true = StepWatch(exact.module)
            self._run(exact, None, watch=true)
            step = TrainingPass(self._trainer, self._module)
            differentiate = step.module.trainer.precision_plugin.scaled_grad  # pyright: ignore[reportAttributeAccessIssue]
            scaled = StepWatch(step.module, self._loss_scale, differentiate=differentiate)
            self._run(step, step.forward_context(), scale=self._loss_scale, watch=scaled)
            helps = bool(scaled.derivatives) and not lossy_derivatives(true, scaled)
        except Exception:
            helps = False
        return all(gather(self._trainer, helps))

    def _settings(
        self, found: GradientLoss, recommended_scale: float | None, outputs: _Outputs | None
    ) -> list[tuple[str, Callable[[], dict[str, Tensor]]]]:
        precision, settings = found.total.precision, list[tuple[str, Callable[[], dict[str, Tensor]]]]()
        if found.kind == "length":
            if found.clipped:
                attempt = partial(self._unscaled, min(self._loss_scale, recommended_scale or self._loss_scale))
                settings.append(("`lightning_amp.precision.unscale_(self.trainer, optimizer)` before it", attempt))
            return settings
        if precision == "fp16" and recommended_scale is not None:
            settings += self._other_scale(found, recommended_scale)
        if precision == "fp8":
            return [("'bf16'", partial(self._in_precision, precision="bf16", scale=1.0))]
        for name in self._fp32_candidates(found, outputs):
            settings.append((f"`fp32_modules=[{name!r}]`", partial(self._in_precision, fp32=(name,))))
        if precision == "fp16":
            settings.append(("'bf16'", partial(self._in_precision, precision="bf16", scale=1.0)))
        return settings

    def _other_scale(self, found: GradientLoss, scale: float) -> list[tuple[str, Callable[[], dict[str, Tensor]]]]:
        if scale == self._loss_scale or (found.kind == "rounding" and scale < self._loss_scale):
            return []
        text = f"`DynamicLossScaler(init_scale={literal(scale)})`"
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        if 1 <= scale < self._loss_scale and isinstance(scaler, torch.amp.GradScaler):
            falls = scaler.get_backoff_factor() < 1 and scale >= getattr(scaler, "min_scale", 0.0)
            text = f"a loss scale of {exact(scale)}, to which it falls by itself" if falls else text
        if scale < 1:  # the same, for a loss scale that has room on both sides
            text = f"dividing the loss by {literal(_MIDDLE_SCALE / scale)}"
        return [(text, partial(self._in_precision, scale=scale))]

    def _fp32_candidates(self, found: GradientLoss, outputs: _Outputs | None) -> list[str]:
        """Name the module whose gradient is lost first, those around it, and the one whose output is rounded away."""
        names = {_modules.plain_name(name) for name, _ in self._module.named_modules() if name}
        first = found.row.name if self._by == "module" else found.row.name.rpartition(".")[0]
        first = "" if found.row.name == TOTAL else first
        candidates = [first]
        if outputs is not None:
            comparison = _Outputs(outputs)
            with contextlib.suppress(Exception):
                rounded = TrainingPass(self._trainer, self._module)
                self._run(rounded, rounded.forward_context(), scale=self._loss_scale, watching=comparison)
            candidates = [*comparison.rounded_away()[:2], first]
        while "." in first:
            first = first.rpartition(".")[0]
            candidates.append(first)
        mine = [name for name in dict.fromkeys(candidates) if name in names][:_MOST_MODULES]
        return gather(self._trainer, mine)[0]

    # -- runs ----------------------------------------------------------------------------------------------------------

    def _in_precision(
        self, *, precision: str = "", scale: float | None = None, fp32: Sequence[str] = ()
    ) -> dict[str, Tensor]:
        step = TrainingPass(self._trainer, self._module, precision=precision)
        if fp32:
            Fp32Modules(step.module, fp32, self._device_type, active=True)
        return self._run(step, step.forward_context(), scale=self._loss_scale if scale is None else scale)

    def _unscaled(self, scale: float) -> dict[str, Tensor]:
        step = TrainingPass(self._trainer, self._module)
        watch = StepWatch(step.module, scale, unscale_before_clipping=True)
        return self._run(step, step.forward_context(), scale=scale, watch=watch)

    def _run(
        self,
        step: TrainingPass,
        context: AbstractContextManager[Any] | None,
        *,
        scale: float = 1.0,
        watch: StepWatch | None = None,
        watching: _Outputs | None = None,
    ) -> dict[str, Tensor]:
        try:
            watch = watch or StepWatch(step.module, scale)
            use(watch, step)
            with watch, contextlib.nullcontext() if watching is None else watching.of(step.module):
                step.run(self._batch, self._batch_idx, context=context, scale=scale, fp32_draws=True)
            return true_gradients(watch, step, scale)
        finally:
            step.close()

    def _measure(self, found: GradientLoss, attempt: Callable[[], dict[str, Tensor]]) -> float:
        """Return the SQNR of what was lost, or of all where that is lower; the same on all ranks."""
        device = self._trainer.strategy.root_device
        sums = torch.zeros((2, 3), dtype=widest_dtype(device), device=device)
        try:
            gradients = attempt()
            for name, true in self._true.items():
                one = fidelity_sums(true, gradients.get(name, torch.zeros_like(true))).to(sums)
                sums[0] += one
                if found.row.name in (TOTAL, self._row_of[name] or type(self._module).__name__):
                    sums[1] += one
        except Exception:  # what does not run does not help
            sums.fill_(math.nan)
        if self._trainer.world_size > 1:
            sums = self._trainer.strategy.reduce(sums, reduce_op="sum")
        total, lost = (float(fidelity(row)[0]) for row in sums.cpu())
        return math.nan if math.isnan(total + lost) else min(total, lost)


@final
class _Outputs:
    """Outputs of the modules of one run, or how those of a second run differ from them.

    Args:
        true: Those of the run in fp32, for the second.

    """

    def __init__(self, true: _Outputs | None = None) -> None:
        self.values: dict[tuple[str, int], list[Tensor]] = {}
        self._sums: dict[str, list[Tensor]] = {}
        self._true, self._handles, self._calls = true, list[Any](), dict[str, int]()

    def of(self, module: nn.Module) -> _Outputs:
        """Watch these modules inside of the context."""
        for full_name, child in module.named_modules():
            if full_name and not isinstance(child, torch.jit.ScriptModule):
                after = partial(self._after, _modules.plain_name(full_name))
                self._handles.append(child.register_forward_hook(after, with_kwargs=True))
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @torch.no_grad()
    def _after(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        number = self._calls[name] = self._calls.get(name, 0) + 1
        outputs = [t.detach() for _, t in tensors_in(output) if t.is_floating_point() and t.layout is torch.strided]
        if self._true is None:
            self.values[name, number] = outputs
            return
        true = self._true.values.get((name, number), [])
        if len(true) == len(outputs) and all(a.shape == b.shape for a, b in zip(true, outputs, strict=True)):
            sums = [fidelity_sums(a, b) for a, b in zip(true, outputs, strict=True)]
            self._sums.setdefault(name, []).extend(sums)

    def rounded_away(self) -> list[str]:
        """Name the modules whose output is far from that of fp32, the first first: of those around each, the innermost.

        Waits for the device.
        """
        lows = {name: float(fidelity(torch.stack(sums).sum(0))[0]) for name, sums in self._sums.items() if sums}
        low = [name for name, decibels in lows.items() if decibels < 20]
        return [name for name in low if not any(other.startswith(f"{name}.") for other in low)]
