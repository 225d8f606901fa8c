"""Run a training step, forward and backward, without changing the module, its gradients or its optimizers."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import final

from lightning_amp._compat import _modules
from lightning_amp._compat._names import LightningModule, LightningOptimizer, Trainer, is_overridden
from lightning_amp.measure import MatmulFlops
from lightning_amp.numerics import dense, names_of_nonfinite
from lightning_amp.precision import AmpPrecision
from lightning_amp.shadow._fsdp import replace
from lightning_amp.shadow._module_copy import copy_batch, read_only
from lightning_amp.shadow._ranks import together
from lightning_amp.shadow._shadow import Shadow
from lightning_amp.shadow._views import NOTHING, View, replaying
from lightning_amp.tracing import Fp32Draws, RandomState, Trace, fp32_throughout, paired_random

BOUNDARY = __file__
"""File that calls the step: a `Trace` searches for the user's line in the frames inside of it."""


@final
class TrainingPass:
    """Runs `training_step` on a shadow that has its own parameters.

    In manual optimization the shadow's optimizers step nothing: `zero_grad` and `toggle_optimizer` work on the shadow's
    parameters; `step` calls its closure and keeps the gradients; clipping and schedules do nothing. The scaler that
    `training_step` finds in the plugin scales by the scale of the run, and unscales the shadow's gradients.

    Args:
        trainer: The trainer, inside a training epoch.
        module: The real module. Neither is changed.
        upcast: Convert half-precision parameters and buffers to float32, for a run in fp32.

    Attributes:
        notes: A sentence if a run in fp32 left out casts to half precision.
        is_edited: Whether `on_after_backward` changed gradients.

    Cost: building it copies the parameters, buffers and attributes. Running it is one forward and one backward.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, *, upcast: bool = False) -> None:
        self._trainer = trainer
        self._device_type = trainer.strategy.root_device.type
        self._automatic = module.automatic_optimization
        self._factor, self.notes, self.is_edited = 1.0, list[str](), False
        self._losses: list[Tensor] = []
        self._stepped: dict[nn.Parameter, Tensor] = {}  # true gradients
        self._trace: Trace | None = None
        plugin = replaying(trainer.precision_plugin, clip_gradients=NOTHING, unscale_=self._unscale)
        if isinstance(getattr(plugin, "scaler", None), torch.amp.GradScaler):
            scaler = View(plugin.scaler, scale=self._scaled, unscale_=self._unscale, get_scale=lambda: self._factor)
            vars(plugin).update(scaler=scaler)
        # `LightningModule.optimizers()` reads private attributes. Remove when it reads them from the Trainer.
        names, strategy = ("_lightning_optimizers", "optimizers"), trainer.strategy
        stand_ins: Any = {name: [self._stand_in(one) for one in getattr(strategy, name)] for name in names}
        schedules: list[Any] = [copy.copy(config) for config in trainer.lr_scheduler_configs]
        for config in schedules:
            config.scheduler = read_only(config.scheduler, "lr_schedulers()")
        # the module may hold them, too
        views = [*(one for each in stand_ins.values() for one in each), *(config.scheduler for config in schedules)]
        optimized = [p for optimizer in trainer.optimizers for group in optimizer.param_groups for p in group["params"]]
        self._shadow = Shadow(
            trainer,
            module,
            strategy_attributes={
                **stand_ins,
                "precision_plugin": plugin,
                "lr_scheduler_configs": schedules,
                "backward": self._backward,
            },
            upcast=upcast,
            parameters=optimized,
            replaced={id(vars(view)["view_target"]): view for view in views},
        )
        self.module = self._shadow.module
        with ExitStack() as undo:
            undo.callback(self._shadow.close)
            undo.enter_context(self._shadow.active())
            # Parameters correspond by position, because a parameter that two modules share is also shared in the copy.
            twins = dict(zip(module.parameters(), self.module.parameters(), strict=True))
            self._real = {*twins, *optimized}.difference(twins.values())
            self._true = set(self.module.parameters())  # have no gradient, or a true one: no scaled backward came since
            self._stand_ins = [one for each in stand_ins.values() for one in each]
            for stand_in in self._stand_ins:
                groups = [
                    {**group, "params": [twins[p] for p in group["params"] if p in twins]}
                    for group in vars(stand_in)["view_target"].param_groups
                ]
                vars(stand_in).update(param_groups=groups)
            self._undo = undo.pop_all()

    def run(
        self,
        batch: Any,
        batch_idx: int,
        *,
        context: AbstractContextManager[Any] | None,
        random_state: RandomState | None = None,
        scale: float = 1.0,
        trace: Trace | None = None,
        fp32_draws: bool = False,
    ) -> Tensor | None:
        """Run one step and its backward, once, and restore the random generators.

        Args:
            batch: The batch; the step gets a copy.
            batch_idx: The index of the batch in the epoch.
            context: Entered around the step. `None`: step and backward are in fp32, also where the code casts to half.
            random_state: The random generators at the start; default: the present state.
            scale: The loss scale.
            trace: Entered for the run.
            fp32_draws: Whether to draw random numbers like a pass in fp32, for a comparison with such a pass.

        Returns:
            The unscaled loss; in manual optimization the sum of the losses that had a backward.
        """
        self._factor, self._trace = scale, trace
        shadow, plugin = self._shadow, self._trainer.precision_plugin
        fp8 = plugin.fp8_on(self.module) if isinstance(plugin, AmpPrecision) else nullcontext()
        with (
            shadow.running(),
            paired_random(self._device_type, random_state),
            torch.enable_grad(),
            _frozen(self._real),
            fp32_throughout(self._device_type, __file__, self.notes) if context is None else fp8,
            Fp32Draws() if fp32_draws else nullcontext(),
            trace or nullcontext(),
        ):
            batch = copy_batch(batch, upcast=context is None)
            if is_overridden("on_train_batch_start", shadow.module):
                shadow.call("on_train_batch_start", batch, batch_idx)
            with context or nullcontext():
                output = shadow.call("training_step", batch, batch_idx)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if self._automatic and isinstance(loss, Tensor):
                if trace is not None:
                    trace.note_loss(loss)
                self._backward(loss / self._trainer.accumulate_grad_batches)
                return loss.detach()
        return torch.stack([loss.sum() for loss in self._losses]).sum() if self._losses else None

    def gradients(self) -> dict[str, Tensor]:
        """Return the true gradients of the last run by parameter name, as their optimizer would have stepped with them.

        Of a sharded gradient it returns this rank's part.
        """
        parameters = _modules.plain_parameters(self.module)
        found = {name: self._stepped.get(p, self._true_gradient(p)) for name, p in parameters.items()}
        return {name: dense(gradient) for name, gradient in found.items() if gradient is not None}

    def _true_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        gradient = parameter.grad
        if gradient is None or parameter in self._true or self._factor == 1:
            return gradient
        return gradient / self._factor  # not in place, because other code may hold the gradient

    def close(self) -> None:
        """Free the shadow, and circular references, which would keep its tensors until the next garbage collection."""
        self._stepped.clear()
        for parameter in self.module.parameters():
            parameter.grad = None
        self._undo.close()
        self._trace = None
        for stand_in in self._stand_ins:
            vars(stand_in).update(step=NOTHING, zero_grad=NOTHING, toggle_model=NOTHING, optimizer=None)

    # --- stand-ins for optimizers and strategy ---

    def _backward(self, loss: Tensor, optimizer: Any = None, *args: Any, **kwargs: Any) -> None:
        self._losses.append(loss.detach().float())
        if self._trace is not None and not self._automatic:
            self._trace.note_loss(loss)
        with torch.autocast(self._device_type, enabled=False), ExitStack() as watching:
            scaled = self._scaled(loss)
            run = scaled.backward if self._trace is None else partial(_watched_backward, scaled)
            if is_overridden("backward", self.module):  # which may enter a context, such as `loss_parallel`
                if self._trace is not None:  # it calls `loss.backward`, where the trace would see no operation
                    vars(scaled)["backward"] = run
                    watching.callback(vars(scaled).clear)
                run = partial(self.module.backward, scaled)
            if self._trace is not None:
                watching.enter_context(self._trace.in_backward())
            run(*args, **kwargs)
        if is_overridden("on_after_backward", self.module):  # it may clip, as `training_step` may
            before = self._sizes()
            self._shadow.call("on_after_backward")
            self.is_edited |= before != self._sizes()

    def _sizes(self) -> list[float]:
        return [float(dense(p.grad).float().norm()) for p in self.module.parameters() if p.grad is not None]

    def _scaled(self, outputs: Any) -> Any:
        """Multiply losses by the scale, and true gradients, because the next backward adds to them at the scale."""
        with _modules.outside_function_modes():
            while self._true:
                parameter = self._true.pop()
                parameter.grad = None if parameter.grad is None else parameter.grad * self._factor
        if isinstance(outputs, Tensor):
            # A scaler multiplies by a tensor, too: a loss in half precision becomes float32.
            return outputs * torch.as_tensor(self._factor, dtype=torch.float32, device=outputs.device)
        return [self._scaled(output) for output in outputs]

    def _unscale(self, optimizer: Any) -> None:
        with _modules.outside_function_modes():
            for parameter in _parameters(optimizer):
                parameter.grad = self._true_gradient(parameter)
                self._true.add(parameter)

    def _stand_in(self, optimizer: Any) -> Any:
        stand_in = read_only(optimizer, "optimizers()")
        vars(stand_in).update(
            step=partial(self._step, stand_in),
            zero_grad=partial(self._zero_grad, stand_in),
            toggle_model=partial(self._toggle_model, stand_in),
            add_param_group=NOTHING,
        )
        if isinstance(optimizer, LightningOptimizer):  # user code may step the optimizer inside the closure
            vars(stand_in).update(optimizer=stand_in)
        return stand_in

    def _step(self, stand_in: Any, closure: Any = None, **kwargs: Any) -> Any:
        result = None if closure is None else closure()
        with _modules.outside_function_modes():
            for parameter in _parameters(stand_in):
                gradient, before = self._true_gradient(parameter), self._stepped.get(parameter)
                # a step of this batch that overflowed is the one to explain
                if gradient is not None and not (before is not None and names_of_nonfinite([("", before)])):
                    # a later backward of another loss may add to `parameter.grad`
                    self._stepped[parameter] = gradient.clone() if gradient is parameter.grad else gradient
        return result

    def _zero_grad(self, stand_in: Any, set_to_none: bool = True) -> None:
        for parameter in _parameters(stand_in):  # never in place, because `gradients` may have returned these tensors
            parameter.grad = None

    @contextmanager
    def _toggle_model(self, stand_in: Any, sync_grad: bool = True) -> Generator[None]:
        self.module.toggle_optimizer(stand_in)
        yield
        self.module.untoggle_optimizer(stand_in)


@contextmanager
def _frozen(parameters: Iterable[nn.Parameter]) -> Generator[None]:
    """Keep gradients away from the real parameters: the step may reach these through a global or shared object."""
    with ExitStack() as undo:
        for parameter in parameters:
            replace(undo, parameter, requires_grad=False)
        yield


def _watched_backward(
    loss: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = (),
) -> None:
    """Do what `loss.backward(...)` does, so that a `TorchFunctionMode` sees the operations inside.

    A mode handles each public function as one call, and is off during that call. So it would see neither a user's own
    Function nor the operations that activation checkpointing runs again. Remove when a mode stays on in a backward.
    """
    from torch.autograd.graph import _engine_run_backward

    gradients = (torch.ones_like(loss) if gradient is None else gradient,)
    keep = create_graph if retain_graph is None else retain_graph
    leaves = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs or ())
    _engine_run_backward((loss,), gradients, keep, create_graph, leaves, allow_unreachable=True, accumulate_grad=True)


def _parameters(stand_in: Any) -> list[nn.Parameter]:
    return [parameter for group in stand_in.param_groups for parameter in group["params"]]


def matmul_flops(trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> dict[str, float]:
    """Return the share of each dtype in the FLOPs of matrix products, from 0 to 1, the largest first; empty without.

    It runs the step once more, forward and backward, on a copy of the module; compiled code runs eagerly. Convolutions
    and attention count as matrix products.
    """
    with together(trainer, agree=True), closing(TrainingPass(trainer, module)) as again, MatmulFlops() as flops:
        again.run(batch, batch_idx, context=trainer.precision_plugin.forward_context())
    total = sum(flops.by_dtype.values())
    return {name: count / total for name, count in flops.by_dtype.most_common() if count}
