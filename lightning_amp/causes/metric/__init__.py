"""Why a metric of validation is wrong, and what mends it. Read `_search.py` first."""

from lightning_amp.causes.metric._search import MetricSearch

__all__ = ["MetricSearch"]
