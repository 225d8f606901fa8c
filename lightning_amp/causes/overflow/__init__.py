"""Find out why a step was skipped, and which remedies help. Read `_search.py` first."""

from lightning_amp.causes.overflow._search import blank_report, explain, largest_weight, origins

__all__ = ["blank_report", "explain", "largest_weight", "origins"]
