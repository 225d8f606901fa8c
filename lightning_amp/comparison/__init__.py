"""Train whole runs side by side, each in a process of its own, as one would by hand."""

from lightning_amp.comparison._compare import compare_precisions

__all__ = ["compare_precisions"]
