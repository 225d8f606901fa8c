"""Find out why a gradient is lost, and which remedies help. Read `_search.py` first."""

from lightning_amp.causes.gradient._search import GradientSearch

__all__ = ["GradientSearch"]
