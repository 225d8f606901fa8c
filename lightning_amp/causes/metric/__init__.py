"""Find out why a metric of validation is wrong, and which settings help. Read `_search.py` first."""

from lightning_amp.causes.metric._search import MetricSearch

__all__ = ["MetricSearch"]
