"""Find the first non-finite value of a forward and backward. Plain torch.

Read `_diagnosis.py` first.
"""

from lightning_amp.findings import Diagnosis, Operation
from lightning_amp.tracing._conditions import RandomState, fp32_switches, full_precision, paired_random, reduces_fp32
from lightning_amp.tracing._diagnosis import (
    blamed_in_fp32,
    blamed_in_half,
    diagnose,
    nonfinite_entries,
    operation,
)
from lightning_amp.tracing._fp32_throughout import Fp32Draws, fp32_throughout
from lightning_amp.tracing._operation_calls import BackwardCall, Key, OperationCall
from lightning_amp.tracing._operation_watch import Edit, OperationWatch
from lightning_amp.tracing._operations import (
    CASTS,
    COMPARISONS_WITH_TARGETS,
    EXPONENTIALS,
    NORMS,
    SUMMING,
    argument_of,
    domain,
    plain,
)
from lightning_amp.tracing._places import Place, called_by_optimizer, running_place, user_place
from lightning_amp.tracing._trace import GradientPlace, Trace, magnitudes

__all__ = [
    "CASTS",
    "COMPARISONS_WITH_TARGETS",
    "EXPONENTIALS",
    "NORMS",
    "SUMMING",
    "BackwardCall",
    "Diagnosis",
    "Edit",
    "Fp32Draws",
    "GradientPlace",
    "Key",
    "Operation",
    "OperationCall",
    "OperationWatch",
    "Place",
    "RandomState",
    "Trace",
    "argument_of",
    "blamed_in_fp32",
    "blamed_in_half",
    "called_by_optimizer",
    "diagnose",
    "domain",
    "fp32_switches",
    "fp32_throughout",
    "full_precision",
    "magnitudes",
    "nonfinite_entries",
    "operation",
    "paired_random",
    "plain",
    "reduces_fp32",
    "running_place",
    "user_place",
]
