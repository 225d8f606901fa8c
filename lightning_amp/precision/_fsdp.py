"""`FSDPAmpPrecision`: the same pipeline for `FSDPStrategy` (FSDP1), whose gradients are shards.

Parameters are gathered and gradients reduced in float32, and autocast casts inside each layer, as on one device. Only
then does sharding change no result. Norms, residuals, losses and `fp32_modules` get float32 parameters, and batches are
not cast. `docs/guide/many_devices.md` has the cost, and explains how to gather in half precision instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision
from torch.optim import Optimizer
from typing_extensions import override

from lightning_amp import _messages
from lightning_amp._arguments import require
from lightning_amp._compat import _modules
from lightning_amp._compat._names import FSDPPrecision, Precision
from lightning_amp.numerics import HALF_DTYPES
from lightning_amp.precision import _refusals
from lightning_amp.precision._amp import STOCK_FSDP_KEY, AmpPrecision
from lightning_amp.precision._clipping import joint_norm
from lightning_amp.scaling import parameters

_REDUCE_DTYPES = (torch.float32, *HALF_DTYPES)


class FSDPAmpPrecision(AmpPrecision, FSDPPrecision):  # type: ignore[misc]
    r"""`AmpPrecision` for `FSDPStrategy`: fully sharded training in fp16, bf16 or fp32 that differs in rounding only.

    .. code-block:: python

        trainer = L.Trainer(strategy="fsdp", plugins=[FSDPAmpPrecision("bf16")])

    It does all that :class:`AmpPrecision` does, with any scaler, fused optimizers, manual optimization, and clipping by
    norm and by value; skipped steps leave no trace. All ranks agree on each skip, even ranks without a shard of a
    parameter. Clipping uses the norm of the whole gradient.

    It is an `FSDPPrecision`, because the strategy takes nothing else, and a `MixedPrecision`, by which
    `ThroughputMonitor` recognises the precision of a run.

    Do *not* use it with `ModelParallelStrategy` (FSDP2), which takes :class:`AmpPrecision`.

    Args:
        precision: See :class:`AmpPrecision`, also for the next four arguments.
        scaler: A `ShardedGradScaler` too, whose settings are taken. All ranks agree on each skip anyway.
        fp32_modules: Their parameters are gathered in float32 anyway, like all others.
        eval_precision: Validate, test and predict in another precision.
        skip_nonfinite: Skip a step with non-finite gradients in bf16 and fp32 too.
        reduce_dtype: The dtype in which gradients are summed over the ranks: `torch.float32`, or `torch.bfloat16` or
            `torch.float16` to halve that traffic. Small gradients lose digits there, and in `torch.float16` a sum can
            overflow, which skips the step. By default float64 parameters are reduced in float64.

    Raises:
        ValueError: For an argument that :class:`AmpPrecision` refuses, or another `reduce_dtype`. When the Trainer
            attaches, for `fp32_modules` or fp32 evaluation if the strategy gathers parameters in half precision.
        TypeError: When the Trainer attaches, for another strategy.

    Cost: one reduction of four numbers per step, as for :class:`AmpPrecision` on several devices, and one of a single
    number for clipping by norm. Clipping by norm is not part of a fused optimizer's step, and reads the gradients twice
    more. Parameters travel in float32.

    """

    def __init__(
        self,
        precision: str | int | torch.dtype = "auto",
        *,
        scaler: torch.amp.GradScaler | float | None = None,
        fp32_modules: Sequence[type[nn.Module] | str] = (),
        eval_precision: str | int | torch.dtype | None = None,
        skip_nonfinite: bool = True,
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        legal = ", ".join(f"`{dtype}`" for dtype in _REDUCE_DTYPES)
        require(reduce_dtype in _REDUCE_DTYPES, "reduce_dtype", f"one of {legal}", reduce_dtype)
        if precision == "fp8":
            raise ValueError(
                "`FSDPAmpPrecision('fp8')` is not supported: `FSDPStrategy` hands layers flat views of their weights."
                f" {_refusals.FP8_SHARDED}."
            )
        self.reduce_dtype = reduce_dtype
        AmpPrecision.__init__(
            self,
            precision,
            scaler=scaler,
            fp32_modules=fp32_modules,
            eval_precision=eval_precision,
            skip_nonfinite=skip_nonfinite,
        )

    @property
    @override
    def mixed_precision_config(self) -> FSDPMixedPrecision:
        """Return the configuration to wrap with, which sets the dtype of the reduction only."""
        reduce_dtype: torch.dtype | None = self.reduce_dtype
        if reduce_dtype == torch.float32 and self._run is not None:
            doubles = any(p.dtype == torch.float64 for p in self._run.module.parameters())
            reduce_dtype = None if doubles else reduce_dtype
        return _modules.fsdp_mixed_precision(reduce_dtype)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        module = super().convert_module(module)
        assert self._run is not None
        theirs: FSDPMixedPrecision | None = self._run.module.trainer.strategy.mixed_precision  # pyright: ignore[reportAttributeAccessIssue]
        if theirs is None:
            return module
        forward = self._run.forward
        wants_fp32 = self.fp32_modules or not (forward.training.mixed and forward.evaluation.mixed)
        if theirs.param_dtype in HALF_DTYPES and wants_fp32:
            raise ValueError(
                f"`FSDPStrategy(mixed_precision=...)` gathers parameters in {theirs.param_dtype}, so that nothing can"
                " compute in fp32, which `fp32_modules`, `precision` or `eval_precision` asks for. Leave `param_dtype`"
                " out."
            )
        _messages.info(
            f"lightning_amp: `FSDPStrategy(mixed_precision=...)` decides how parameters, gradients (in"
            f" {theirs.reduce_dtype or theirs.param_dtype or torch.float32}) and buffers are cast;"
            f" `reduce_dtype={self.reduce_dtype}` of the plugin is not used."
        )
        return module

    # The methods of `FSDPPrecision` would make parameters, inputs and outputs half precision.
    tensor_init_context = Precision.tensor_init_context
    module_init_context = Precision.module_init_context
    convert_input = Precision.convert_input
    convert_output = Precision.convert_output

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:  # type: ignore[override]
        """Clip by the norm of the whole gradient of `optimizer`, summed over the shards of all ranks."""
        model = None if self._run is None else self._run.module.trainer.strategy.model
        if model is None:
            raise RuntimeError(
                "Clipping by norm needs the sharded model of a running Trainer, and the run has ended. Clip before"
                " `on_fit_end`."
            )
        clip_grad_norm_(model, list(parameters(optimizer)), float(clip_val))

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self.scaler is not None:
            checkpoint[STOCK_FSDP_KEY] = self.scaler.state_dict()


def clip_grad_norm_(model: nn.Module, params: Sequence[nn.Parameter], max_norm: float) -> None:
    """Clip the gradients of one optimizer to a total 2-norm of `max_norm`; all ranks together, without waiting.

    `FullyShardedDataParallel.clip_grad_norm_` would clip the gradients of other optimizers too. `model` is the root of
    all sharded modules, or holds several such roots if the user wrapped submodules in `configure_model`.
    """
    roots = FullyShardedDataParallel.fsdp_modules(model, root_only=True)
    mine = {id(p) for p in params}
    others = [(p, p.grad) for p in model.parameters() if p.grad is not None and id(p) not in mine]
    for param, _ in others:
        param.grad = None
    try:
        norms = [_norm(root) for root in roots]
    finally:
        for param, grad in others:
            param.grad = grad
    sharded = {id(p) for root in roots for p in root.parameters()}
    plain = [p.grad for p in params if p.grad is not None and id(p) not in sharded]
    if plain:
        norms.append(nn.utils.get_total_norm(plain))
    nn.utils.clip_grads_with_norm_(params, max_norm, joint_norm(norms))


def _norm(root: FullyShardedDataParallel) -> Tensor:
    """Return the norm over all ranks. It is below this limit, so that the gradients stay."""
    limit = torch.finfo(torch.float32).max
    if any(p.grad is not None for p in root.parameters()):
        return root.clip_grad_norm_(limit)
    with warnings.catch_warnings():  # a rank may hold no shard that this optimizer trains
        warnings.filterwarnings("ignore", message="Called FSDP.clip_grad_norm_")
        return root.clip_grad_norm_(limit)
