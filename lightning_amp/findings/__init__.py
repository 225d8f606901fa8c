"""Plain records of what was seen in a run, and of what was tried on it; who prints them is `reports`."""

from lightning_amp.findings._remedy import Remedy, RemedyKind

__all__ = ["Remedy", "RemedyKind"]
