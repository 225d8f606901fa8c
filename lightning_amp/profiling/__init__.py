"""Where time and memory go: of the machine, and of a training step of the user's own module."""

from lightning_amp.profiling._doctor import doctor

__all__ = ["doctor"]
