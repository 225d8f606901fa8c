"""The faults: each takes one behaviour away that a promise or the contract demands."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """A text to replace in a file of the package, and the tests of which one at least must fail then.

    Attributes:
        behaviour: The fault, as a user would meet it.
        file: Path in the package.
        old: A text that is there once.
        new: The text in its place.
        tests: Tests that find the fault in seconds.

    """

    behaviour: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


PROMISES = "tests/promises/"
SKIPPED = f"{PROMISES}test_skipped_steps.py::"
MANUAL = f"{PROMISES}test_manual_optimization.py::"
LOOPS = f"{PROMISES}test_training_loops.py::"
IN_USE = f"{PROMISES}test_scale_in_use.py::"
ANY_ORDER = "tests/unit/scaling/test_steps.py"
STEP = "tests/unit/scaling/test_step.py"

SCALING = [
    Mutation(
        "gradients are divided by the scale twice",
        "scaling/_state.py",
        "self.scale, self.used_scale, self.found_inf = None, scale, self._kept.or_kept(found_inf)",
        "self.scale, self.used_scale, self.found_inf = scale, scale, self._kept.or_kept(found_inf)",
        (f"{MANUAL}test_unscale",),
    ),
    Mutation(
        "an overflow on another rank is ignored",
        "scaling/_steps.py",
        "if self._all_reduce_max is not None:\n            state.agree(",
        "if False:\n            state.agree(",
        (STEP,),
    ),
    Mutation(
        "the flag of a step comes one step late",
        "scaling/_steps.py",
        "        skip = Skip.on_device(state.found_inf)\n",
        '        now = Skip.on_device(state.found_inf)\n        skip, self._late = getattr(self, "_late", now), now\n',
        (f"{SKIPPED}test_buffers_of_a_skipped_batch_are_taken_back",),
    ),
    Mutation(
        "a fused optimizer steps with infinite gradients",
        "scaling/_state.py",
        "found_inf = gradients.check(new_flag(device))\n        else:",
        "found_inf = new_flag(device)\n        else:",
        (f"{SKIPPED}test_buffers_of_a_skipped_batch_are_taken_back",),
    ),
    Mutation(
        "clipping by a fused optimizer forgets the norm",
        "scaling/_state.py",
        "grad_scale = divisor if grad_scale is None else grad_scale * divisor",
        "pass",
        (f"{MANUAL}test_clipping_with_fused_optimizers",),
    ),
    Mutation(
        "gradients that are still there keep the old scale when it moves",
        "scaling/_state.py",
        "            gradients.multiply_(factor)\n            for gradient",
        "            for gradient",
        (ANY_ORDER,),
    ),
    Mutation(
        "gradients that two optimizers share are rescaled twice",
        "scaling/_steps.py",
        "                done.update(id(p) for p in parameters(state.optimizer))",
        "                pass",
        (ANY_ORDER,),
    ),
    Mutation(
        "gradients that a folded step has left are taken for true ones",
        "scaling/_state.py",
        "                Gradients(self.optimizer).multiply_(self._to_true())",
        "                pass",
        (ANY_ORDER,),
    ),
    Mutation(
        "an overflow in a later closure call keeps the earlier move",
        "scaling/_steps.py",
        "            if undo is not None:\n                undo()",
        "            pass",
        (f"{LOOPS}test_an_overflow_in_a_later_call_leaves_no_trace",),
    ),
    Mutation(
        "an optimizer that catches exceptions steps on a skip",
        "scaling/_plan.py",
        "class SkipStep(BaseException)",
        "class SkipStep(Exception)",
        (STEP,),
    ),
    Mutation(
        "skipped steps have no record",
        "scaling/_steps.py",
        "            self.log.append(result)",
        "            if not skip.known:\n                self.log.append(result)",
        (f"{PROMISES}test_fabric.py::test_records",),
    ),
    Mutation(
        "a batch without gradients has a record",
        "scaling/_steps.py",
        "if state.has_gradients if self.skips else has_gradients(state.optimizer):",
        "if True:",
        (f"{IN_USE}test_a_window_without_a_loss_leaves_no_record",),
    ),
    Mutation(
        "values that a user mends after `unscale_` are applied",
        "scaling/_steps.py",
        "            self._examine(state)\n            state.keep_found()",
        "            self._examine(state)",
        (f"{PROMISES}test_unscale_stays_found.py::test_whichever_call",),
    ),
    Mutation(
        "an overflow that was dropped skips the next step",
        "scaling/_state.py",
        "            self._flag = self._flag * (left != 0).to(self._flag)",
        "            pass",
        (f"{PROMISES}test_unscale_stays_found.py",),
    ),
    Mutation(
        "a step past the plugin applies scaled gradients",
        "scaling/_backward_watch.py",
        "        if not refused or not has_gradients(optimizer):\n            return",
        "        return",
        ("tests/unit/precision/test_bypassed_steps.py",),
    ),
    Mutation(
        "a backward without the loss scale is divided by it",
        "scaling/_steps.py",
        "        if never or watch.came_plain(state.optimizer):",
        "        if False:",
        (f"{PROMISES}test_unusual_loops.py", "tests/unit/precision/test_bypassed_steps.py"),
    ),
    Mutation(
        "gradients that a user assigns are divided by the scale",
        "scaling/_steps.py",
        "if self._watch is not None and self._watch.was_assigned(state):",
        "if False:",
        (f"{PROMISES}test_unusual_loops.py",),
    ),
    Mutation(
        "gradients of FSDP1 are taken for assigned ones",
        "scaling/_backward_watch.py",
        "if p.grad is not None and p.grad is not before:",
        "if False:",
        ("tests/contract/test_plugins_and_callbacks.py::TestFSDPPlugins",),
    ),
    Mutation(
        "an optimizer that ignores its closure steps on scaled gradients",
        "scaling/_steps.py",
        "first = not state.takes_closure or not (plan.in_closure or state.is_torchs or has_hooks)",
        "first = not state.takes_closure",
        (f"{PROMISES}test_unusual_loops.py",),
    ),
    Mutation(
        "the scale does not fall between the steps of one batch",
        "scaling/_steps.py",
        "            self._round.lower(self.scaler)\n",
        "",
        (f"{PROMISES}test_many_steps.py",),
    ),
    Mutation(
        "a loss that is not finite lowers the scale",
        "scaling/_round.py",
        "found_inf, held = flags[0], losses[0]",
        "found_inf, held = flags[0], None",
        (f"{LOOPS}test_bad_batches_never_lower_the_scale",),
    ),
    Mutation(
        "the scale leaves its limits",
        "scaling/_scaler.py",
        "        new_scale.clamp_(self.min_scale, self.max_scale)\n",
        "",
        ("tests/unit/scaling/test_scaler.py",),
    ),
    Mutation(
        "hysteresis is ignored",
        "scaling/_scaler.py",
        "        if self.hysteresis > 1:",
        "        if False:",
        ("tests/unit/scaling/test_scaler.py",),
    ),
    Mutation(
        "a float16 loss does not lower the ceiling",
        "scaling/_scaler.py",
        "if loss.dtype == torch.float16 and self.max_scale > HALF_LOSS_CEILING:",
        "if False:",
        (f"{LOOPS}test_a_half_precision_loss",),
    ),
    Mutation(
        "the checkpoint overrides what the user passes",
        "scaling/_scaler.py",
        "            if name in self._explicit and name in state_dict and",
        "            if False and",
        ("tests/contract/test_checkpoints.py",),
    ),
    Mutation(
        "a second run goes on with the scale of the first",
        "scaling/_scaler.py",
        "        _torch.reset_scale(self, init_scale)\n        self._forget_steps",
        "        self._forget_steps",
        ("tests/contract/test_checkpoints.py::test_k_folds_start_fresh",),
    ),
    Mutation(
        "a run whose scale still falls is called stuck",
        "scaling/_log.py",
        "self.streak = (*self.streak, record.reason) if lost else ()",
        "self.streak = (*self.streak, record.reason) if record.skipped else ()",
        ("tests/unit/scaling/test_records.py", IN_USE.removesuffix("::")),
    ),
    Mutation(
        "a stuck run goes on for ever",
        "scaling/_log.py",
        "        if stuck:\n            self._raise_stuck(self.last)",
        "        pass",
        (f"{SKIPPED}test_bf16_is_not_advised_to_a_run_that_has_it",),
    ),
    Mutation(
        "records blame the gradients for a bad loss",
        "scaling/_log.py",
        '"none" if not skip else "gradient" if math.isfinite(loss) else "loss"',
        '"none" if not skip else "gradient"',
        (f"{PROMISES}test_mended_gradients.py::test_the_loss_says_why",),
    ),
    Mutation(
        "records have the next scale of another step",
        "scaling/_log.py",
        "            step.next_scale = next_scale",
        "            step.next_scale = step.scale",
        (f"{PROMISES}test_mended_gradients.py::test_the_loss_says_why",),
    ),
    Mutation(
        "records are read back in each batch, which waits for the device",
        "scaling/_log.py",
        "num_blocks > before or (at_once",
        "True or (at_once",
        ("tests/unit/scaling/test_records.py", "tests/contract/test_pipeline.py"),
    ),
    Mutation(
        "a schedule advances after a skipped step",
        "scaling/_holds.py",
        "        if self._all_skipped is not None and self._all_skipped.wait():",
        "        if False:",
        (f"{SKIPPED}test_schedules_see_applied_steps",),
    ),
    Mutation(
        "a schedule is held although one step of its window was applied",
        "scaling/_holds.py",
        "before if skip.known or before.known is False else skip",
        "skip",
        ("tests/unit/scaling/test_holds.py",),
    ),
    Mutation(
        "in a loop of one's own a call after a skipped step is made",
        "scaling/_own_loop.py",
        "        elif not skip.known:\n            call(*args, **kwargs)",
        "        else:\n            call(*args, **kwargs)",
        (f"{PROMISES}test_fabric.py::test_schedules_and_averages_see_applied_steps",),
    ),
    Mutation(
        "a penalty's derivative that overflows keeps its scale",
        "scaling/_derivative_scale.py",
        "torch.where(overflow, scale / 4,",
        "torch.where(overflow, scale,",
        (f"{PROMISES}test_scaled_grad.py::test_a_derivative_that_overflows_lowers_its_own_scale",),
    ),
]

SKIPPED_STEPS = [
    Mutation(
        "a skipped step leaves inf in BatchNorm",
        "skipped_steps/_kept_buffers.py",
        "            self._restore(window)",
        "            pass",
        (f"{SKIPPED}test_buffers_of_a_skipped_batch_are_taken_back",),
    ),
    Mutation(
        "`restore_buffers` restores nothing",
        "skipped_steps/_protection.py",
        "both = (norm_places(module), True), (named, False)",
        "both = (norm_places(module), True), ([], False)",
        (f"{PROMISES}test_restore_buffers.py::test_a_queue_is_that_of_a_run_without_the_batch",),
    ),
    Mutation(
        "SWA's pass leaves inf in BatchNorm",
        "skipped_steps/_kept_buffers.py",
        "        if before is None or (self._had_backward and not in_window):\n            return",
        "        return",
        (f"{SKIPPED}test_the_batch_norm_pass_of_swa", "tests/unit/skipped_steps/test_kept_buffers.py"),
    ),
    Mutation(
        "a checkpoint within a window has the overflow's statistics",
        "precision/_amp.py",
        "            self._run.protection.settle(in_window=True)",
        "            self._run.protection.settle()",
        ("tests/unit/skipped_steps/test_kept_buffers.py",),
    ),
    Mutation(
        "a skip of one optimizer takes the statistics of another back",
        "skipped_steps/_kept_buffers.py",
        "        if len(optimizers) == 1:\n            return [(None, optimizers)]",
        "        return [(None, optimizers)]",
        (f"{PROMISES}test_own_statistics.py::test_two_optimizers_in_a_batch",),
    ),
    Mutation(
        "averaged weights take in a skipped step",
        "skipped_steps/_protection.py",
        '        yield from ((average, ["should_update"], _no_update) for average in averages)\n',
        "",
        (f"{SKIPPED}test_averages_see_applied_steps",),
    ),
    Mutation(
        "a schedule per epoch is held after a skip",
        "skipped_steps/_protection.py",
        'return not plateau and (not self._module.automatic_optimization or config.interval == "step")',
        "return True",
        (f"{SKIPPED}test_epoch_schedules_run_as_ever",),
    ),
]

CASTING = [
    Mutation(
        "metrics compute in half precision",
        "casting/_fp32_metrics.py",
        'for metric in metrics for name in ("update", "compute"))',
        "for metric in metrics for name in ())",
        (f"{PROMISES}test_fp32_metrics.py",),
    ),
    Mutation(
        "predictions are half precision",
        "casting/_fp32_region.py",
        "        return to_fp32(self.inner(*args, **kwargs), HALF_DTYPES)",
        "        return self.inner(*args, **kwargs)",
        (f"{PROMISES}test_evaluation.py::test_predictions_to_numpy",),
    ),
    Mutation(
        "`fp32_modules` computes in half precision",
        "casting/_fp32_modules.py",
        "            forward.install()",
        "            pass",
        (f"{PROMISES}test_fp32_modules.py",),
    ),
    Mutation(
        "a rule that matches no module is taken",
        "casting/_fp32_modules.py",
        "        if not hits:\n            if isinstance(rule, str):",
        "        if not hits and not isinstance(rule, str):\n            if isinstance(rule, str):",
        ("tests/unit/casting/test_fp32_modules.py",),
    ),
    Mutation(
        "a weight that is edited between two uses is stale",
        "casting/_reused_weights.py",
        "if copy is None or not _torch.is_unwritten(parameter, copy.place):",
        "if copy is None:",
        (f"{LOOPS}test_an_edit_through_data_between_two_uses_is_seen",),
    ),
    Mutation(
        "`auto` takes bf16 where it is slower than fp32",
        "casting/_precision_choice.py",
        'if "avx512_bf16" in found and "amx_bf16" not in found and not is_amd():',
        "if False:",
        (f"{PROMISES}test_auto.py",),
    ),
]

PRECISION = [
    Mutation(
        "the scale moves once per optimizer",
        "precision/_run.py",
        "        if self._automatic:\n            steps.end_round()\n        return output",
        "        steps.end_round()\n        return output",
        (f"{MANUAL}test_every_order_equals_fp32",),
    ),
    Mutation(
        "clipping by norm meets scaled gradients",
        "precision/_amp.py",
        "            self._steps.unscale(self._steps.state(optimizer))",
        "            pass",
        (f"{MANUAL}test_the_documented_clipping_recipe",),
    ),
    Mutation(
        "clipping by value meets scaled gradients",
        "precision/_amp.py",
        "            self.unscale_(optimizer)\n            self.clip_grad_by_value",
        "            self.clip_grad_by_value",
        (f"{MANUAL}test_the_documented_clipping_recipe",),
    ),
    Mutation(
        "gradients that a hook mends are skipped",
        "precision/_run.py",
        '"on_before_optimizer_step", optimizer)\n            steps.check_again(optimizer)',
        '"on_before_optimizer_step", optimizer)',
        (f"{PROMISES}test_mended_gradients.py::test_a_mended_overflow_is_a_step_and_lowers_the_scale",),
    ),
    Mutation(
        "hooks see scaled gradients of a fused optimizer",
        "precision/_clipping.py",
        "        if self.somebody_looks or (automatic and self.own_clipping):\n            return False, None",
        "        pass",
        (f"{MANUAL.removesuffix('::')}",),
    ),
    Mutation(
        "`on_before_backward` gets the scaled loss",
        "precision/_run.py",
        'run_hook(self.module, "on_before_backward", loss)',
        'run_hook(self.module, "on_before_backward", steps.scaler.multiply(loss) if steps.scaler else loss)',
        ("tests/contract/test_pipeline.py",),
    ),
    Mutation(
        "the backward runs under autocast",
        "precision/_amp.py",
        "        with autocast_off(self.device):\n            return backward()",
        "        with nullcontext():\n            return backward()",
        (f"{MANUAL}test_autocast_is_off_outside_the_forward",),
    ),
    Mutation(
        "`eval_precision` is ignored",
        "precision/_forward.py",
        "return self.evaluation if self.evaluating else self.training",
        "return self.training",
        (f"{PROMISES}test_fp32_modules.py", "tests/unit/precision/test_fit.py"),
    ),
    Mutation(
        "non-finite steps are taken in bf16 and fp32",
        "scaling/_steps.py",
        "self.skips = self.scaler is not None or skip_nonfinite",
        "self.skips = self.scaler is not None",
        (f"{SKIPPED}test_one_bad_batch_in_fp32",),
    ),
    Mutation(
        "half-precision parameters train in silence",
        "precision/_refusals.py",
        "    if half := _upcast_parameters.trained_in_half(module):",
        "    if half := {}:",
        ("tests/unit/precision/test_refusals.py::test_half_parameters",),
    ),
    Mutation(
        "upcast parameters resume from rounded weights",
        "precision/_upcast_parameters.py",
        "    if loads_again:\n        _load_again",
        "    if False:\n        _load_again",
        (
            "tests/unit/precision/test_upcast_parameters.py",
            f"{PROMISES}test_upcast_parameters.py::test_forty_steps_are_twenty_and_twenty",
        ),
    ),
    Mutation(
        "a second fit counts from 0",
        "precision/_amp.py",
        "        if goes_on:",
        "        if False:",
        (f"{PROMISES}test_second_fit.py::test_two_fits_are_one",),
    ),
    Mutation(
        "an overflow is reported as an anomaly",
        "precision/_run.py",
        "            self._checked = loss\n",
        "            pass\n",
        (f"{LOOPS}test_an_overflow_is_not_an_anomaly",),
    ),
    Mutation(
        "hooks and wrapped methods stay after the run",
        "precision/_run.py",
        "        self._undo.close()",
        "        pass",
        ("tests/unit/precision/test_run.py",),
    ),
    Mutation(
        "skipped steps are silent at the end of a fit",
        "precision/_run.py",
        "                self._warn_of_lost_steps(log, by_hand)\n",
        "",
        (f"{IN_USE}test_steps_that_changed_nothing_are_said_once",),
    ),
]

MUTATIONS = [*SCALING, *SKIPPED_STEPS, *CASTING, *PRECISION]
