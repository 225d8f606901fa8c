"""Loss scaling in plain torch: optimizer steps, their records, and the scaler. Read `_steps.py` first."""

from lightning_amp.scaling._checkpoint import Saved
from lightning_amp.scaling._derivative_scale import DerivativeScale
from lightning_amp.scaling._gradients import HalfGradientsError, parameters
from lightning_amp.scaling._holds import Hold
from lightning_amp.scaling._log import RecordLog, StepCounts, StepResult, Subscription
from lightning_amp.scaling._own_loop import ScaledSteps
from lightning_amp.scaling._plan import Calls, StepPlan
from lightning_amp.scaling._scalars import Skip, max_over_ranks
from lightning_amp.scaling._scaler import DynamicLossScaler, load_state
from lightning_amp.scaling._steps import OptimizerSteps

__all__ = [
    "Calls",
    "DerivativeScale",
    "DynamicLossScaler",
    "HalfGradientsError",
    "Hold",
    "OptimizerSteps",
    "RecordLog",
    "Saved",
    "ScaledSteps",
    "Skip",
    "StepCounts",
    "StepPlan",
    "StepResult",
    "Subscription",
    "load_state",
    "max_over_ranks",
    "parameters",
]
