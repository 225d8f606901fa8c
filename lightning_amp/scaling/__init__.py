"""Loss scaling in plain torch: the scaler, its policy, and the record of every step."""

from lightning_amp.scaling._derivatives import DerivativeScale
from lightning_amp.scaling._gradients import HalfGradientsError, all_finite, has_gradients, parameters
from lightning_amp.scaling._history import ScaleHistory
from lightning_amp.scaling._records import RecordLog, StepRecord
from lightning_amp.scaling._saved import Saved, check_scaler_state
from lightning_amp.scaling._scaler import DynamicLossScaler
from lightning_amp.scaling._steps import OptimizerSteps
from lightning_amp.scaling._windows import Outcome, Window

__all__ = [
    "DerivativeScale",
    "DynamicLossScaler",
    "HalfGradientsError",
    "OptimizerSteps",
    "Outcome",
    "RecordLog",
    "Saved",
    "ScaleHistory",
    "StepRecord",
    "Window",
    "all_finite",
    "check_scaler_state",
    "has_gradients",
    "parameters",
]
