"""Loss scaling in plain torch: the scaler and its policy, one optimizer step, and the record of every step."""

from lightning_amp.scaling._backward_watch import BackwardWatch
from lightning_amp.scaling._derivative_scale import DerivativeScale
from lightning_amp.scaling._fallbacks import before_fallback, describe_fallbacks, fallbacks
from lightning_amp.scaling._gradient_state import Scaled, Unscaled
from lightning_amp.scaling._gradients import HalfGradientsError, has_gradients, parameters
from lightning_amp.scaling._policy_replay import ReplayedRun, replay_policy, scaler_of_policy
from lightning_amp.scaling._records import RecordLog
from lightning_amp.scaling._saved import Saved, check_scaler_state
from lightning_amp.scaling._scaler import POLICY_SETTINGS, DynamicLossScaler
from lightning_amp.scaling._skip import Skip
from lightning_amp.scaling._step import StepPlan, StepResult
from lightning_amp.scaling._step_record import Reason, StepPrecision, StepRecord, Subscription
from lightning_amp.scaling._steps import OptimizerSteps

__all__ = [
    "POLICY_SETTINGS",
    "BackwardWatch",
    "DerivativeScale",
    "DynamicLossScaler",
    "HalfGradientsError",
    "OptimizerSteps",
    "Reason",
    "RecordLog",
    "ReplayedRun",
    "Saved",
    "Scaled",
    "Skip",
    "StepPlan",
    "StepPrecision",
    "StepRecord",
    "StepResult",
    "Subscription",
    "Unscaled",
    "before_fallback",
    "check_scaler_state",
    "describe_fallbacks",
    "fallbacks",
    "has_gradients",
    "parameters",
    "replay_policy",
    "scaler_of_policy",
]
