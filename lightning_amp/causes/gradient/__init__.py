"""Why a gradient is lost, and what helps. Read `_search.py` first."""

from lightning_amp.causes.gradient._search import GradientFindings, GradientSearch

__all__ = ["GradientFindings", "GradientSearch"]
