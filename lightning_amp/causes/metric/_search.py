"""Find out why a metric of validation differs from fp32: run its first bad batch again on shadows of the module."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import final

from lightning_amp._compat import _lightning
from lightning_amp.causes._attempts import Attempt, first_that_works
from lightning_amp.causes._bad_shards import bad_shards
from lightning_amp.causes.metric._blame import (
    Blame,
    blame_module,
    blame_operation,
    more_modules,
    origin_in_fp32,
)
from lightning_amp.causes.metric._replay import EvaluationReplay, Replayed
from lightning_amp.findings import LOADER_SUFFIX, EvaluationReport, TriedRemedy
from lightning_amp.numerics import HALF_DTYPES
from lightning_amp.precision import AmpPrecision
from lightning_amp.reports import ComparisonTable
from lightning_amp.shadow import (
    ComparedEvaluation,
    Failure,
    FirstBatches,
    KeptBatch,
    Lockstep,
    OtherRankFailedError,
    OutputComparison,
    gather,
    is_sharded,
)

_MAX_SEARCHES = 3
"""The number of searches without a result after which a run stops searching."""
_MAX_BATCHES = 8
"""The number of batches that are run again if no logged value shows which batch is bad."""
_MAX_TOGETHER = 64
"""The number of batches that are run one after the other to find errors that add up."""
_MAX_TRIES = 5
_GONE = 0.25
"""A remedy works if at most this share of the difference remains."""


@final
class MetricSearch:
    """Searches in each comparison of a run until it has found a cause.

    On all ranks, `reports` has the cause that each rank found.
    """

    def __init__(self) -> None:
        self.reports: list[EvaluationReport] = []
        self._num_searches = 0

    def investigate(
        self, trainer: Trainer, module: LightningModule, compared: ComparedEvaluation, table: ComparisonTable
    ) -> str:
        """Return the text of a warning; empty if no metric stands out, or a warning was given.

        All ranks must call this. If no metric stands out, this only reads the table.
        """
        if self.reports or self._num_searches >= _MAX_SEARCHES:
            return ""
        directions = _lightning.metric_directions(trainer)

        def num_rows(metric: str) -> int | None:
            # such as `MeanAbsoluteError`, which is not a share of samples
            return None if directions.get(metric) == "min" else compared.batches.num_rows_of(metric)

        row = table.standing_out(num_rows, compared.batches.standard_error)
        found = next(filter(None, gather(trainer, row)), None)
        if found is None:
            return ""
        self._num_searches += 1
        reports = examine_metric(trainer, module, compared, found.metric, found.amp, found.fp32)
        known = [report for report in reports if report.cause != "unknown"]
        # A rank without a fault sees the value of the others, if the step reduces it, and finds no operation for it.
        named = [report for report in known if report.cause != "operation" or report.operation]
        self.reports = named or known or reports[:1]
        said: dict[str, str] = {}
        for report in self.reports:  # `.report` is the first one
            said.setdefault(str(replace(report, rank=0)), str(report))
        return "\n".join(said.values())


def examine_metric(
    trainer: Trainer, module: LightningModule, compared: ComparedEvaluation, metric: str, amp: float, fp32: float
) -> list[EvaluationReport]:
    """Run kept batches again, in AMP and in fp32, and find where the metric goes wrong.

    This changes nothing and never raises. All ranks must call this. All ranks run the same number of passes, whatever
    each of them finds.

    Returns:
        The reports of all ranks. A rank that found nothing adds no report if the metric is finite. For a bad weight
        there is only the report of the rank that has its shard.

    Cost: some four evaluation steps for each batch that is run again, on at most 8 batches, and one for each remedy.

    """
    report = EvaluationReport(
        metric, amp, fp32, epoch=trainer.current_epoch, rank=trainer.global_rank, world_size=trainer.world_size
    )
    with _quiet_passes():
        found = _search(EvaluationReplay(trainer, module, compared, metric), compared.batches, report)
    by_rank = [(rank, one) for rank, one in enumerate(gather(trainer, found)) if one is not None]
    holders = {one.names for rank, one in by_rank if one.cause == "weights" and one.rank == rank}
    return [one for rank, one in by_rank if one.rank == rank or one.names not in holders]


@contextmanager
def _quiet_passes() -> Generator[None]:
    mha = torch.backends.mha
    fast = mha.get_fastpath_enabled()
    try:
        mha.set_fastpath_enabled(False)  # the fast path of torch's transformer layers does not call their inner modules
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the real step already raised each of these warnings
            yield
    finally:
        mha.set_fastpath_enabled(fast)


# -- the search --------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class _Sight:
    """Batches that ran again in both precisions."""

    steps: Sequence[KeptBatch]
    amp: float  # the metric over these batches alone; NaN if it was not logged
    fp32: float
    shows: bool  # the metric goes wrong in these batches
    outputs: OutputComparison
    amp_state: dict[str, Tensor]  # tensors held after the last batch
    fp32_state: dict[str, Tensor]


def _search(replay: EvaluationReplay, batches: FirstBatches, report: EvaluationReport) -> EvaluationReport | None:
    """Search the batch, then the module or operation, then a remedy, on all ranks in step."""
    ranks = Lockstep(replay.trainer)
    candidates, report = _candidates(batches, report)
    known = None if math.isfinite(report.amp) else report  # a metric that is not finite is always reported
    try:
        seen = _first_bad_batch(ranks, replay, batches, candidates, report)
        if seen is not None:
            blame = _blame(ranks, replay, seen, report)
            if seen.shows and not blame.is_slight and (blame.report.cause != "unknown" or known is not None):
                known = blame.report
            wanted = known is blame.report and math.isfinite(seen.fp32)
            settings = _Settings(replay, seen)
            remedies = _remedies(settings, blame) if wanted else None
        else:  # no single batch shows the fault: run several one after the other
            steps = [one for one in batches.kept if one.is_intact][:_MAX_TOGETHER]
            seen = ranks.run(partial(_run_both, replay, steps, report))
            summed = _blame_sums(seen, report)
            known = summed or known
            settings = _Settings(replay, seen)
            remedies = iter([settings.attempt("float32", kind="upcast")]) if summed else None
        tried = _try_together(ranks, settings, known, remedies)
    except OtherRankFailedError:
        return known
    except Exception as error:
        return known and replace(known, note=_failure(replay, error))
    remedies = tuple(result for result in tried if isinstance(result, TriedRemedy))
    failures = [result for result in tried if isinstance(result, str) and result]
    return known and replace(known, tried=remedies, note=failures[-1] if failures else known.note)


def _failure(replay: EvaluationReplay, error: Exception) -> str:
    return Failure.of(error, f"the {replay.stage} step", "the second look").text


def _candidates(batches: FirstBatches, report: EvaluationReport) -> tuple[list[KeptBatch], EvaluationReport]:
    """Return the batches that may show the fault, and the report, with the first batch that is not finite."""
    loader = report.metric.partition(LOADER_SUFFIX)[2]
    intact = [one for one in batches.kept if one.is_intact and (not loader or str(one.loader_idx) == loader)]
    values = batches.values(report.metric)
    shown = [key for key, (amp, fp32) in values.items() if _shows(report, amp, fp32)]
    flagged = [one for one in intact if (one.loader_idx, one.batch_idx) in shown]
    if not math.isfinite(report.amp):
        if not intact:
            edited = "the batches were edited in place, so that they could not be run again"
            report = replace(report, note=batches.why_none or edited)
        elif shown and not flagged:
            report = replace(report, note="this batch was not kept for a second look")
        if shown:
            report = _in_batch(report, *shown[0], *values[shown[0]])
    return flagged[:3] if values else intact[:_MAX_BATCHES], report


def _in_batch(
    report: EvaluationReport, loader_idx: int | None, batch_idx: int, amp: float, fp32: float
) -> EvaluationReport:
    return replace(report, loader_idx=loader_idx, batch_idx=batch_idx, batch_amp=amp, batch_fp32=fp32)


def _shows(report: EvaluationReport, amp: float, fp32: float) -> bool:
    """Return whether the values over some batches are wrong in the same way as the values over all batches."""
    if not math.isfinite(report.amp):
        return not math.isfinite(amp)
    if not math.isfinite(amp) or not math.isfinite(fp32):
        return not math.isfinite(amp) and math.isfinite(fp32)
    size = abs(report.amp - report.fp32)
    return math.isfinite(size) and abs(amp - fp32) > max(0.3 * size, 0.02 * abs(fp32))


def _first_bad_batch(
    ranks: Lockstep,
    replay: EvaluationReplay,
    batches: FirstBatches,
    candidates: Sequence[KeptBatch],
    report: EvaluationReport,
) -> _Sight | None:
    """Run one batch after the other until a rank sees the fault; return `None` if no rank sees it."""
    for k in range(max(gather(replay.trainer, len(candidates)))):
        # A rank without another candidate runs its last one, because all ranks must run.
        own = candidates[min(k, len(candidates) - 1)] if candidates else batches.kept[0]
        seen = ranks.run(partial(_run_both, replay, [own], report))
        if ranks.any(seen.shows):
            return seen
        seen.outputs.forget()  # freed before the next pass needs the memory
    return None


def _run_both(replay: EvaluationReplay, steps: Sequence[KeptBatch], report: EvaluationReport) -> _Sight:
    outputs = OutputComparison(inputs=True)
    fp32 = replay.in_fp32(steps, outputs.recording)
    amp = replay.in_amp(steps, outputs.comparing)
    if amp.value is None or fp32.value is None or not steps:
        return _Sight(steps, math.nan, math.nan, False, outputs, amp.held, fp32.held)
    shows = _shows(report, amp.value, fp32.value)
    return _Sight(steps, amp.value, fp32.value, shows, outputs, amp.held, fp32.held)


def _blame_sums(seen: _Sight, report: EvaluationReport) -> EvaluationReport | None:
    """Name the tensors that add up over the batches in half precision, if they make the metric wrong."""
    names = [
        f"`{name}` ({str(amp.dtype).removeprefix('torch.')}) is {float(amp.flatten()[0]):.6g}, in fp32"
        f" {float(fp32.flatten()[0]):.6g}"
        for name, amp in seen.amp_state.items()
        if amp.dtype in HALF_DTYPES
        and (fp32 := seen.fp32_state.get(name)) is not None
        and not torch.equal(amp.float(), fp32)
    ]
    return replace(report, cause="state", names=tuple(names), note="") if seen.shows and names else None


def _blame(ranks: Lockstep, replay: EvaluationReplay, seen: _Sight, report: EvaluationReport) -> Blame:
    """Find the first wrong module of the batch, or else the first wrong operation."""
    step = seen.steps[0]
    report = _in_batch(replace(report, note=""), step.loader_idx, step.batch_idx, seen.amp, seen.fp32)

    elsewhere = bad_shards(replay.trainer, replay.module)

    def of_modules() -> Blame:
        if math.isfinite(seen.amp) or math.isfinite(seen.fp32):
            return blame_module(report, seen.outputs)
        return origin_in_fp32(report, seen.outputs, step.batch, replay.module, elsewhere)

    blame = ranks.run(of_modules)
    if not ranks.any(seen.shows and blame.may_be_an_operation):
        return blame
    return ranks.run(lambda: blame_operation(blame, *replay.operations(seen.steps)))


# -- remedies ----------------------------------------------------------------------------------------------------------

_Kind = Literal["rules", "fp32", "upcast"]
_Outcome = TriedRemedy | str
"""The result of an attempt.

