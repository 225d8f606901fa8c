"""Why a step was skipped, a gradient lost, or a metric changed: the user's step run again, and what helps."""

from lightning_amp.causes.gradient import GradientSearch
from lightning_amp.causes.metric import MetricSearch

__all__ = ["GradientSearch", "MetricSearch"]
