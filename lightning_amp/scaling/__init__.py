"""Loss scaling in plain torch: the scaler, its policy, and the record of every step."""

from lightning_amp.scaling._derivatives import DerivativeScale
from lightning_amp.scaling._gradient_state import Outcome, Window
from lightning_amp.scaling._gradients import HalfGradientsError, has_gradients, parameters
from lightning_amp.scaling._records import Reason, RecordLog, StepRecord
from lightning_amp.scaling._saved import Saved, check_scaler_state
from lightning_amp.scaling._scaler import DynamicLossScaler
from lightning_amp.scaling._steps import OptimizerSteps

__all__ = [
    "DerivativeScale",
    "DynamicLossScaler",
    "HalfGradientsError",
    "OptimizerSteps",
    "Outcome",
    "Reason",
    "RecordLog",
    "Saved",
    "StepRecord",
    "Window",
    "check_scaler_state",
    "has_gradients",
    "parameters",
]
