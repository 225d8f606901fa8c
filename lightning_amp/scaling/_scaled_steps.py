"""`ScaledSteps`: the whole optimizer step for a loop of one's own, without a Trainer."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from typing_extensions import final

from lightning_amp._arguments import require, require_bool
from lightning_amp._compat import _modules, _torch
from lightning_amp.findings import StepRecord
from lightning_amp.scaling._backward_watch import BackwardWatch
from lightning_amp.scaling._bypassed_steps import Advice, BypassedSteps
from lightning_amp.scaling._gradient_state import UNCHECKED, GradientState, Scaled
from lightning_amp.scaling._gradients import parameters
from lightning_amp.scaling._holds import Hold
from lightning_amp.scaling._ledger import Ledger, enabled
from lightning_amp.scaling._records import RecordLog, StepResult, merge_losses
from lightning_amp.scaling._scaler import DynamicLossScaler
from lightning_amp.scaling._steps import OptimizerSteps, StepPlan

_LOGGER = logging.getLogger("lightning_amp")
Target = TypeVar("Target")
Scaler = torch.amp.GradScaler | float | None

_OWN_LOOP = Advice(
    "`ScaledSteps`",
    "It was called inside the backward: call `steps.step(optimizer)` after it",
    "Call `steps.step(optimizer)`",
    "Call `steps.step(optimizer)`",
)


class Observer(Protocol):
    """Is told of each backward, and of the outcome of each step."""

    def note_backward(self) -> None:
        """Handle a backward that is about to begin."""

    def observe(self, optimizer: Optimizer, result: StepResult) -> None:
        """Handle a step."""


@final
class ScaledSteps:
    """Backward, unscale and step for a training loop of your own: true gradients, and skips that leave no trace.

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
        scaler: A :class:`DynamicLossScaler`, any `torch.amp.GradScaler`, or a float for a scale that never moves.
            `None`, for bf16 and fp32: the loss is not scaled.
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

    def __init__(
        self,
        scaler: Scaler = None,
        optimizers: Iterable[Optimizer] = (),
        *,
        skip_nonfinite: bool = True,
        process_group: Any = None,
    ) -> None:
        scaler = DynamicLossScaler.static(scaler) if isinstance(scaler, (int, float)) else scaler
        legal = "a `DynamicLossScaler`, a `torch.amp.GradScaler`, a float for a static scale"
        require(scaler is None or isinstance(scaler, torch.amp.GradScaler), "scaler", legal, scaler, none="or `None`")
        require_bool("skip_nonfinite", skip_nonfinite)
        is_sequence = isinstance(optimizers, Iterable)
        unwrapped = [_torch.unwrap_optimizer(optimizer) for optimizer in optimizers] if is_sequence else []
        fine = is_sequence and all(isinstance(optimizer, Optimizer) for optimizer in unwrapped)
        require(fine, "optimizers", "a sequence of `torch.optim.Optimizer`", optimizers)
        self.scaler: torch.amp.GradScaler | None = scaler
        self.skip_nonfinite = skip_nonfinite
        self.process_group = process_group
        self._optimizers = unwrapped
        self.begin_as(_OWN_LOOP, "steps.backward(loss)", str)

    def begin_as(self, advice: Advice, backward_call: str, describe_skips: Callable[[], str]) -> None:
        """Begin as the steps of a plugin, whose errors give `advice`, and which tells later of its parameters."""
        self._advice, self._backward_call = advice, backward_call
        self._ledger = Ledger(self.scaler, describe_skips, has_callbacks=False)
        self._steps: OptimizerSteps | None = None
        self._observers: list[Observer] = []
        self._reduces_on: torch.device | None = None
        self._expected: dict[int, Any] = {}  # parameters that an optimizer is to come for, by id
        self._round: set[int] = set()  # ids of the optimizers that have stepped in this round
        self._latest_scale: Tensor | None = None  # of the latest backward
        self._scale_has_changed = False  # between two backwards
        self._loss: Tensor | None = None  # of the backwards so far, for optimizers that are not known yet
        self._latest: StepResult | None = None
        self._noted: list[tuple[StepResult, Callable[[], Any]]] = []
        self._holds: list[Hold] = []

    def expect(self, others: Iterable[Any], device: torch.device, *observers: Observer) -> None:
        """Record parameters that optimizers are to come for, and the device on which all ranks agree."""
        known = self._expected.keys() | (set() if self._steps is None else self._steps.gradients.parameters())
        others = [p for p in others if p.requires_grad and id(p) not in known]
        self._expected |= {id(p): p for p in others}
        self._reduces_on = device
        self._observers += observers
        if others:
            self._started(device).gradients.expect_more(True)
            self.watch(others)

    def watch(self, others: Iterable[Any]) -> None:
        """Watch parameters for backwards and steps that go past this object. There may be no optimizer for them."""
        watch = None if self._steps is None else self._steps.gradients.watch
        if watch is not None:
            watch.watch(others)

    def go_on_in(self, precision: str, scaler: torch.amp.GradScaler | None) -> None:
        """Set the precision that records name, and the scaler, before the first backward."""
        self.scaler = scaler
        self._ledger.go_on_in(precision, scaler)

    def _started(self, device: torch.device) -> OptimizerSteps:
        if self._steps is None:
            scaler, watch = enabled(self.scaler), None
            if scaler is not None:
                _torch.set_scaler_device(scaler, device.type)
                watch = BackwardWatch(self._optimizers, ())
            dist = torch.distributed
            several = dist.is_available() and dist.is_initialized() and dist.get_world_size(self.process_group) > 1
            reduce = partial(dist.all_reduce, op=dist.ReduceOp.MAX, group=self.process_group) if several else None
            self._steps = OptimizerSteps(
                scaler,
                self.skip_nonfinite,
                self._ledger.log,
                self._optimizers,
                watch=watch,
                all_reduce_max=reduce,
                device=self._reduces_on if several else None,
            )
            self._steps.gradients.call_backward(self._backward_call)
            self._steps.gradients.expect_more(not self._optimizers)
            if watch is not None:
                bypassed = BypassedSteps(self._steps, watch, self._advice)
                weakref.finalize(self, bypassed.retire)
        return self._steps

    # -- what was done so far ------------------------------------------------------------------------------------------

    @property
    def last_step(self) -> StepRecord | None:
        """Return the last attempted optimizer step. This waits for the device."""
        self._make_noted_calls()
        return self._ledger.so_far(self.scaler)[2]

    @property
    def num_steps(self) -> int:
        """Count the applied optimizer steps. This waits for the device."""
        return self._ledger.so_far(self.scaler)[0]

    @property
    def num_skipped(self) -> int:
        """Count the skipped optimizer steps. This waits for the device."""
        return self._ledger.so_far(self.scaler)[1]

    @property
    def records(self) -> RecordLog:
        """Return the log of all steps, for `ScaleHistory.following`."""
        return self._ledger.log

    def flush(self) -> None:
        """End the round, wait for the device, and hand all records to the subscribers."""
        self._make_noted_calls()
        self._end_round()
        self._ledger.log.flush()

    # -- backward and step ---------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run `loss.backward(*args, **kwargs)` on the scaled loss, with autocast off."""
        steps = self._started(loss.device)
        for observer in self._observers:
            observer.note_backward()
        with _autocast_off(loss.device):
            scaled = steps.scale_loss(loss)
            if steps.gradients.expects_more:
                self._loss = merge_losses(self._loss, loss)
            if steps.scaler is not None:
                self._carry_unknown(_torch.scale_tensor(steps.scaler))
            steps.gradients.begin_backward()
            try:
                scaled.backward(*args, **kwargs)
            finally:
                steps.gradients.end_backward()

    def _carry_unknown(self, scale: Tensor) -> None:
        """Multiply gradients whose optimizer is not known yet, so that they carry the next backward's `scale` []."""
        before, self._latest_scale = self._latest_scale, scale
        if before is None or before is scale:
            return
        self._scale_has_changed = True
        for parameter in self._expected.values():
            if parameter.grad is not None:
                parameter.grad.mul_(scale / before)

    def unscale_(self, optimizer: Any) -> None:
        """Unscale the gradients of `optimizer`, to read or clip them. A second call before the step changes nothing.

        If they are not finite, the next step is skipped, even if you replace these values afterwards.
        """
        optimizer = _torch.unwrap_optimizer(optimizer)
        steps = self._started(_device_of(optimizer))
        self._known(steps, optimizer)
        steps.unscale_(optimizer)

    def will_skip(self, optimizer: Optimizer) -> bool:
        """Return whether the next step will be skipped, after :meth:`unscale_`.

        All ranks must call. This waits for the device.
        """
        steps = self._started(_device_of(optimizer))
        state = self._known(steps, optimizer)
        if state.found_inf is None:
            return False
        steps.gradients.agree(state)
        return state.wait(asks_for_loss=False)

    def step(self, optimizer: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Call `optimizer.step(**kwargs)`, unless a gradient is not finite. Return its output.

        A `closure` computes the gradients: it calls `optimizer.zero_grad()` and :meth:`backward`, and returns the loss.
        """
        optimizer = _torch.unwrap_optimizer(optimizer)
        self._make_noted_calls(optimizer)
        device = _device_of(optimizer)
        steps = self._started(device)
        if id(optimizer) in self._round:
            self._end_round()
            steps.gradients.expect_more(False)
        self._known(steps, optimizer)
        plan = StepPlan(fold=True, asks_for_loss=bool(self._observers))
        with _autocast_off(device):
            output, result = steps.step(
                optimizer, closure or _nothing, _nothing, plan, closure_runs_backward=False, **kwargs
            )
        self._latest, self._loss = result, None
        for observer in self._observers:
            observer.observe(optimizer, result)
        for hold in self._holds:
            hold.observe(optimizer, result.skip)
        self._round.add(id(optimizer))
        if len(self._round) >= steps.gradients.num_optimizers:
            self._end_round()
        return output

    def _known(self, steps: OptimizerSteps, optimizer: Optimizer) -> GradientState:
        """Return the state of an optimizer's gradients; of a new one they came from the latest backward."""
        gradients = steps.gradients
        state = gradients.known_state(optimizer)
        if state is not None:
            return state
        if self._scale_has_changed:
            self._require_one_backward(optimizer)
        scale = self._latest_scale
        state = gradients.state(optimizer, UNCHECKED if scale is None else Scaled(scale), carried=scale)
        if gradients.watch is not None:
            gradients.watch.adopt(optimizer)
            gradients.require_scaled(state)
        if self._loss is not None:
            state.add_loss(self._loss, may_have_none=True)
        for parameter in parameters(optimizer):
            self._expected.pop(id(parameter), None)
        gradients.expect_more(bool(self._expected))
        return state

    def _require_one_backward(self, optimizer: Optimizer) -> None:
        """Refuse a new optimizer if its gradients may be sums of backwards with several scales."""
        assert self._steps is not None
        rescaled = self._steps.gradients.parameters() | self._expected.keys()
        others = [p.grad for p in parameters(optimizer) if p.grad is not None and id(p) not in rescaled]
        if any(map(_modules.version, others)):  # a backward that adds to a gradient writes in place
            raise RuntimeError(
                f"`{type(optimizer).__name__}` steps for the first time, with gradients of several backwards, and the"
                " loss scale changed before. Pass all optimizers to `ScaledSteps(scaler, [...])`; in Fabric, set up"
                " the modules of all parameters."
            )

    def _end_round(self) -> None:
        self._round.clear()
        if self._steps is not None:
            self._steps.finish_batch()

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
        if missing or not methods:
            kind = type(target).__name__
            raise ValueError(
                f"`{kind}` has no method {missing[0]!r} to guard."
                if missing
                else f"Name the method of `{kind}` that belongs to a step: `guard(ema, 'update')`."
            )
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
        return self._ledger.state(self.scaler)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`, or from the state of torch's own `GradScaler`.

        Raises:
            ValueError: If an entry is missing or wrong. Nothing changes then.

        """
        for sentence in self.load(state_dict, type(self).__name__):
            _LOGGER.info(sentence)

    def load(self, state_dict: dict[str, Any], name: str) -> list[str]:
        """Load a state that errors call `name`. Return a sentence for each setting that stays as it was passed."""
        sentences = self._ledger.load(state_dict, self.scaler, name)
        self._noted.clear()  # these calls, and the steps of this round, came after the checkpoint
        self._round.clear()
        if self._steps is not None:
            self._steps.drop_batch()
            self._steps.gradients.note_scale()
        return sentences


def _nothing() -> None:
    """Stand for a closure: the loop has computed the gradients already."""


def _autocast_off(device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def _device_of(optimizer: Optimizer) -> torch.device:
    return next((p.device for p in parameters(optimizer)), torch.device("cpu"))
