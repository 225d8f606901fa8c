"""Clocks and memory readers of a training step."""
