"""What do finished runs show? Differences, verdicts, a recommendation; as text, JSON and a page. No Lightning."""

from lightning_amp.verdicts._arm import Arm, ArmMetric
from lightning_amp.verdicts._arm_run import ArmRun, Point
from lightning_amp.verdicts._directions import direction_of
from lightning_amp.verdicts._plan import CONTROL, Margin, Plan
from lightning_amp.verdicts._report import PrecisionReport
from lightning_amp.verdicts._statistics import scipy_special

__all__ = [
    "CONTROL",
    "Arm",
    "ArmMetric",
    "ArmRun",
    "Margin",
    "Plan",
    "Point",
    "PrecisionReport",
    "direction_of",
    "scipy_special",
]
