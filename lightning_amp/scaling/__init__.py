"""Loss scaling in plain torch: optimizer steps, their records, and the scaler. Read `_steps.py` first."""

from lightning_amp.scaling._backward_watch import BackwardWatch
from lightning_amp.scaling._bypassed_steps import Advice, BypassedSteps
from lightning_amp.scaling._derivative_scale import DerivativeScale
from lightning_amp.scaling._gradient_state import Scaled, Unscaled
from lightning_amp.scaling._gradients import HalfGradientsError, has_gradients, parameters
from lightning_amp.scaling._holds import Hold
from lightning_amp.scaling._ledger import Ledger, enabled
from lightning_amp.scaling._policy_replay import ReplayedRun, replay_policy, scaler_of_policy
from lightning_amp.scaling._records import RecordLog, Skip, StepResult, Subscription
from lightning_amp.scaling._saved import Saved, check_scaler_state
from lightning_amp.scaling._scaled_steps import ScaledSteps
from lightning_amp.scaling._scaler import POLICY_SETTINGS, DynamicLossScaler
from lightning_amp.scaling._steps import OptimizerSteps, StepPlan

__all__ = [
    "POLICY_SETTINGS",
    "Advice",
    "BackwardWatch",
    "BypassedSteps",
    "DerivativeScale",
    "DynamicLossScaler",
    "HalfGradientsError",
    "Hold",
    "Ledger",
    "OptimizerSteps",
    "RecordLog",
    "ReplayedRun",
    "Saved",
    "Scaled",
    "ScaledSteps",
    "Skip",
    "StepPlan",
    "StepResult",
    "Subscription",
    "Unscaled",
    "check_scaler_state",
    "enabled",
    "has_gradients",
    "parameters",
    "replay_policy",
    "scaler_of_policy",
]
