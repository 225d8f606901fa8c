"""A training step, forward and backward, that leaves no trace: not on the module, its gradients, or its optimizers."""

from __future__ import annotations

import copy
import gc
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from typing_extensions import final

from lightning_amp._compat import _lightning, _modules
from lightning_amp.precision import AmpPrecision
from lightning_amp.shadow._module_copy import copy_batch
from lightning_amp.shadow._shadow import Shadow
from lightning_amp.shadow._views import View, replaying
from lightning_amp.tracing import Fp32Draws, OperationWatch, RandomState, Trace, fp32_throughout, paired_random

BOUNDARY = __file__
"""What calls the step: no line above it is the step's."""


@final
class TrainingPass:
    """Runs `training_step` on a shadow that has parameters of its own.

    In manual optimization the shadow's optimizers step nothing: `zero_grad` and `toggle_optimizer` work on the shadow's
    parameters, `step` calls its closure and keeps the gradients, clipping, unscaling and schedules do nothing. So do
    those that `training_step` calls on the plugin's scaler; its `scale` multiplies by that of the pass.

    Args:
        trainer: The trainer, inside a training epoch.
        module: The real module. Neither is changed.
        upcast: Parameters and buffers in half precision become float32. For a pass in fp32.
        precision: Of the step, by our name: a plugin that fell back goes on in another. Empty: as of now.

    Cost: building it copies the parameters, buffers and attributes. Running it is one forward and one backward.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, *, upcast: bool = False, precision: str = "") -> None:
        self._trainer, self._precision = trainer, precision
        self._device_type = trainer.strategy.root_device.type
        self._automatic = module.automatic_optimization
        self._factor: float | Tensor = 1.0
        self._stepped: dict[int, Tensor] = {}
        self._trace: Trace | None = None
        self._watch: OperationWatch | None = None
        plugin = replaying(trainer.precision_plugin, clip_gradients=_do_nothing, unscale_=_do_nothing)
        if isinstance(getattr(plugin, "scaler", None), torch.amp.GradScaler):
            vars(plugin).update(scaler=self._scaler(plugin.scaler))
        schedulers = [_idle_schedule(config) for config in trainer.lr_scheduler_configs]
        strategy = {"backward": self._backward, "precision_plugin": plugin, "lr_scheduler_configs": schedulers}
        stand_ins = _lightning.optimizer_attributes(trainer, self._stand_in)
        self._shadow = Shadow(
            trainer,
            module,
            trainer_attributes={
                "precision_plugin": plugin,
                "lr_scheduler_configs": schedulers,
                "optimizers": stand_ins["optimizers"],
            },
            strategy_attributes={**strategy, **stand_ins},
            own_parameters=True,
            upcast=upcast,
        )
        optimized = [p for optimizer in trainer.optimizers for group in optimizer.param_groups for p in group["params"]]
        self._real = list({id(parameter): parameter for parameter in (*module.parameters(), *optimized)}.values())
        # By position: a parameter that two modules share is one in the copy, too.
        pairs = zip(module.parameters(), self._shadow.module.parameters(), strict=True)
        twins = {id(real): own for real, own in pairs}
        for stand_in in (*stand_ins["_lightning_optimizers"], *stand_ins["optimizers"]):
            groups = [
                {**group, "params": [twins[id(p)] for p in group["params"] if id(p) in twins]}
                for group in stand_in.param_groups
            ]
            vars(stand_in).update(param_groups=groups)

        # A watched operation leaves some small objects behind. Collections would walk all objects of the process for
        # them, again and again; what is frozen they leave out.
        self._froze = gc.get_freeze_count() == 0
        if self._froze:
            gc.freeze()

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return what the step ran in."""
        plugin = self._trainer.precision_plugin
        if isinstance(plugin, AmpPrecision):
            return plugin.forward_context_of(self._precision)
        return plugin.forward_context()

    def _in_fp8(self) -> AbstractContextManager[None]:
        plugin = self._trainer.precision_plugin
        if not isinstance(plugin, AmpPrecision):
            return nullcontext()
        return plugin.fp8_on(self._shadow.module, self._precision)

    @property
    def module(self) -> LightningModule:
        """Return the shadow's module."""
        return self._shadow.module

    def run(
        self,
        batch: Any,
        batch_idx: int,
        *,
        context: AbstractContextManager[Any] | None,
        random_state: RandomState | None = None,
        scale: float | Tensor = 1.0,
        trace: Trace | None = None,
        watch: OperationWatch | None = None,
        fp32_draws: bool = False,
    ) -> Tensor | None:
        """Run one step and its backward; the random generators stay as they are.

        Args:
            batch: Copied before it is used.
            batch_idx: Its index in the epoch.
            context: Entered around the step. `None`: step and backward are in fp32, whatever the code casts to half.
            random_state: Where the random generators begin; default: as found.
            scale: What the loss is multiplied with before its backward.
            trace: Watches, if given; already entered.
            watch: Likewise.
            fp32_draws: Draw random numbers like a pass in fp32 does, for a comparison with one.

        Returns:
            The loss of automatic optimization, or the sum of those that had a backward; before scaling.
        """
        self._factor, self._trace, self._watch, self._losses = scale, trace, watch, list[Tensor]()
        self._stepped.clear()
        shadow = self._shadow
        whole = self._in_fp8() if context is not None else fp32_throughout(self._device_type)
        draws = Fp32Draws() if fp32_draws else nullcontext()
        with paired_random(self._device_type, random_state), torch.enable_grad(), _frozen(self._real), whole, draws:
            batch = copy_batch(batch, upcast=context is None)
            with shadow.reduce.suspended():
                if is_overridden("on_train_batch_start", shadow.module):
                    shadow.call("on_train_batch_start", batch, batch_idx)
                takes_index = is_param_in_hook_signature(shadow.module.training_step, "batch_idx", min_args=2)
                with context or nullcontext():
                    output = shadow.call("training_step", *((batch, batch_idx) if takes_index else (batch,)))
                loss = output.get("loss") if isinstance(output, Mapping) else output
                if self._automatic and isinstance(loss, Tensor):
                    if watch is not None:
                        watch.note_loss(loss)
                    self._backward(loss / self._trainer.accumulate_grad_batches)
                    return loss.detach()
        return torch.stack([loss.reshape(()) for loss in self._losses]).sum() if self._losses else None

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the last run by parameter name, as their optimizer would have stepped with them.

        Multiplied with the scale.
        """
        found: dict[str, Tensor] = {}
        for name, parameter in _modules.plain_parameters(self.module).items():
            gradient = self._stepped.get(id(parameter), parameter.grad)
            if gradient is not None:
                found[name] = gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient
        return found

    def forget_gradients(self) -> None:
        """Free them, before another run."""
        self._stepped.clear()
        for parameter in self.module.parameters():
            parameter.grad = None

    def close(self) -> None:
        """Free the shadow."""
        self.forget_gradients()
        self._shadow.close()
        if self._froze:
            gc.unfreeze()
            self._froze = False

    # --- what stands in for optimizers and strategy ---

    def _backward(self, loss: Tensor, optimizer: Any = None, *args: Any, **kwargs: Any) -> None:
        self._losses.append(loss.detach().float())
        if self._watch is not None:
            self._watch.note_loss(loss)
        with torch.autocast(self._device_type, enabled=False):
            scaled = self._scaled(loss)
            run = scaled.backward if self._watch is None else partial(_modules.watched_backward, scaled)
            with ExitStack() as looking:
                for one in (self._trace, self._watch):
                    if one is not None:
                        looking.enter_context(one.in_backward())
                run(*args, **kwargs)

    def _scaled(self, outputs: Any) -> Any:
        if isinstance(outputs, Tensor):
            # as a scaler does it: times a tensor, so that a loss in half precision becomes float32
            return outputs * torch.as_tensor(self._factor, dtype=torch.float32, device=outputs.device)
        return [self._scaled(output) for output in outputs]

    def _scaler(self, scaler: torch.amp.GradScaler) -> Any:
        return View(
            scaler,
            scale=self._scaled,
            get_scale=lambda: float(self._factor),
            unscale_=_do_nothing,
            step=_step_by_hand,
            update=_do_nothing,
        )

    def _stand_in(self, optimizer: Any) -> Any:
        stand_in = View(optimizer)
        vars(stand_in).update(
            step=partial(self._step, stand_in),
            zero_grad=partial(_zero_grad, stand_in),
            toggle_model=partial(self._toggle_model, stand_in),
        )
        if isinstance(optimizer, LightningOptimizer):  # who steps the one inside steps this one
            vars(stand_in).update(optimizer=stand_in)
        return stand_in

    def _step(self, stand_in: Any, closure: Any = None, **kwargs: Any) -> Any:
        result = None if closure is None else closure()
        for parameter in _parameters(stand_in):
            if parameter.grad is not None:
                self._stepped[id(parameter)] = parameter.grad
        return result

    @contextmanager
    def _toggle_model(self, stand_in: Any, sync_grad: bool = True) -> Generator[None]:
        self.module.toggle_optimizer(stand_in)
        yield
        self.module.untoggle_optimizer(stand_in)


@contextmanager
def _frozen(parameters: list[nn.Parameter]) -> Generator[None]:
    """Let no gradient reach these, whatever the step gets hold of: a global, an object that cannot be copied."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _step_by_hand(stand_in: Any, *args: Any, **kwargs: Any) -> Any:
    return stand_in.step(*args, **kwargs)


def _parameters(stand_in: Any) -> list[nn.Parameter]:
    return [parameter for group in stand_in.param_groups for parameter in group["params"]]


def _zero_grad(stand_in: Any, set_to_none: bool = True) -> None:
    for parameter in _parameters(stand_in):  # never in place: `gradients` may have kept them
        parameter.grad = None


def _idle_schedule(config: Any) -> Any:
    idle = copy.copy(config)
    idle.scheduler = View(config.scheduler, step=_do_nothing)
    return idle
