"""Find out why a step was skipped, and which remedies help. Read `_search.py` first."""

from lightning_amp.causes.overflow._everybody import Explained, origins
from lightning_amp.causes.overflow._known_causes import KnownCauses
from lightning_amp.causes.overflow._search import blank_report, explain, largest_weight

__all__ = ["Explained", "KnownCauses", "blank_report", "explain", "largest_weight", "origins"]
