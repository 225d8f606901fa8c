"""`FSDPAmpPrecision`: the same pipeline for `FSDPStrategy` (FSDP1), whose gradients are shards.

Parameters are gathered, and gradients reduced, in the parameters' own float32; autocast casts inside each layer, as it
does on one device. That is the one way in which sharding changes nothing: norms, residuals, losses and `fp32_modules`
see float32 parameters, and a batch is not cast on its way in. What it costs, and how to gather in half precision
instead, is in `docs/guide/fsdp.md`.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.plugins import FSDPPrecision
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision
from torch.optim import Optimizer
from typing_extensions import override

from lightning_amp import _messages
from lightning_amp._arguments import require
from lightning_amp._compat import _modules
from lightning_amp.numerics import HALF_DTYPES
from lightning_amp.precision import _refusals
from lightning_amp.precision._amp import AmpPrecision
from lightning_amp.precision._ledger import STOCK_FSDP_KEY
from lightning_amp.scaling import parameters

_REDUCE_DTYPES = (torch.float32, *HALF_DTYPES)


class FSDPAmpPrecision(AmpPrecision, FSDPPrecision):  # type: ignore[misc]
    r"""`AmpPrecision` for `FSDPStrategy`: fully sharded training in fp16, bf16 or fp32 that differs in rounding only.

    .. code-block:: python

        trainer = L.Trainer(strategy="fsdp", plugins=[FSDPAmpPrecision("bf16")])

    Everything that :class:`AmpPrecision` says holds: any scaler, fused optimizers, manual optimization, clipping by
    norm and by value, skipped steps that leave no trace. Whether a step is skipped is agreed by all ranks, also by
    those that hold no shard of a parameter, and the norm that clips is that of the whole gradient.

    It is a `MixedPrecision` and an `FSDPPrecision`: the first for what looks for the precision of a run
    (`ThroughputMonitor`), the second because the strategy takes nothing else.

    You would *not* use it with `ModelParallelStrategy` (FSDP2), which takes :class:`AmpPrecision`.

    Args:
        precision: See :class:`AmpPrecision`, as for the next four.
        scaler: A `ShardedGradScaler` too; its process group is not used, all ranks agree.
        fp32_modules: Their parameters are gathered in float32 anyway, like all others.
        eval_precision: Validate, test and predict in another precision.
        skip_nonfinite: Skip a step with non-finite gradients in bf16 and fp32 too.
        reduce_dtype: What gradients are summed over the ranks in: `torch.float32`, or `torch.bfloat16` or
            `torch.float16` to halve that traffic. Small gradients lose digits there, and in `torch.float16` a sum can
            overflow, which skips the step. float64 parameters are reduced in float64, unless 16 bits are asked for.

    Raises:
        ValueError: For what :class:`AmpPrecision` refuses, for another `reduce_dtype`; when the Trainer attaches, for
            `fp32_modules` or fp32 evaluation where the strategy was told to gather parameters in half precision.
        TypeError: When the Trainer attaches, for another strategy.

    Cost: one reduction of four numbers per step, as for :class:`AmpPrecision` on several devices, and another one of
    one number for clipping by norm. Clipping by norm is not folded into a fused optimizer's step: it reads the
    gradients twice more. Parameters travel in float32.

    """

    _offers_fallback = False

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
        """Return what the strategy wraps with: only the reduction has a dtype, all else stays as the module has it."""
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
        if theirs.param_dtype in HALF_DTYPES:
            asks = {
                "fp32_modules": bool(self.fp32_modules),
                "precision": not self._settled().mixed,
                "eval_precision": not self._run.forward.evaluation.mixed,
            }
            for argument, fp32 in asks.items():
                if fp32:
                    raise ValueError(
                        f"`FSDPStrategy(mixed_precision=...)` gathers parameters in {theirs.param_dtype}, so nothing"
                        f" can compute in fp32, which `{argument}` asks for. Leave `param_dtype` out there, or ask for"
                        " none here."
                    )
        _messages.info(
            f"lightning_amp: `FSDPStrategy(mixed_precision=...)` decides how parameters, gradients (in"
            f" {theirs.reduce_dtype or theirs.param_dtype or torch.float32}) and buffers are cast;"
            f" `reduce_dtype={self.reduce_dtype}` of the plugin is not used."
        )
        return module

    # What `FSDPPrecision` would do besides: parameters, inputs and outputs in half precision.

    @override
    def tensor_init_context(self) -> contextlib.AbstractContextManager[Any]:
        return super(FSDPPrecision, self).tensor_init_context()

    @override
    def module_init_context(self) -> contextlib.AbstractContextManager[Any]:
        return super(FSDPPrecision, self).module_init_context()

    @override
    def convert_output(self, data: Any) -> Any:
        return super(FSDPPrecision, self).convert_output(data)

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
    """Clip the gradients of `params` to a total 2-norm of `max_norm`; all ranks together, without waiting.

    Args:
        model: What the strategy trains. The root of all sharded modules or, where the user wrapped submodules in
            `configure_model`, the module that holds several such roots.
        params: Of one optimizer. `FullyShardedDataParallel.clip_grad_norm_` would take all of its module's, those of
            another optimizer too.
        max_norm: Not negative.

    """
    whole = isinstance(model, FullyShardedDataParallel)
    roots = [model] if whole else FullyShardedDataParallel.fsdp_modules(model, root_only=True)
    mine = {id(p) for p in params}
    others = [(p, p.grad) for p in model.parameters() if p.grad is not None and id(p) not in mine]
    for param, _ in others:
        param.grad = None
    try:
        if whole:
            _clip_root(model, max_norm)
            return
        norms = [_clip_root(root, math.inf) for root in roots]  # measures and leaves them as they are
    finally:
        for param, grad in others:
            param.grad = grad
    sharded = {id(p) for root in roots for p in root.parameters()}
    plain = [p.grad for p in params if p.grad is not None and id(p) not in sharded]
    if plain:
        norms.append(nn.utils.get_total_norm(plain))
    grads = [p.grad for p in params if p.grad is not None]
    if grads:
        total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
        nn.utils.clip_grads_with_norm_(params, max_norm, total)


def _clip_root(root: nn.Module, max_norm: float) -> Tensor:
    assert isinstance(root, FullyShardedDataParallel)
    if any(p.grad is not None for p in root.parameters()):
        return root.clip_grad_norm_(max_norm)
    with warnings.catch_warnings():  # a rank may well hold no shard of what one optimizer trains
        warnings.filterwarnings("ignore", message="Called FSDP.clip_grad_norm_")
        return root.clip_grad_norm_(max_norm)
