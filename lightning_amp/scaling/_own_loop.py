"""`ScaledSteps`: the whole optimizer step for a loop of one's own, without a Trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from lightning_amp._arguments import require, require_bool
from lightning_amp._compat import _torch
from lightning_amp.scaling._checkpoint import Saved
from lightning_amp.scaling._gradients import parameters
from lightning_amp.scaling._holds import Hold
from lightning_amp.scaling._log import RecordLog, StepCounts, StepResult
from lightning_amp.scaling._plan import OWN_LOOP, StepPlan
from lightning_amp.scaling._scalars import max_over_ranks
from lightning_amp.scaling._scaler import DynamicLossScaler, load_state
from lightning_amp.scaling._steps import OptimizerSteps

_LOGGER = logging.getLogger("lightning_amp")
Target = TypeVar("Target")
Scaler = torch.amp.GradScaler | float | None


class ScaledSteps(StepCounts):
    """Backward, unscale and step for a training loop of your own, with true gradients.

    A skipped step leaves parameters and optimizer state as they were. Buffers, such as the statistics of BatchNorm,
    stay as the forward left them.


    .. code-block:: python

        from lightning_amp.scaling import DynamicLossScaler, ScaledSteps

        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        steps = ScaledSteps(DynamicLossScaler(), [optimizer])
        for batch in data.train_dataloader():
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
                loss = model(batch).float().square().mean()
            steps.backward(loss)  # with torch's GradScaler: scaler.scale(loss).backward()
            steps.unscale_(optimizer)  # scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            steps.step(optimizer)  # scaler.step(optimizer); scaler.update()
            steps.on_applied(scheduler.step)

    It is the step of :class:`~lightning_amp.AmpPrecision`. Fused optimizers can be clipped, any number of optimizers
    shares one loss scale, gradients accumulate over any number of backwards, and closures work. The scale moves once
    per round: when all optimizers have stepped, or one of them steps again. In a process group, all ranks skip
    together. It imports nothing of Lightning.

    Args:
        scaler: A :class:`DynamicLossScaler`, a `torch.amp.GradScaler` (its settings are used), or a float for a scale
            that never moves. `None`, for bf16 and fp32: the loss is not scaled.
        optimizers: All optimizers. Of one that is missing here, the first step is counted as a round of its own, and
            its gradients cannot accumulate before while the scale changes.
        skip_nonfinite: Skip steps with non-finite gradients without a scaler too.
        process_group: The ranks that step and skip together; by default all ranks.

    Raises:
        ValueError: For an argument of the wrong type.
        RuntimeError: In training, for gradients that did not come from :meth:`backward`, for `optimizer.step()` on
            scaled gradients, and for an unknown optimizer whose gradients may have several scales.
        FloatingPointError: In training, after 64 skips in a row (`max_consecutive_skips` of the scaler).

    Cost: as :class:`~lightning_amp.AmpPrecision`. A fused optimizer does not wait for the device.
    """

    calls = OWN_LOOP
    """The calls that errors name."""

    def __init__(
        self,
        scaler: Scaler = None,
        optimizers: Iterable[Optimizer] = (),
        *,
        skip_nonfinite: bool = True,
        process_group: Any = None,
    ) -> None:
        require_bool("skip_nonfinite", skip_nonfinite)
        is_sequence = isinstance(optimizers, Iterable)
        unwrapped = [_torch.unwrap_optimizer(optimizer) for optimizer in optimizers] if is_sequence else []
        fine = is_sequence and all(isinstance(optimizer, Optimizer) for optimizer in unwrapped)
        require(fine, "optimizers", "a sequence of `torch.optim.Optimizer`", optimizers, "Write `[optimizer]`.")
        self.skip_nonfinite = skip_nonfinite
        self.process_group = process_group
        self.begin(DynamicLossScaler.taking(scaler), unwrapped)

    def __repr__(self) -> str:
        """Return the scaler and the classes of the optimizers."""
        return f"ScaledSteps({self.scaler!r}, [{', '.join(type(one).__name__ for one in self._optimizers)}])"

    if not TYPE_CHECKING:  # a type checker reports unknown names itself

        def __getattr__(self, name: str) -> Any:
            """Say what takes the place of a call of `GradScaler`."""
            said = {"scale": ": write `backward(loss)`", "update": ": delete the call, the loss scale moves by itself"}
            raise AttributeError(f"`{type(self).__name__}` has no `{name}`{said.get(name, '')}.")

    def begin(
        self, scaler: DynamicLossScaler | None, optimizers: Iterable[Optimizer], describe_skips: Callable[[], str] = str
    ) -> None:
        """Begin the first round. Errors describe the gradients of a stuck run."""
        self._optimizers = optimizers
        self.records = RecordLog(describe_skips=describe_skips, has_callbacks=False)
        self.go_on_in("", scaler)
        self._steps: OptimizerSteps | None = None
        self._buffers: list[Any] = []  # learn of each backward and step, and restore themselves after a skip
        self._root_device: torch.device | None = None  # where the ranks agree; in Fabric, from the first forward on
        self._latest: StepResult | None = None
        self._noted: list[tuple[StepResult, Callable[[], Any]]] = []
        self._holds: list[Hold] = []

    def go_on_in(self, precision: str, scaler: DynamicLossScaler | None) -> None:
        """Set the precision that records name, and the scaler, before the first backward."""
        self.scaler = scaler
        self.records.go_on_in(precision, 64 if scaler is None else scaler.max_consecutive_skips)

    def started(self) -> OptimizerSteps:
        """Return the steps, which are made when they are first needed: the ranks are known by then."""
        if self._steps is None:
            self._steps = OptimizerSteps(
                self.scaler,
                self.skip_nonfinite,
                self.records,
                self._optimizers,
                calls=self.calls,
                all_reduce_max=max_over_ranks(self.process_group),
                device=self._root_device,
            )
        return self._steps

    # -- what was done so far ------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """End the round, wait for the device, and hand all records to the subscribers."""
        self._make_noted_calls()
        if self._steps is not None:
            self._steps.end_round()
        self.records.flush()

    # -- backward and step ---------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run `loss.backward(*args, **kwargs)` on the scaled loss, with autocast off."""
        steps = self.started()
        for buffers in self._buffers:
            buffers.note_backward()
        with _torch.autocast_off(loss.device.type):
            scaled = steps.scale_loss(loss)
            with steps.scaled_backward():
                scaled.backward(*args, **kwargs)

    def unscale_(self, optimizer: Any) -> None:
        """Unscale the gradients of `optimizer`, to read or clip them. A second call before the step changes nothing.

        If they are not finite, the next step is skipped, even if you replace these values afterwards.
        """
        self.started().unscale_(optimizer)

    def will_skip(self, optimizer: Optimizer) -> bool:
        """Return whether the next step will be skipped, after :meth:`unscale_`.

        All ranks must call. This waits for the device.
        """
        return self.started().will_skip(optimizer)

    def step(self, optimizer: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Call `optimizer.step(**kwargs)`, unless a gradient is not finite. Return its output.

        A `closure` computes the gradients: it calls `optimizer.zero_grad()` and :meth:`backward`, and returns the loss.
        """
        optimizer = _torch.unwrap_optimizer(optimizer)
        self._make_noted_calls(optimizer)
        steps = self.started()
        if steps.has_stepped(optimizer):
            steps.end_round()
        plan = StepPlan(fold=True, in_closure=closure is not None)
        with _torch.autocast_off(next((p.device.type for p in parameters(optimizer)), "cpu")):
            output, result = steps.step(optimizer, closure or (lambda: None), lambda: None, plan, **kwargs)
        self._latest = result
        for buffers in self._buffers:
            buffers.observe(optimizer, result, manual=False)
        for hold in self._holds:
            hold.observe(optimizer, result.skip)
        if steps.round_is_over:
            steps.end_round()
        return output

    # -- what must not happen after a skipped step ---------------------------------------------------------------------

    def on_applied(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call `call(*args, **kwargs)` once if the last step was applied: `on_applied(scheduler.step)`.

        This does not wait. If only the device has the result, the call happens right before the next step.
        """
        if self._latest is None:
            raise RuntimeError("`on_applied` was called before the first optimizer step: call it after each step.")
        skip = self._latest.skip
        if skip.known is None:
            self._noted.append((self._latest, partial(call, *args, **kwargs)))
        elif not skip.known:
            call(*args, **kwargs)

    def guard(self, target: Target, *methods: str) -> Target:
        """Have a schedule or an average skip with the steps, and return it.

        Its methods do nothing if all optimizer steps since the last call that ran were skipped.

        Args:
            target: An LR scheduler, a `torch.optim.swa_utils.AveragedModel`, or any other object.
            methods: The methods that belong to a step; by default `"step"` of a scheduler, and `"update_parameters"`.

        Cost: nothing for a scheduler; calls of other objects wait for the device.
        """
        if not methods and isinstance(target, (LRScheduler, AveragedModel)):
            methods = ("step" if isinstance(target, LRScheduler) else "update_parameters",)
        missing = [name for name in methods if not callable(getattr(target, name, None))]
        rule = f"names of methods of `{type(target).__name__}` that belong to a step, as in `guard(ema, 'update')`"
        require(bool(methods) and not missing, "methods", rule, missing or methods)
        self._holds.append(Hold(target, methods))
        return target

    def _make_noted_calls(self, optimizer: Optimizer | None = None) -> None:
        noted, self._noted = self._noted, []
        for result, call in noted:
            if not result.skip.wait():
                call()
        for hold in self._holds:
            if optimizer is None or hold.optimizer is optimizer:
                hold.resolve()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, the counts and the last step, as plain numbers and strings. This waits for the device."""
        self.flush()
        return self._state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`, or from the state of torch's own `GradScaler`.

        Raises:
            ValueError: If an entry is missing or wrong. Nothing changes then.

        """
        for sentence in self.load(state_dict, type(self).__name__):
            _LOGGER.info(sentence)

    def load(self, state_dict: dict[str, Any], name: str) -> list[str]:
        """Load a state that errors call `name`. Return a sentence for each setting that stays as it was passed."""
        sentences = load_state(Saved(state_dict, name), self.scaler, self.records)
        self._noted.clear()  # these calls, and the steps of this round, came after the checkpoint
        if self._steps is not None:
            self._steps.begin_anew()
        return sentences
