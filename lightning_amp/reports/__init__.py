"""What a person reads: tables, text, CSV and pictures. No Lightning."""

from lightning_amp.findings import Remedy
from lightning_amp.reports._comparison_table import LOADER_SUFFIX, ComparisonRow, ComparisonTable
from lightning_amp.reports._evaluation_report import EvaluationReport, TriedRemedy
from lightning_amp.reports._gradient_loss import LOW_DB, GradientLoss, Trial, describe_loss, find_gradient_loss
from lightning_amp.reports._gradient_plot import Quantity
from lightning_amp.reports._gradient_table import TOTAL, GradientRow, GradientTable
from lightning_amp.reports._module_table import ModuleRow, ModuleTable
from lightning_amp.reports._overflow_report import OverflowReport
from lightning_amp.reports._scale_chart import scale_chart
from lightning_amp.reports._scale_history import SCALE_HISTORY_FILE, ScaleHistory
from lightning_amp.reports._scale_plot import plot_histories
from lightning_amp.reports._scale_replay import PolicyReplay
from lightning_amp.reports._table import MAX_ROWS

__all__ = [
    "LOADER_SUFFIX",
    "LOW_DB",
    "MAX_ROWS",
    "SCALE_HISTORY_FILE",
    "TOTAL",
    "ComparisonRow",
    "ComparisonTable",
    "EvaluationReport",
    "GradientLoss",
    "GradientRow",
    "GradientTable",
    "ModuleRow",
    "ModuleTable",
    "OverflowReport",
    "PolicyReplay",
    "Quantity",
    "Remedy",
    "ScaleHistory",
    "Trial",
    "TriedRemedy",
    "describe_loss",
    "find_gradient_loss",
    "plot_histories",
    "scale_chart",
]
