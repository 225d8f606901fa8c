"""The model for the comparison and the doctor: the character GPT of `examples/gpt.py`, in two sizes."""

from __future__ import annotations

import argparse

from examples.gpt import GPT, Documentation


def model() -> GPT:
    """Make a model of 19 million parameters."""
    return GPT(width=512, depth=6, heads=8, context=128, lr=1e-3, sample=0, compiled=False)


def data() -> Documentation:
    """Make 200 batches of 64 times 128 characters."""
    return Documentation(context=128, batch_size=64, steps=200)


def tiny_model() -> GPT:
    """Make a toy model."""
    return GPT(width=32, depth=2, heads=2, context=32, lr=4e-3, sample=0, compiled=False)


def tiny_data() -> Documentation:
    """Make batches for the toy model."""
    return Documentation(context=32, batch_size=8, steps=8)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of `--tiny` and `--device`."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--tiny", action="store_true", help="a rehearsal with a toy")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    return made
