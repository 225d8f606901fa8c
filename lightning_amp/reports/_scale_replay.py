"""`PolicyReplay`: a recorded run under another scale policy, as a range."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import final

from lightning_amp._text import percent, span
from lightning_amp.scaling import POLICY_SETTINGS, DynamicLossScaler, ReplayedRun, replay_policy, scaler_of_policy

if TYPE_CHECKING:
    from lightning_amp.reports._scale_history import ScaleHistory


@final
@dataclass(frozen=True, eq=False)
class PolicyReplay:
    """What :meth:`ScaleHistory.replay` found: two runs, between which the truth may lie.

    .. code-block:: python

        monitor = ScaleMonitor()
        L.Trainer(plugins=[AmpPrecision("fp16")], callbacks=[monitor], max_epochs=1).fit(model, data)
        replay = monitor.history.replay(init_scale=2.0**10, growth_interval=500)
        print(replay.summary())  # 0 to 3 of 8 steps skipped, 5 in the record, which decides 38 % to 75 % of the steps
        replay.pessimistic.to_csv("replayed.csv")

    Where the policy and the record are at different scales, the record may not tell whether a step overflows:
    :attr:`optimistic` is the run in which no such step does, :attr:`pessimistic` the one in which all of them do. If
    all are decided, the two are equal.

    Attributes:
        recorded: What was replayed; of a run that fell back to another precision the part before.
        policy: All settings of the policy, by name.
        optimistic: The run in which no undecided step overflows.
        pessimistic: The run in which every undecided step overflows.
        decided_fraction: Share of the steps that the record decides, from 0 to 1, in the optimistic and in the
            pessimistic run.
        stopped_at: Index of the step at which `max_consecutive_skips` ends the optimistic and the pessimistic run;
            `None` for one that does not end so.

    """

    LIMITS: ClassVar[str] = (
        "A step that overflowed would have done so at every larger scale, and one that did not would not at any smaller"
        " one. What lies in between is not in the record: the ends of a range are two assumptions, that no such step"
        " overflows and that all of them do. Nor can a replay know what would have followed: after another skip the"
        " weights are others, and so are all later gradients. Above the scales of the record nothing was tried."
    )
    """What a replay cannot know."""

    recorded: ScaleHistory
    policy: Mapping[str, float]
    optimistic: ScaleHistory
    pessimistic: ScaleHistory
    decided_fraction: tuple[float, float]
    stopped_at: tuple[int | None, int | None]

    @property
    def num_skipped(self) -> tuple[int, int]:
        """Return how many steps the optimistic and the pessimistic run skip.

        The second one skips at least what the first does, unless it ends earlier.
        """
        return self.optimistic.num_skipped, self.pessimistic.num_skipped

    @property
    def equals_record(self) -> bool:
        """Return whether the policy gives the recorded run, step by step, as the one that recorded it does."""
        return list(self.optimistic) == list(self.recorded)  # each step is then decided, and so the other run is equal

    def summary(self) -> str:
        """Write one line: `12 to 40 of 4,000 steps skipped, 15 in the record, which decides 96 % of the steps`."""
        skipped = span([f"{number:,}" for number in sorted(self.num_skipped)])
        decided = span([percent(fraction) for fraction in sorted(self.decided_fraction)])
        text = (
            f"{skipped} of {self.recorded.num_attempted:,} steps skipped, {self.recorded.num_skipped:,} in the record,"
            f" which decides {decided} of the steps"
        )
        stops = [step for step in self.stopped_at if step is not None]
        if stops:
            would, where = "would" if len(stops) == 2 else "might", span([f"{step:,}" for step in sorted(stops)])
            most = self.policy["max_consecutive_skips"]
            text += f"; the run {would} stop at step {where}, after {most:,} skips in a row"
        return text


def replay_history(history: ScaleHistory, policy: Mapping[str, Any]) -> PolicyReplay:
    """Do what :meth:`ScaleHistory.replay` documents."""
    history = history.before_fallback()
    records, first = list(history), history.first
    if first is None:
        raise ValueError("There is nothing to replay: no optimizer step was recorded.")
    if all(record.scale == record.next_scale == 1 for record in records):
        raise ValueError(
            "There is nothing to replay: every step was taken at scale 1, as in bf16 and fp32, which need no loss"
            " scaling. Replay the record of a run in fp16."
        )
    runs = [
        replay_policy(records, scaler_of_policy(policy, first.scale), assume_overflow=assumed)
        for assumed in (False, True)
    ]
    optimistic, pessimistic = (_history(type(history), run) for run in runs)
    return PolicyReplay(
        recorded=history,
        policy=_settings(scaler_of_policy(policy, first.scale)),
        optimistic=optimistic,
        pessimistic=pessimistic,
        decided_fraction=(
            runs[0].num_decided / optimistic.num_attempted,
            runs[1].num_decided / pessimistic.num_attempted,
        ),
        stopped_at=(runs[0].stopped_at, runs[1].stopped_at),
    )


def _history(kind: type[ScaleHistory], run: ReplayedRun) -> ScaleHistory:
    history = kind()
    history.extend(run.records)
    return history


def _settings(scaler: DynamicLossScaler) -> dict[str, float]:
    values = scaler.state_dict()
    return {name: values["scale" if name == "init_scale" else name] for name in POLICY_SETTINGS}
