"""Does a precision cost accuracy, and what does it gain? Whole runs, side by side, and a verdict."""

from lightning_amp.comparison._arm import Arm, ArmMetric
from lightning_amp.comparison._arm_run import ArmRun
from lightning_amp.comparison._compare import compare_precisions
from lightning_amp.comparison._report import PrecisionReport

__all__ = ["Arm", "ArmMetric", "ArmRun", "PrecisionReport", "compare_precisions"]
