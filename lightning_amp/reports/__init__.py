"""Show findings to a person as tables, text, CSV and pictures. No Lightning. Read `_overflow.py` first."""

from lightning_amp.findings import (
    ComparisonRow,
    GradientRow,
    LostPrecision,
    ModuleRow,
    TriedRemedy,
)
from lightning_amp.reports._comparison_table import ComparisonTable, ModuleTable
from lightning_amp.reports._comparison_words import (
    describe_both,
    describe_comparison,
    describe_difference,
    describe_one_sided,
)
from lightning_amp.reports._gradient_plot import Quantity
from lightning_amp.reports._gradient_table import GradientTable
from lightning_amp.reports._gradient_words import describe_derivative, describe_gradient
from lightning_amp.reports._overflow import Overflow, ScaleIs
from lightning_amp.reports._scale_drawing import plot_histories
from lightning_amp.reports._scale_history import SCALE_HISTORY_FILE, ScaleHistory
from lightning_amp.reports._table import MAX_ROWS

__all__ = [
    "MAX_ROWS",
    "SCALE_HISTORY_FILE",
    "ComparisonRow",
    "ComparisonTable",
    "GradientRow",
    "GradientTable",
    "LostPrecision",
    "ModuleRow",
    "ModuleTable",
    "Overflow",
    "Quantity",
    "ScaleHistory",
    "ScaleIs",
    "TriedRemedy",
    "describe_both",
    "describe_comparison",
    "describe_derivative",
    "describe_difference",
    "describe_gradient",
    "describe_one_sided",
    "plot_histories",
]
