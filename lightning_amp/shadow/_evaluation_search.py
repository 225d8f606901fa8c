"""Why a metric of validation is not finite, or not what it is in fp32: its first bad batch, run again on shadows."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import final

from lightning_amp.casting import Fp32Modules
from lightning_amp.numerics import HALF_DTYPES
from lightning_amp.precision import AmpPrecision
from lightning_amp.reports import EvaluationReport, TriedRemedy
from lightning_amp.shadow import _evaluation_pass
from lightning_amp.shadow._evaluation_blame import (
    Blame,
    blamed_module,
    blamed_operation,
    half_precision_state,
    origin_in_fp32,
)
from lightning_amp.shadow._evaluation_pass import EvaluationPass, Stage
from lightning_amp.shadow._failures import Failure
from lightning_amp.shadow._first_batches import FirstBatch, FirstBatches
from lightning_amp.shadow._operation_comparison import OperationComparison
from lightning_amp.shadow._output_comparison import OutputComparison
from lightning_amp.shadow._ranks import gather
from lightning_amp.tracing import paired_random

_MAX_BATCHES = 8
"""How many batches are run again where nothing tells which one it is."""
_MAX_TOGETHER = 64
"""How many are run one after the other for what adds up."""
_MAX_TRIES = 5
_GONE = 0.25
"""Share of the difference that may remain where a remedy works."""

Watch = Callable[[LightningModule], AbstractContextManager[Any]]


def examine_metric(
    trainer: Trainer,
    module: LightningModule,
    stage: Stage,
    batches: FirstBatches,
    weights: Sequence[Tensor] | None,
    metric: str,
    sides: tuple[float, float],
) -> list[EvaluationReport]:
    """Run kept batches again, in AMP and in fp32, and tell where the metric goes wrong. Changes nothing, never raises.

    All ranks must call; they run as many passes, whatever each of them finds.

    Args:
        trainer: At the end of its evaluation.
        module: The real module.
        stage: Of the evaluation.
        batches: Of this rank.
        weights: What the parameters were when the batches ran; `None`: what they are.
        metric: Its name.
        sides: In AMP and fp32.

    Returns:
        What each rank found, on all ranks; nothing where it found nothing, and the metric is finite.

    Cost: some four evaluation steps for each batch that is run again, on at most 8 batches, and one for each remedy.

    """
    search = _Search(trainer, module, stage, batches, weights, metric, sides)
    mha = torch.backends.mha
    fast = mha.get_fastpath_enabled()
    try:
        mha.set_fastpath_enabled(False)  # torch's transformer layers call the modules inside only without it
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each was shown when the real step ran
            search.run()
    finally:
        mha.set_fastpath_enabled(fast)
    return [report for report in gather(trainer, search.report) if report is not None]


@final
class _Search:
    """One search, on all ranks in step."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        stage: Stage,
        batches: FirstBatches,
        weights: Sequence[Tensor] | None,
        metric: str,
        sides: tuple[float, float],
    ) -> None:
        self._trainer, self._module, self._stage = trainer, module, stage
        self._batches, self._weights, self._metric = batches, weights, metric
        self._amp, self._fp32 = sides
        self._device_type = trainer.strategy.root_device.type
        self._outputs = OutputComparison(inputs=True)
        self._steps: list[FirstBatch] = []
        self._found = False
        self._blame = Blame()
        self._tried: list[TriedRemedy] = []
        self._rules: list[str] = []
        self._goes_on = False
        self._states: dict[str, dict[str, Tensor]] = {}
        self._plain = EvaluationReport(
            metric, *sides, epoch=trainer.current_epoch, rank=trainer.global_rank, world_size=trainer.world_size
        )
        self.report: EvaluationReport | None = None if math.isfinite(self._amp) else self._plain

    # -- the search ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Look for the batch, then for the module, then for a remedy."""
        candidates = self._candidates()
        number = max(gather(self._trainer, len(candidates)))
        for k in range(number):
            # A rank that has no more of its own runs its last one, for the sake of the others.
            own = candidates[min(k, len(candidates) - 1)] if candidates else self._batches.kept[0]
            self._steps = [own]
            if not self._all(self._run_both):
                return
            if self._any(self._found):
                break
        else:
            self._steps = [one for one in self._batches.kept if one.is_intact][:_MAX_TOGETHER]
            if self._all(self._run_both) and self._any(self._found):
                self._all(self._blame_state)
            if self._any(self._adds_up) and self._all(self._try_float32_state) and self.report is not None:
                self.report = replace(self.report, tried=tuple(self._tried))
            return
        if not self._all(self._blame_module) or not self._all(self._blame_operation):
            return
        self._all(self._describe)
        if self._any(self._wants_remedy):
            self._try_remedies()

    def _candidates(self) -> list[FirstBatch]:
        values = self._batches.values(self._metric)
        intact = [one for one in self._batches.kept if one.is_intact and self._may_show(one)]
        shown = [key for key, (amp, fp32) in values.items() if self._shows(amp, fp32)]
        if shown and self.report is not None:
            loader_idx, batch_idx = shown[0]
            amp, fp32 = values[shown[0]]
            self.report = self._plain = replace(
                self._plain, loader_idx=loader_idx, batch_idx=batch_idx, batch_amp=amp, batch_fp32=fp32,
                note="this batch was not kept for a second look",
            )  # fmt: skip
        flagged = [one for one in intact if (one.loader_idx, one.batch_idx) in shown]
        return flagged[:3] if values else intact[:_MAX_BATCHES]

    def _may_show(self, one: FirstBatch) -> bool:
        name, _, loader = self._metric.partition("/dataloader_idx_")
        return not loader or not name or str(one.loader_idx) == loader

    def _shows(self, amp: float, fp32: float) -> bool:
        if not math.isfinite(self._amp):
            return not math.isfinite(amp)
        if not math.isfinite(amp) or not math.isfinite(fp32):
            return not math.isfinite(amp) and math.isfinite(fp32)
        size = abs(self._amp - self._fp32)
        return math.isfinite(size) and abs(amp - fp32) > max(0.3 * size, 0.02 * abs(fp32))

    # -- passes --------------------------------------------------------------------------------------------------------

    def _run_both(self) -> None:
        self._outputs.forget()
        self._found = False
        fp32 = self._value(self._in_fp32, self._outputs.recording, keep="fp32")
        amp = self._value(self._in_amp, self._outputs.comparing, keep="amp")
        self._found = self._shows(amp, fp32)
        self._values = amp, fp32

    def _in_fp32(self) -> EvaluationPass:
        return EvaluationPass.in_fp32(self._trainer, self._module, self._stage)

    def _in_amp(self) -> EvaluationPass:
        return EvaluationPass.in_amp(self._trainer, self._module, self._stage)

    def _value(
        self,
        make: Callable[[], EvaluationPass],
        watch: Watch | None = None,
        rules: Sequence[str] = (),
        keep: str = "",
    ) -> float:
        """Run the steps in a pass of their own, and return the metric over them; NaN if there is none."""
        one = make()
        try:
            if self._weights is not None:
                one.take_parameters(self._weights)
            if rules:
                Fp32Modules(one.module, rules, self._device_type, active=True)
            one.start_afresh()
            for step in self._steps:
                with paired_random(self._device_type, step.random_state):
                    one.step(step.batch, step.batch_idx, step.loader_idx, watch(one.module) if watch else None)
            if keep and len(self._steps) > 1:
                self._states[keep] = half_precision_state(one.module)
            try:
                metrics = one.finish(self._steps[-1].random_state, follow=False)
            except Exception:  # some need more than one batch
                metrics = one.metrics
            value = metrics.get(self._metric)
            return math.nan if value is None else float(value)
        finally:
            one.close()

    # -- blame ---------------------------------------------------------------------------------------------------------

    def _blame_state(self) -> None:
        if not self._found:
            return
        names = [
            f"`{name}` ({str(amp.dtype).removeprefix('torch.')}) is {float(amp.flatten()[0]):.6g}, in fp32"
            f" {float(fp32.flatten()[0]):.6g}"
            for name, amp in self._states["amp"].items()
            if amp.dtype in HALF_DTYPES
            and (fp32 := self._states["fp32"].get(name)) is not None
            and not torch.equal(amp.float(), fp32)
        ]
        if names:
            self.report = replace(self._plain, cause="state", names=tuple(names), note="")

    def _blame_module(self) -> None:
        if not self._found:
            return
        self._blame = blamed_module(self._outputs)
        if not math.isfinite(self._values[1]) and not math.isfinite(self._values[0]):
            self._blame = origin_in_fp32(self._outputs, self._steps[0].batch, self._module)

    def _blame_operation(self) -> None:
        if not self._found or self._blame.cause in ("batch", "weights"):
            return
        boundary = str(_evaluation_pass.__file__)
        names = OutputComparison()
        fp32 = OperationComparison(names, boundary)
        self._value(self._in_fp32, _both(names, fp32))
        amp = OperationComparison(names, boundary, fp32)
        self._value(self._in_amp, _both(names, amp))
        self._blame = blamed_operation(amp if not self._blame.in_fp32_too else fp32, self._blame)

    def _describe(self) -> None:
        if not self._found or (self._blame.cause == "unknown" and self.report is None):
            return
        step, blame = self._steps[0], self._blame
        self.report = replace(
            self._plain, cause=blame.cause, loader_idx=step.loader_idx, batch_idx=step.batch_idx,
            batch_amp=self._values[0], batch_fp32=self._values[1], in_fp32_too=blame.in_fp32_too, names=blame.names,
            module=blame.module, module_class=blame.module_class, input_sqnr_db=blame.input_db,
            output_sqnr_db=blame.output_db, operation=blame.operation, place=blame.place, note="",
        )  # fmt: skip

    @property
    def _adds_up(self) -> bool:
        return self.report is not None and self.report.cause == "state"

    def _try_float32_state(self) -> None:
        def make() -> EvaluationPass:
            return EvaluationPass.in_amp(self._trainer, self._module, self._stage, upcast=True)

        value = self._value(make)
        if self._adds_up:
            self._note_tried("float32", value)

    # -- remedies ------------------------------------------------------------------------------------------------------

    @property
    def _wants_remedy(self) -> bool:
        return self._found and self.report is not None and math.isfinite(self._values[1])

    def _try_remedies(self) -> None:
        self._goes_on = self._wants_remedy and self._blame.cause == "module" and bool(self._blame.module)
        if self._goes_on:
            self._rules = [str(self._blame.module)]
        for _ in range(_MAX_TRIES):
            if not self._any(self._goes_on) or not self._all(self._try_rules):
                break
        if self._any(self._wants_remedy and not any(tried.works for tried in self._tried)):
            self._all(self._try_fp32)
        if self.report is not None:
            self.report = replace(self.report, tried=tuple(self._tried))

    def _try_rules(self) -> None:
        self._outputs.again()
        rules = self._rules if self._goes_on else ()
        try:
            value = self._value(self._in_amp, self._outputs.comparing, rules)
        except ValueError:  # half-precision weights cannot be kept in fp32
            self._goes_on = False
            return
        if not self._goes_on:
            return
        self._note_tried(self._setting(f"fp32_modules={rules!r}"), value)
        if self._tried[-1].works:
            self._goes_on = False
            return
        wider = _wider(self._rules, blamed_module(self._outputs), self._outputs)
        self._goes_on = wider is not None
        self._rules = wider or self._rules

    def _try_fp32(self) -> None:
        def make() -> EvaluationPass:
            return EvaluationPass.in_fp32(self._trainer, self._module, self._stage, upcast=False)

        value = self._value(make)
        if self._wants_remedy and not any(tried.works for tried in self._tried):
            self._note_tried(self._setting("eval_precision='fp32'"), value)

    def _setting(self, argument: str) -> str:
        ours = isinstance(self._trainer.precision_plugin, AmpPrecision)
        return f"`{argument}`" if ours else f"`AmpPrecision(..., {argument})`"

    def _note_tried(self, setting: str, value: float) -> None:
        if not isinstance(self._trainer.precision_plugin, AmpPrecision):
            setting = f"AmpPrecision(..., {setting})"
        amp, fp32 = self._values
        left = abs(value - fp32)
        works = math.isfinite(value) and (left <= _GONE * abs(amp - fp32) or not math.isfinite(amp))
        self._tried.append(TriedRemedy(f"`{setting}`", value, (works and left <= max(0.05 * abs(fp32), 1e-6)) or works))

    # -- ranks in step -------------------------------------------------------------------------------------------------

    def _all(self, work: Callable[[], None]) -> bool:
        failed = False
        try:
            work()
        except Exception as error:
            failed, failure = True, Failure.of(error, f"the {self._stage} step", "the second look")
            if self.report is not None and not self.report.note:
                self.report = replace(self.report, note=failure.text)
        return not self._any(failed)

    def _any(self, flag: bool) -> bool:
        return any(gather(self._trainer, flag))


def _wider(rules: list[str], blame: Blame, outputs: OutputComparison) -> list[str] | None:
    """Return more modules to keep in fp32: the next that goes wrong, what is around it, or what ran before it."""
    name = blame.module
    if blame.cause != "module" or not name:
        return None
    if not any(name == rule or name.startswith(f"{rule}.") for rule in rules):
        return [*rules, name]
    ran = [call.name for call, _ in outputs.calls]
    outer = name.rpartition(".")[0]
    while outer:
        if outer in ran:
            return [*(rule for rule in rules if not rule.startswith(f"{outer}.")), outer]
        outer = outer.rpartition(".")[0]
    before = [other for other in ran[: ran.index(name)] if other not in rules and not other.startswith(f"{name}.")]
    return [*rules, before[-1]] if before and before[-1] else None


def _both(names: OutputComparison, operations: OperationComparison) -> Watch:
    @contextmanager
    def watch(module: LightningModule) -> Any:
        with ExitStack() as stack:
            stack.enter_context(names.naming(module))
            stack.enter_context(operations)
            yield

    return watch
