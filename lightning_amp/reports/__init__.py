"""Show findings to a person as tables, text, CSV and pictures. No Lightning. Read `_overflow.py` first."""

from lightning_amp.findings import ComparisonRow, GradientRow, LostPrecision, ModuleRow, TriedRemedy
from lightning_amp.reports._comparison import (
    ComparisonTable,
    ModuleTable,
    describe_both,
    describe_comparison,
    describe_difference,
)
from lightning_amp.reports._gradients import GradientTable, describe_gradient
from lightning_amp.reports._overflow import Overflow, ScaleIs, describe_growth
from lightning_amp.reports._scale_history import SCALE_HISTORY_FILE, ScaleHistory, plot_histories

__all__ = [
    "SCALE_HISTORY_FILE",
    "ComparisonRow",
    "ComparisonTable",
    "GradientRow",
    "GradientTable",
    "LostPrecision",
    "ModuleRow",
    "ModuleTable",
    "Overflow",
    "ScaleHistory",
    "ScaleIs",
    "TriedRemedy",
    "describe_both",
    "describe_comparison",
    "describe_difference",
    "describe_gradient",
    "describe_growth",
    "plot_histories",
]
