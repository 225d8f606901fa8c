"""`PrecisionReport`: the verdicts, figures and recommendation of a comparison."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from typing_extensions import final, override

from lightning_amp._files import open_text, write_atomically, write_json
from lightning_amp.compare import _words
from lightning_amp.compare._arm import Arm, ArmMetric
from lightning_amp.compare._checks import direction_of
from lightning_amp.compare._run import CONTROL, Plan, Run, from_data, to_data
from lightning_amp.compare._stats import ALPHA, Difference, Direction, Verdict, resolution_of, verdicts
from lightning_amp.measure import SpeedComparison, paired_log_ratio

_FORMAT = 2
_NO_RECORD = "it left no record"
_LEAST_STEPS = 10
"""The least number of steady steps that two runs must have in common before their speeds are compared."""


@final
class PrecisionReport:
    """The result of :func:`compare_precisions`: a verdict for each precision and metric, and the gains.

    .. code-block:: python

        report = PrecisionReport.from_json("report.json")
        print(report.recommendation)
        print(report.verdict("fp16", "val_loss"))  # not worse: ...
        report.to_html("report.html")

    The JSON file is the source: it holds the measurements of each run, and everything else is computed from them.

    Args:
        plan: The plan of the comparison.
        runs: The record of each run, in any order. A run of the plan without a record counts as a failed run.

    Attributes:
        plan: The plan of the comparison.

    """

    def __init__(self, plan: Plan, runs: Iterable[Run]) -> None:
        self.plan = plan
        runs = list(runs)
        found = {(run.label, run.seed): run for run in runs}
        if len(found) < len(runs):
            raise ValueError("`runs` must hold one run of each arm and seed, got two of one.")
        self._runs = [
            found.get((label, seed), Run(label, seed, error=_NO_RECORD)) for seed in plan.seeds for label in plan.labels
        ]

    # -- results -------------------------------------------------------------------------------------------------------

    @cached_property
    def arms(self) -> Mapping[str, Arm]:
        """Return the arms by label, the reference first, the control last."""
        judged = self._verdicts()
        return MappingProxyType({label: self._arm(label, judged) for label in self.plan.labels})

    @property
    def recommended(self) -> str | None:
        """Return the label of the arm to use; `None` if the runs do not show it."""
        return _words.recommend(list(self.arms.values()))[0]

    @property
    def recommendation(self) -> str:
        """Return one or two sentences on the arm to use, the reason, and the conditions that would change both."""
        return " ".join(_words.recommend(list(self.arms.values()))[1])

    def verdict(self, label: str, metric: str) -> Verdict:
        """Return whether an arm is worse than the reference in a metric.

        Returns:
            Its `claim` is `"not worse"`, `"worse"`, `"undecided"` or `"no margin"`; `str` writes it as a sentence. The
            reference, which is not compared with itself, has `"no margin"`.

        Raises:
            KeyError: If there is no such arm, or if no run logged the metric.

        """
        if label not in self.arms:
            raise KeyError(f"There is no arm {label!r}; there are {list(self.arms)}.")
        metrics = self.arms[label].metrics
        if metric not in metrics:
            raise KeyError(f"There is no metric {metric!r} of the arm {label!r}; there are {list(metrics)}.")
        return metrics[metric].verdict

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.plan, self._runs)

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.arms)}, seeds {list(self.plan.seeds)})"

    @override
    def __str__(self) -> str:
        return self.to_markdown()

    # -- files ---------------------------------------------------------------------------------------------------------

    def to_markdown(self) -> str:
        """Write the recommendation, the verdicts and the figures as Markdown."""
        return _words.markdown(self.plan, self.arms)

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write all measurements to a path or a URL. NaN and infinities are texts."""
        arms = self.arms.items()
        data = {
            "format": _FORMAT,
            "recommended": self.recommended,
            "recommendation": self.recommendation,
            "verdicts": {label: {name: str(m.verdict) for name, m in arm.metrics.items()} for label, arm in arms},
            "speeds": {label: arm.speed.to_data() for label, arm in arms if arm.speed is not None},
            "plan": to_data(self.plan),
            "runs": [to_data(run) for run in self._runs],
        }
        write_json(path, data)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> PrecisionReport:
        """Read a file that :meth:`to_json` wrote, from a path or a URL.

        Raises:
            ValueError: If it is not such a file; the message names it.

        """
        try:
            with open_text(path) as file:
                data: Any = json.load(file)
            if not isinstance(data, dict) or data.get("format") != _FORMAT:
                raise ValueError(f"its `format` is not {_FORMAT}")
            plan = from_data(Plan, data.get("plan"))
            if not plan.arms or CONTROL in plan.arms or not all(0 <= m.value < math.inf for m in plan.margins.values()):
                raise ValueError("its `plan` has no arms, an arm called 'control', or a margin below 0")
            return cls(plan, [from_data(Run, run) for run in data.get("runs") or []])
        except (ValueError, RecursionError, TypeError) as error:  # also `json.JSONDecodeError`, a `ValueError`
            raise ValueError(f"`{path}` is not what `PrecisionReport.to_json` writes: {error}") from error

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as one self-contained page, to a path or a URL.

        It has the tables of :meth:`to_markdown`, the curves over steps and over time, the differences with their
        intervals and margins, and the loss scale. The page is light or dark as the reader's system is, fits a phone,
        and prints.

        Raises:
            ModuleNotFoundError: If Jinja2 (torch installs it) or matplotlib is not installed.

        """
        from lightning_amp.compare._html import page

        text = page(self.plan, self.arms)
        write_atomically(path, lambda file: file.write(text))

    # -- from runs to arms ---------------------------------------------------------------------------------------------

    @cached_property
    def _of(self) -> dict[str, list[Run]]:
        return {label: [run for run in self._runs if run.label == label] for label in self.plan.labels}

    @cached_property
    def _directions(self) -> dict[str, Direction | None]:
        """Return the better direction of each metric: by torchmetrics, else by the user, else by its name."""
        found: dict[str, Direction | None] = {}
        for name in dict.fromkeys(name for run in self._runs for name in run.curves):
            known: Direction | None = next((run.directions[name] for run in self._runs if name in run.directions), None)
            given = self.plan.margins[name].direction if name in self.plan.margins else None
            found[name] = known or given or direction_of(name)
        return found

    def _verdicts(self) -> dict[tuple[str, str], Verdict]:
        """Judge all arms together in all metrics with a margin.

        The control is judged separately, because it is not a candidate.
        """
        found: dict[tuple[str, str], Verdict] = {}
        for labels in ([label for label in self.plan.arms if label != self.plan.reference], [CONTROL]):
            found |= verdicts(
                {
                    (label, name): (self._difference(name, label), way, self.plan.margins[name].value)
                    for label in labels
                    if label in self._of
                    for name, way in self._directions.items()
                    if name in self.plan.margins and way is not None
                }
            )
        reference = [logged for run in self._of[self.plan.reference] if (logged := _logged(run))]
        if len(set(reference)) == len(reference):
            return found
        because = "two seeds give the same run of the reference, so that they are not independent pairs"
        return {key: replace(verdict, claim="undecided", because=because) for key, verdict in found.items()}

    def _arm(self, label: str, judged: Mapping[tuple[str, str], Verdict]) -> Arm:
        plan, runs = self.plan, self._of[label]
        is_reference, is_control = label == plan.reference, label == CONTROL
        logged = [name for run in runs for name in run.curves]
        names = [name for name in self._directions if name in logged or (label, name) in judged]
        metrics = {name: self._metric(name, label, judged.get((label, name))) for name in names}
        description = plan.arms.get(label, f"{plan.arms[plan.reference]}, initial weights moved in their last bit")
        speed = (None, "") if is_reference else self._speed(label)
        return Arm(label, description, is_reference, is_control, tuple(runs), metrics, *speed)

    # -- metrics -------------------------------------------------------------------------------------------------------

    def _difference(self, name: str, label: str) -> Difference:
        """Return the differences paired by seed, with the number of seeds of which a run failed or is missing.

        Runs that are equal in every logged bit show that the arms compute the same, so their spread has no lower bound.
        """
        theirs, ours = self._finals(name, self.plan.reference), self._finals(name, label)
        pairs = [(ours[seed], theirs[seed]) for seed in self.plan.seeds if seed in ours and seed in theirs]
        values = (point.value for run in self._runs for point in run.curves.get(name, ()))
        is_same = bool(pairs) and all(_logged(run) == _logged(other) != () for run, other in self._pairs(label))
        return Difference(
            tuple(own - reference for own, reference in pairs),
            sys.float_info.min if is_same else resolution_of(values),
            self.plan.num_seeds - len(pairs),
            sum(not math.isfinite(reference) for _, reference in pairs),
        )

    def _finals(self, name: str, label: str) -> dict[int, float]:
        """Return the value of the last validation, by seed.

        It is NaN if the arm's last validation did not log the metric, but the reference's did. Otherwise a module that
        does not log values that are not finite would be judged by an earlier validation.
        """

        def is_last(run: Run) -> bool:
            return run.curves[name][-1].step >= run.last_validation

        logged = {key: [run for run in self._of[key] if run.finished and run.curves.get(name)] for key in self._of}
        always = {run.seed for run in logged[self.plan.reference] if is_last(run)}
        return {
            run.seed: run.curves[name][-1].value if is_last(run) or run.seed not in always else math.nan
            for run in logged[label]
        }

    def _metric(self, name: str, label: str, verdict: Verdict | None) -> ArmMetric:
        way, is_reference = self._directions[name], label == self.plan.reference
        finals = self._finals(name, label)
        logged = {run.seed: run for run in self._of[label] if run.seed in finals}
        margin = self.plan.margins[name].value if name in self.plan.margins else None
        sign = -1 if way == "max" else 1
        costs = {seed: [(p.train_s, sign * p.value) for p in run.curves[name]] for seed, run in logged.items() if way}
        limits = {
            seed: sign * value + (margin or 0.0) for seed, value in self._finals(name, self.plan.reference).items()
        }
        return ArmMetric(
            name=name,
            direction=way,
            finals=finals,
            bests={
                seed: sign * min((cost for _, cost in points if not math.isnan(cost)), default=math.nan)
                for seed, points in costs.items()
            },
            difference=None if is_reference else self._difference(name, label),
            margin=margin,
            verdict=verdict or Verdict("no margin", because="this is the reference" if is_reference else ""),
            evaluation_diff={
                seed: 0.0 if amp == fp32 else amp - fp32  # infinities, too
                for seed, run in logged.items()
                if name in run.same_weights
                for amp, fp32 in [run.same_weights[name]]
            },
            time_to_quality_s={
                seed: next((time for time, cost in points if cost <= limits[seed]), math.inf)
                for seed, points in costs.items()
                if not math.isnan(limits.get(seed, math.nan))
            },
        )

    # -- speeds --------------------------------------------------------------------------------------------------------

    def _pairs(self, label: str) -> list[tuple[Run, Run]]:
        """Return each finished run of an arm with the reference's run of the same seed."""
        theirs = {run.seed: run for run in self._of[self.plan.reference] if run.finished}
        return [(run, theirs[run.seed]) for run in self._of[label] if run.finished and run.seed in theirs]

    def _speed(self, label: str) -> tuple[SpeedComparison | None, str]:
        """Compare the times of runs that had a device of the same model for themselves; or return why there are none.

        The control computes the same as the reference. If it is faster or slower, the machine was busy during one of
        them, and perhaps during any other arm. So every interval is widened by the control's interval.
        """
        ratios, why = list[float](), "no two runs finished with the same seed"
        for run, other in self._pairs(label):
            times, theirs = run.seconds_of_steps(), other.seconds_of_steps()
            both = sorted(times.keys() & theirs.keys())
            if run.shared_a_device(self._runs) or other.shared_a_device(self._runs):
                why = "runs shared a device"
            elif (run.device, run.num_threads) != (other.device, other.num_threads):
                why = "the runs had different devices"
            elif len(both) < _LEAST_STEPS:
                why = f"fewer than {_LEAST_STEPS} steady steps"
            else:
                ratios.append(paired_log_ratio([times[i] for i in both], [theirs[i] for i in both]))
        if not ratios:
            return None, why
        found = SpeedComparison.of(ratios, 1 - 2 * ALPHA)
        control = self._speed(CONTROL)[0] if self.plan.control and label != CONTROL else None
        return (found if control is None else found.widened(control)), ""


def _logged(run: Run) -> tuple[tuple[float, ...], ...]:
    """Return the losses and metrics of a finished run, which show whether two runs are the same."""
    curves = [run.loss, *(run.curves[name] for name in sorted(run.curves))]
    return tuple(tuple(p.value for p in points) for points in curves) if run.finished and run.loss else ()