A text gives the reason why the attempt could not run; it is empty if there is no reason to report.
"""


def _try_together(
    ranks: Lockstep,
    settings: _Settings,
    known: EvaluationReport | None,
    remedies: Iterator[Attempt[str, _Outcome]] | None,
) -> list[_Outcome]:
    """Try the remedies of this rank, while other ranks try their own; ranks of a sharded module all try the same."""
    trainer = settings.replay.trainer
    if not is_sharded(trainer):
        with ranks.until_all_are_done(idle=partial(settings.replay.in_amp, settings.seen.steps)):
            return [result for _, result in first_that_works(ranks, remedies or (), _works)]
    # A value that one rank rounds to another precision would not fit into the collectives of the others.
    cause = None if known is None or remedies is None else (known.cause, known.names, known.module, known.place)
    causes, tried = gather(trainer, cause), dict[Any, list[_Outcome]]()
    for leader, one in enumerate(causes):
        if one is None or one in tried:
            continue
        with ranks.led_by(leader, settings.run_here) as everywhere, settings.run_by(everywhere):
            mine = [] if everywhere is None else [r for _, r in first_that_works(ranks, remedies or (), _works)]
        tried[one] = gather(trainer, mine)[leader]
    return [] if cause is None else tried[cause]


@final
class _Settings:
    """Runs the batches of a sight again, each time with another setting."""

    def __init__(self, replay: EvaluationReplay, seen: _Sight) -> None:
        self.replay, self.seen = replay, seen
        self.run: Callable[..., Replayed] = self._run
        self._result: Replayed | Exception = Replayed(None, {})

    def _run(self, kind: _Kind, rules: Sequence[str] = ()) -> Replayed:
        if kind == "fp32":
            return self.replay.in_fp32(self.seen.steps, upcast=False)
        if kind == "upcast":
            return self.replay.in_amp(self.seen.steps, upcast=True)
        return _with_rules(self.replay, self.seen, rules)

    @contextmanager
    def run_by(self, everywhere: Callable[..., bool] | None) -> Generator[None]:
        """Let :meth:`run` run on all ranks inside, by a function of :meth:`Lockstep.led_by`; `None` changes nothing."""
        if everywhere is not None:
            self.run = partial(self.run_with, everywhere)
        try:
            yield
        finally:
            self.run = self._run

    def run_here(self, **setting: Any) -> bool:
        """Run with a setting and keep the result for :meth:`run_with`; return whether it ran."""
        try:
            self._result = self._run(**setting)
        except Exception as error:
            self._result = error
        return isinstance(self._result, Replayed)

    def run_with(self, everywhere: Callable[..., bool], **setting: Any) -> Replayed:
        """Run with a setting on all ranks, and return the result of this one."""
        everywhere(**setting)
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    def attempt(self, written: str, **setting: Any) -> Attempt[str, _Outcome]:
        """Return the attempt with a setting, `written` as in code."""
        seen = self.seen

        def outcome() -> _Outcome:
            try:
                value = self.run(**setting).value
            except ValueError:  # half-precision weights cannot be kept in fp32
                return ""
            except Exception as error:
                return _failure(self.replay, error)
            value = math.nan if value is None else value
            gone = abs(value - seen.fp32) <= _GONE * abs(seen.amp - seen.fp32)
            return TriedRemedy(written, value, gone if math.isfinite(seen.amp) else math.isfinite(value))

        return Attempt(written, outcome)


def _remedies(settings: _Settings, blame: Blame) -> Iterator[Attempt[str, _Outcome]]:
    """Iterate over remedies: more and more modules in fp32, and then the whole evaluation."""
    replay, outputs = settings.replay, settings.seen.outputs
    rules = [] if blame.first_in_fp32 is None else [blame.first_in_fp32]
    for _ in range(_MAX_TRIES if rules else 0):
        yield settings.attempt(_setting(replay, f"fp32_modules={rules!r}"), kind="rules", rules=rules)
        wider = more_modules(rules, blame_module(blame.report, outputs), outputs)
        if wider is None:
            break
        rules = wider
    yield settings.attempt(_setting(replay, "eval_precision='fp32'"), kind="fp32")


def _setting(replay: EvaluationReplay, argument: str) -> str:
    ours = isinstance(replay.trainer.precision_plugin, AmpPrecision)
    return argument if ours else f"AmpPrecision(..., {argument})"


def _with_rules(replay: EvaluationReplay, seen: _Sight, rules: Sequence[str]) -> Replayed:
    seen.outputs.again()
    try:
        return replay.in_amp(seen.steps, seen.outputs.comparing, rules)
    except Exception:
        seen.outputs.again()  # the outputs of an unfinished step cannot be compared
        raise


def _works(outcome: _Outcome) -> bool:
    return isinstance(outcome, TriedRemedy) and outcome.works
