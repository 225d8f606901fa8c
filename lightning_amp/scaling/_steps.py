"""Run optimizer steps: scale the loss, unscale and check the gradients, step or skip, and move the scale.

A round is :meth:`OptimizerSteps.scale_loss`, the backward inside :meth:`OptimizerSteps.scaled_backward`,
:meth:`OptimizerSteps.step`, and :meth:`OptimizerSteps.end_round`, in the Trainer, Fabric and :class:`ScaledSteps`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import final

from lightning_amp._compat import _modules, _torch
from lightning_amp.scaling._backward_watch import THREAD, BackwardWatch
from lightning_amp.scaling._early_moves import snapshot
from lightning_amp.scaling._gradients import has_gradients, parameters
from lightning_amp.scaling._log import RecordLog, StepResult
from lightning_amp.scaling._plan import OWN_LOOP, Calls, SkipStep, StepPlan
from lightning_amp.scaling._round import Round
from lightning_amp.scaling._scalars import Skip
from lightning_amp.scaling._scaler import DynamicLossScaler
from lightning_amp.scaling._state import GradientState


@final
class OptimizerSteps:
    """All optimizer steps of a fit or a loop.

    After a backward, all gradients of all optimizers carry the *current* scale. If unscaled gradients are still there
    when another backward begins, they are multiplied by the scale again first. So backward, unscale, clip and step may
    come in any order, for any number of optimizers, and an exception may come between them.

    Args:
        scaler: `None` without loss scaling.
        skip_nonfinite: Whether to skip steps with non-finite gradients even without a scaler.
        log: Gets a record of every attempted step.
        optimizers: In the order of `configure_optimizers`. An optimizer that comes later gets the next index, or the
            place of a known one with the same parameters.
        calls: The calls that errors name.
        watched: Parameters whose optimizers may come later, or never; a step past this class on their scaled gradients
            is refused.
        all_reduce_max: Reduces a tensor in place over all ranks; `None` for one process.
        device: The device that `all_reduce_max` needs; `None`: the device of the gradients.

    Attributes:
        log: The records of all attempted steps.
        scaler: The enabled scaler; `None` without loss scaling.
        skips: Whether steps with non-finite gradients are skipped.
        states: The state of each optimizer's gradients, by its id.

    """

    def __init__(
        self,
        scaler: DynamicLossScaler | None,
        skip_nonfinite: bool,
        log: RecordLog,
        optimizers: Iterable[Optimizer] = (),
        *,
        calls: Calls = OWN_LOOP,
        watched: Iterable[Any] = (),
        all_reduce_max: Callable[[Tensor], Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.log = log
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.skips = self.scaler is not None or skip_nonfinite
        self.calls = calls
        self._all_reduce_max, self._reduces_on = all_reduce_max, device
        self.states = {id(optimizer): GradientState(optimizer, i) for i, optimizer in enumerate(optimizers)}
        self._rest: list[Any] = []  # parameters for which an optimizer is to come
        self._rest_state = GradientState(SimpleNamespace(param_groups=[{"params": self._rest}]), -1)
        self._scale_has_changed = False  # between two backwards
        self._expects_more = not self.states  # nobody has said how many optimizers there are
        self._watch: BackwardWatch | None = None
        if self.scaler is not None:
            self._watch = BackwardWatch(self)
            for state in self.states.values():
                state.watched = self._watch.watch_first(state.optimizer)
            self.expect(watched)
            self.scale_by_hand = self._watch.scale
            self.scaler.serve(self)
        self.begin_anew()

    def begin_anew(self) -> None:
        """Begin a round, with the scale that a checkpoint has set. This waits for the device."""
        self._round = Round()
        self._first_scale = 1.0 if self.scaler is None else self.scaler.get_scale()

    def expect(self, params: Iterable[Any]) -> None:
        """Carry the gradients of parameters for which optimizers are to come."""
        known = self._known_parameters()
        self._rest += [p for p in params if p.requires_grad and id(p) not in known]
        if self._watch is not None:
            self._watch.watch(self._rest)

    def _known_parameters(self) -> set[int]:
        known = {id(p) for state in self.states.values() for p in parameters(state.optimizer)}
        return known.union(map(id, self._rest))

    def release(self) -> None:
        """Unscale all remaining gradients, because the run ends."""
        for state in self.states.values():
            if self._watch is not None and not self._watch.came_plain(state.optimizer):
                self.unscale(state)
            state.release()

    def close(self) -> None:
        """Remove all hooks."""
        for state in self.states.values():
            state.finish()
        if self._watch is not None and self.scaler is not None:
            self._watch.close()
            self.scaler.serve(None)

    def state(self, optimizer: Optimizer) -> GradientState:
        """Return the state of an optimizer's gradients; a new optimizer gets the next index."""
        if state := self.states.get(id(optimizer)):
            return state
        mine = {id(p) for p in parameters(optimizer)}
        state = next((s for s in self.states.values() if mine == {id(p) for p in parameters(s.optimizer)}), None)
        if state is not None:  # a loop that makes its optimizers anew
            del self.states[id(state.optimizer)]
            state.adopt(optimizer)
        else:
            state = GradientState(optimizer, len(self.states))
            state.loss = self._rest_state.loss
            if self._watch is not None:
                is_scaled = self._watch.origin(optimizer) != "plain"
                if is_scaled:
                    self._require_one_scale(optimizer)
                    state.scale = self._rest_state.scale
                # before its first step no gradient counts as assigned
                state.watched, state.since = self._watch.watch_first(optimizer, is_scaled=is_scaled), -1
            are_known, self._rest[:] = bool(self._rest), [p for p in self._rest if id(p) not in mine]
            self._expects_more &= bool(self._rest) or not are_known
        self.states[id(optimizer)] = state
        return state

    def _require_one_scale(self, optimizer: Optimizer) -> None:
        """Refuse a new optimizer if its gradients may be sums of backwards with several scales."""
        known = self._known_parameters()
        others = [p.grad for p in parameters(optimizer) if p.grad is not None and id(p) not in known]
        # a backward that adds to a gradient writes in place
        if self._scale_has_changed and any(map(_modules.version, others)):
            raise RuntimeError(
                f"`{type(optimizer).__name__}` steps for the first time, with gradients of several backwards, and the"
                " loss scale changed before. Pass all optimizers to `ScaledSteps(scaler, [...])`; in Fabric, set up"
                " the modules of all parameters."
            )

    # -- backward ------------------------------------------------------------------------------------------------------

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss, scaled. Gradients that are still there are rescaled to the current scale."""
        self.add_loss(loss)
        if self.scaler is None:
            return loss
        self.begin_backward()
        scaled = self.scaler.multiply(loss)  # must come first: it creates the scale, and a float16 loss may lower it
        self.carry(self.scaler.scale_tensor)
        return scaled

    def begin_backward(self) -> None:
        """Let the scale fall between two rounds of one batch, such as several epochs of a rollout."""
        if self.scaler is not None and self.round_is_over:
            self._round.lower(self.scaler)
            self.log.complete(self.scaler.scale_tensor)

    def add_loss(self, loss: Tensor) -> None:
        """Record the loss of the next backward."""
        for state in self.states.values():
            state.add_loss(loss, may_have_none=self._all_reduce_max is not None)
        if self._expects_more or self._rest:
            self._rest_state.add_loss(loss, may_have_none=True)

    def carry(self, to: Tensor) -> None:
        """Bring all gradients that are still there to the scale of the next backward, []."""
        if self._rest_state.scale is not None and self._rest_state.scale is not to:
            self._scale_has_changed = True
        done: set[int] = set()  # parameters that two optimizers share are rescaled once
        for state in sorted(self.states.values(), key=lambda state: state.is_scaled):
            self._see_assigned(state)
            state.carry(to, done)
            if len(self.states) > 1 or self._rest:
                done.update(id(p) for p in parameters(state.optimizer))
        self._rest_state.carry(to, done)

    def scaled_backward(self) -> AbstractContextManager[None]:
        """Return the context of the backward of a scaled loss."""
        return nullcontext() if self._watch is None else self._watch

    # -- unscale and check ---------------------------------------------------------------------------------------------

    def unscale_(self, optimizer: Any) -> None:
        """Unscale the gradients of an optimizer, and skip its next step if they are not finite now."""
        if self.skips:  # otherwise nothing is scaled or checked
            state = self.state(_torch.unwrap_optimizer(optimizer))
            self._examine(state)
            state.keep_found()

    def check_again(self, optimizer: Optimizer) -> None:
        """Unscale gradients and check them, after the user may have changed or added some."""
        if self.skips:
            self._examine(self.state(optimizer))

    def will_skip(self, optimizer: Optimizer) -> bool:
        """Return whether the next step will be skipped, after :meth:`unscale_`. All ranks must call. This waits."""
        state = self.state(optimizer)
        if state.found_inf is None:
            return False
        self._agree(state)
        return state.wait()

    def unscale(self, state: GradientState) -> bool:
        """Unscale gradients, for clipping by norm too, whose norm shows what is not finite. Return `False` if true."""
        self._unfold(state)
        if not state.is_scaled:
            return False
        self._require_scaled(state)
        state.unscale_(self._true_elsewhere(state), may_overflow=self._may_be_below_one())
        return True

    def _examine(self, state: GradientState) -> None:
        """Unscale gradients, and check whether they are finite now."""
        if not self.unscale(state):
            self._require_scaled(state)
            state.check()

    def _unfold(self, state: GradientState) -> None:
        """Unscale what an earlier step has left, but not what the user has assigned since."""
        self._see_assigned(state)
        state.unfold()

    def _see_assigned(self, state: GradientState) -> None:
        """Treat gradients that the user has assigned as true ones."""
        if self._watch is not None and self._watch.was_assigned(state):
            state.release()

    def _fold(self, state: GradientState, max_norm: float | None) -> bool:
        """Leave unscaling and clipping to a fused optimizer. Return whether that is possible."""
        self._require_scaled(state)
        if state.is_scaled and self._true_elsewhere(state):
            return False
        return state.fold(max_norm, may_overflow=max_norm is None and state.is_scaled and self._may_be_below_one())

    def _agree(self, state: GradientState) -> None:
        """Combine the flags of all ranks: gradients are not finite if they are not finite on any rank."""
        if self._all_reduce_max is not None:
            state.agree(self._all_reduce_max, self._reduces_on)

    def _require_scaled(self, state: GradientState) -> None:
        """Refuse gradients that a backward without the loss scale has added to."""
        watch = self._watch
        if watch is None or (self.calls.takes_plain and not state.is_scaled):
            return
        never = self._rest_state.scale is None and has_gradients(state.optimizer)  # no scaled backward has ever run
        if never or watch.came_plain(state.optimizer):
            raise RuntimeError(
                f"Gradients of `{type(state.optimizer).__name__}` do not come from `{self.calls.backward}`, so they may"
                " not carry the loss scale. Call it for each loss, instead of `loss.backward()`."
            )

    def _true_elsewhere(self, state: GradientState) -> set[int]:
        """Return the ids of parameters whose gradients another optimizer has unscaled since the last backward."""
        shared: set[int] = set()
        for other in self.states.values():
            if other is state or other.is_scaled:
                continue
            common = {id(p) for p in parameters(state.optimizer)}.intersection(map(id, parameters(other.optimizer)))
            if common:
                other.unfold()
                shared |= common
        return shared

    def _may_be_below_one(self) -> bool:
        """Return whether the scale may be so small that unscaling takes a finite value out of range."""
        scaler = self.scaler
        assert scaler is not None
        # The host has the exact scale if it reads the flag of each step, otherwise the scale of the latest read-back.
        scale = self._first_scale  # a record from before a resume may be of another precision
        if self.log.last is not None:
            scale = min(scale, self.log.last.next_scale)
        return scale * scaler.get_backoff_factor() ** self.log.num_known_skips < 1

    # -- step ----------------------------------------------------------------------------------------------------------

    def step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        before_update: Callable[[], None],
        plan: StepPlan,
        **kwargs: Any,
    ) -> tuple[Any, StepResult]:
        """Step or skip.

        Args:
            optimizer: The user's own.
            closure: Computes loss and gradients, unless they are there already.
            before_update: Runs hooks and clipping on the true gradients. Calls :meth:`check_again` after a change.
            plan: Requirements of hooks, clipping and the protection from skipped steps.
            kwargs: Passed to `optimizer.step`.

        Returns:
            The output of `optimizer.step` (on a skip, of the closure), and the outcome of the step.

        """
        state = self.state(optimizer)
        has_hooks = _torch.has_step_hooks(optimizer)
        if not plan.in_closure and has_hooks:
            self.unscale(state)
        # an optimizer that is not torch's may ignore its closure, or use the gradients before it calls it
        first = not state.takes_closure or not (plan.in_closure or state.is_torchs or has_hooks)
        undo = snapshot(optimizer) if self.skips and state.moves_early and not first else None
        skip: Skip | None = None
        result, calls, edits, leave = None, 0, state.num_edits(has_hooks), SkipStep()

        def run_closure() -> Any:
            nonlocal skip, result, calls
            THREAD.in_step = False  # the closure may step other optimizers
            state.moves_early |= calls > 0 or state.num_edits(has_hooks) != edits
            result, calls, skip = closure(), calls + 1, Skip.NO
            skip = self._check(state, before_update, plan)
            if skip.known:
                raise leave
            self.log.announce(optimizer)
            THREAD.in_step = True
            return result

        outer, THREAD.in_step = getattr(THREAD, "in_step", False), True
        try:
            if first:
                run_closure()
                kwargs |= {"closure": lambda: result} if state.takes_closure else {}
                output = optimizer.step(**kwargs)
            else:
                output = optimizer.step(closure=run_closure, **kwargs)
        except SkipStep as reason:
            if reason is not leave:
                raise
            reason.__traceback__ = None  # its frames would keep the batch until the next garbage collection
            if undo is not None:
                undo()
            output = result
        except BaseException:
            if skip is not None:  # after the closure: the kernel that divides by the scale did not run
                state.folded = False
            raise
        finally:
            THREAD.in_step = outer
            if state.decides_on_device:
                _torch.clear_amp_attributes(optimizer)
        return output, self._record(state, skip or Skip.NO)

    def _check(self, state: GradientState, before_update: Callable[[], None], plan: StepPlan) -> Skip:
        """Unscale and check the gradients, run hooks and clipping, and agree with all ranks.

        Return whether to skip; of a fused optimizer that decides on the device, its flag.
        """
        optimizer, someone_edits = state.optimizer, not plan.fold or plan.max_norm is not None
        if not self.skips:
            if someone_edits:
                before_update()
            return Skip.NO
        fused = state.decides_on_device and _torch.is_fused(optimizer) and not _torch.has_step_hooks(optimizer)
        self._unfold(state)
        if not (plan.fold and fused and state.found_inf is None and self._fold(state, plan.max_norm)):
            self._examine(state)
            if someone_edits:
                before_update()
        self._agree(state)
        if not state.has_gradients:  # on any rank; otherwise there is nothing to skip
            return Skip.NO
        assert state.found_inf is not None
        skip = Skip.on_device(state.found_inf)
        if skip.known is None:
            early = isinstance(optimizer, torch.optim.SGD) and _torch.momentum_is_uninitialised(optimizer)
            if fused and not early and not plan.host_must_know:
                _torch.set_found_inf(optimizer, state.found_inf)
                return skip
            return Skip.YES if state.wait() else Skip.NO
        return skip

    def _record(self, state: GradientState, skip: Skip) -> StepResult:
        """Make the one record of a step. The end of the round adds the next scale."""
        overflow = skip | (state.overflow or Skip.NO)
        result = StepResult(skip, state.loss, state.index, state.used_scale, overflow, known_bad_loss=state.bad_loss)
        # otherwise there was nothing to do, and nothing is recorded
        if state.has_gradients if self.skips else has_gradients(state.optimizer):
            self._round.add(result)
            self.log.append(result)
        self._rest_state.loss = None
        state.finish()
        state.since = 0 if self._watch is None else self._watch.count
        return result

    # -- the end of a round --------------------------------------------------------------------------------------------

    @property
    def round_is_over(self) -> bool:
        """Return whether all optimizers have stepped, or one of them twice."""
        return self._round.is_over(len(self.states) + self._expects_more)

    def has_stepped(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer has stepped in this round, so that another round begins with its next step."""
        again = self.state(optimizer).index in self._round.counts
        self._expects_more &= not again
        return again

    def end_round(self) -> None:
        """Move the scale once for all steps since the last call, and complete their records.

        Raise `FloatingPointError` if too many steps in a row were skipped.
        """
        ended, self._round = self._round, Round()
        if self.scaler is not None:
            ended.move(self.scaler)
        self.log.close_round(None if self.scaler is None else self.scaler.scale_tensor)
