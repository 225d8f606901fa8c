"""Why a metric of validation is not finite, or not what it is in fp32: its first bad batch, run again on shadows."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import final

from lightning_amp.numerics import HALF_DTYPES
from lightning_amp.precision import AmpPrecision
from lightning_amp.reports import LOADER_SUFFIX, EvaluationReport, TriedRemedy
from lightning_amp.shadow._evaluation_blame import (
    Blame,
    blamed_module,
    blamed_operation,
    more_modules,
    origin_in_fp32,
)
from lightning_amp.shadow._evaluation_pass import Stage
from lightning_amp.shadow._evaluation_replay import EvaluationReplay
from lightning_amp.shadow._failures import Failure
from lightning_amp.shadow._first_batches import FirstBatch, FirstBatches
from lightning_amp.shadow._output_comparison import OutputComparison
from lightning_amp.shadow._ranks import gather

_MAX_BATCHES = 8
"""How many batches are run again where nothing tells which one it is."""
_MAX_TOGETHER = 64
"""How many are run one after the other for what adds up."""
_MAX_TRIES = 5
_CLEAR = 0.25
"""Relative difference from which on a loss of what differs between the samples is to blame."""
_GONE = 0.25
"""Share of the difference that may remain where a remedy works."""


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
        self._trainer, self._module = trainer, module
        self._stage: Stage = stage
        self._batches, self._metric = batches, metric
        self._amp, self._fp32 = sides
        self._replay = EvaluationReplay(trainer, module, stage, metric, weights)
        self._outputs = OutputComparison(inputs=True)
        self._steps: list[FirstBatch] = []
        self._found = False
        self._blame = Blame()
        self._tried: list[TriedRemedy] = []
        self._rules: list[str] = []
        self._goes_on = False
        self._states: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
        self._values = math.nan, math.nan
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
        flagged = [one for one in intact if (one.loader_idx, one.batch_idx) in shown]
        if self.report is not None:
            note = ""
            if not intact:
                note = "the batches were edited in place, so that they could not be run again"
            elif shown and not flagged:
                note = "this batch was not kept for a second look"
            self._plain = replace(self._plain, note=note)
            if shown:
                (loader_idx, batch_idx), (amp, fp32) = shown[0], values[shown[0]]
                self._plain = replace(
                    self._plain, loader_idx=loader_idx, batch_idx=batch_idx, batch_amp=amp, batch_fp32=fp32
                )
            self.report = self._plain
        return flagged[:3] if values else intact[:_MAX_BATCHES]

    def _may_show(self, one: FirstBatch) -> bool:
        loader = self._metric.partition(LOADER_SUFFIX)[2]
        return not loader or str(one.loader_idx) == loader

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
        fp32 = self._replay.in_fp32(self._steps, self._outputs.recording)
        state = self._replay.held_in_half
        amp = self._replay.in_amp(self._steps, self._outputs.comparing)
        self._states = self._replay.held_in_half, state
        if amp is not None and fp32 is not None and self._steps:
            self._found = self._shows(amp, fp32)
            self._values = amp, fp32

    # -- blame ---------------------------------------------------------------------------------------------------------

    def _blame_state(self) -> None:
        if not self._found:
            return
        names = [
            f"`{name}` ({str(amp.dtype).removeprefix('torch.')}) is {float(amp.flatten()[0]):.6g}, in fp32"
            f" {float(fp32.flatten()[0]):.6g}"
            for name, amp in self._states[0].items()
            if amp.dtype in HALF_DTYPES
            and (fp32 := self._states[1].get(name)) is not None
            and not torch.equal(amp.float(), fp32)
        ]
        if names:
            self.report = replace(self._plain, cause="state", names=tuple(names), note="")

    def _blame_module(self) -> None:
        if not self._found:
            return
        self._blame = blamed_module(self._outputs, nonfinite=self._is_nonfinite)
        if not math.isfinite(self._values[1]) and not math.isfinite(self._values[0]):
            self._blame = origin_in_fp32(self._outputs, self._steps[0].batch, self._module)

    def _blame_operation(self) -> None:
        if not self._found or self._blame.cause in ("batch", "weights"):
            return
        fp32, amp = self._replay.operations(self._steps)
        self._blame = blamed_operation(
            fp32 if self._blame.in_fp32_too else amp, self._blame, nonfinite=self._is_nonfinite
        )

    def _describe(self) -> None:
        if not self._found or (self._blame.cause == "unknown" and self.report is None):
            return
        amp, fp32 = self._values
        if self._blame.only_varying and abs(amp - fp32) < _CLEAR * min(abs(amp), abs(fp32)):
            return  # where all samples are nearly alike, as in many untrained models
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
        value = self._replay.in_amp(self._steps, upcast=True)
        if self._adds_up:
            self._note_tried("float32", value)

    @property
    def _is_nonfinite(self) -> bool:
        return not math.isfinite(self._values[0])

    # -- remedies ------------------------------------------------------------------------------------------------------

    @property
    def _wants_remedy(self) -> bool:
        return self._found and self.report is not None and math.isfinite(self._values[1])

    def _try_remedies(self) -> None:
        first = self._blame.module if self._blame.cause == "module" else self._blame.source
        self._goes_on = self._wants_remedy and bool(first)
        if self._goes_on:
            self._rules = [str(first)]
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
            value = self._replay.in_amp(self._steps, self._outputs.comparing, rules)
        except ValueError:  # half-precision weights cannot be kept in fp32
            self._goes_on = False
            return
        if not self._goes_on:
            return
        self._note_tried(self._setting(f"fp32_modules={rules!r}"), value)
        if self._tried[-1].works:
            self._goes_on = False
            return
        wider = more_modules(self._rules, blamed_module(self._outputs, nonfinite=self._is_nonfinite), self._outputs)
        self._goes_on = wider is not None
        self._rules = wider or self._rules

    def _try_fp32(self) -> None:
        value = self._replay.in_fp32(self._steps, upcast=False)
        if self._wants_remedy and not any(tried.works for tried in self._tried):
            self._note_tried(self._setting("eval_precision='fp32'"), value)

    def _setting(self, argument: str) -> str:
        ours = isinstance(self._trainer.precision_plugin, AmpPrecision)
        return argument if ours else f"AmpPrecision(..., {argument})"

    def _note_tried(self, setting: str, value: float | None) -> None:
        amp, fp32 = self._values
        value = math.nan if value is None else value
        works = abs(value - fp32) <= _GONE * abs(amp - fp32) if math.isfinite(amp) else math.isfinite(value)
        self._tried.append(TriedRemedy(setting, value, works))

    # -- ranks in step -------------------------------------------------------------------------------------------------

    def _all(self, work: Callable[[], None]) -> bool:
        failed = False
        try:
            work()
        except Exception as error:
            failed, failure = True, Failure.of(error, f"the {self._stage} step", "the second look")
            if self.report is not None:
                self.report = replace(self.report, note=failure.text)
        return not self._any(failed)

    def _any(self, flag: bool) -> bool:
        return any(gather(self._trainer, flag))
