"""`PrecisionReport`: the verdicts, figures and recommendation of a comparison."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any

from typing_extensions import final, override

from lightning_amp._files import open_text, write_atomically
from lightning_amp._plain_data import Table
from lightning_amp.compare import views
from lightning_amp.compare._arm import Arm
from lightning_amp.compare._judge import Judgement, judge
from lightning_amp.compare._plan import Plan
from lightning_amp.compare._run import ArmRun
from lightning_amp.compare._verdict import Verdict

_FORMAT = 1


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
        runs: The record of each run, in any order.
        speed_runs: The short runs that only measured speed, if there are such.

    Attributes:
        plan: The plan of the comparison.

    """

    def __init__(self, plan: Plan, runs: Iterable[ArmRun], speed_runs: Iterable[ArmRun] = ()) -> None:
        self.plan = plan
        self._speed_runs = tuple(speed_runs)
        position = {label: index for index, label in enumerate(plan.labels)}
        known = [run for run in runs if run.label in position and run.seed in plan.seeds]
        self._runs = tuple(sorted(known, key=lambda run: (run.seed, position[run.label])))
        for run, following in pairwise(self._runs):
            if (run.label, run.seed) == (following.label, following.seed):
                raise ValueError(
                    f"`runs` must hold one run of each arm and seed, got two of {run.label!r}, {run.seed}."
                )

    @cached_property
    def _judgement(self) -> Judgement:
        return judge(self.plan, self._runs, self._speed_runs)

    @property
    def arms(self) -> Mapping[str, Arm]:
        """Return the arms by label, the reference first, the control last."""
        return self._judgement.arms

    @property
    def recommended(self) -> str | None:
        """Return the label of the arm to use; `None` if the runs do not show it."""
        return self._judgement.recommendation.label

    @property
    def recommendation(self) -> str:
        """Return one or two sentences on the arm to use, the reason, and the conditions that would change both."""
        return self._judgement.recommendation.sentence

    def verdict(self, label: str, metric: str) -> Verdict:
        """Return whether an arm is worse than the reference in a metric.

        Returns:
            Its `claim` is `"not worse"`, `"worse"`, `"undecided"` or `"no margin"`; `str` writes it as a sentence. The
            reference, which is not compared with itself, has `"no margin"`.

        Raises:
            KeyError: If there is no such arm, or if no run of the arm logged the metric. An arm has a verdict in each
                metric with a margin, even if it never logged the metric.

        """
        if label not in self.arms:
            raise KeyError(f"There is no arm {label!r}; there are {list(self.arms)}.")
        metrics = self.arms[label].metrics
        if metric not in metrics:
            raise KeyError(f"There is no metric {metric!r} of the arm {label!r}; there are {list(metrics)}.")
        return metrics[metric].verdict

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.plan, self._runs, self._speed_runs)

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.arms)}, seeds {list(self.plan.seeds)})"

    @override
    def __str__(self) -> str:
        return self.to_markdown()

    def blocks(self) -> list[str | Table]:
        """Return the parts of :meth:`to_markdown`: paragraphs of Markdown, and tables before they are laid out."""
        return views.blocks(self._judgement)

    def to_markdown(self) -> str:
        """Write the recommendation, the verdicts and the figures as Markdown."""
        return views.markdown(self._judgement)

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write all measurements to a path or a URL. NaN and infinities are texts."""
        data = {
            "format": _FORMAT,
            "recommended": self.recommended,
            "recommendation": self.recommendation,
            "verdicts": {
                label: {n: str(m.verdict) for n, m in arm.metrics.items()} for label, arm in self.arms.items()
            },
            "speeds": {label: arm.speed.to_data() for label, arm in self.arms.items() if arm.speed is not None},
            "plan": self.plan.to_data(),
            "runs": [run.to_data() for run in self._runs],
            "speed_runs": [run.to_data() for run in self._speed_runs],
        }
        write_atomically(path, lambda file: file.write(json.dumps(data, indent=1, allow_nan=False)))

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
                raise ValueError("its `format` is not 1")
            if not isinstance(data.get("runs"), list):
                raise ValueError("its `runs` are not a list")
            runs, speed_runs = ([ArmRun.from_data(run) for run in data.get(key, [])] for key in ("runs", "speed_runs"))
            return cls(Plan.from_data(data.get("plan")), runs, speed_runs)
        except (ValueError, RecursionError) as error:  # this also catches `json.JSONDecodeError`, a `ValueError`
            raise ValueError(f"`{path}` is not what `PrecisionReport.to_json` writes: {error}") from error

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as one self-contained page, to a path or a URL.

        Verdicts come first; then the figures, the curves over steps and over time, the differences with their
        intervals and margins, the loss scale, and where the runs ran. The page is light or dark as the reader's system
        is, fits a phone, and prints.

        Raises:
            ModuleNotFoundError: If Jinja2 is not installed (torch installs it).

        """
        text = views.page(self._judgement)
        write_atomically(path, lambda file: file.write(text))
