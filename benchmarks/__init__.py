"""Benchmarks whose figures are published, under `docs/results/`.

What a change is measured by while it is written, as a ratio of two sides in one process, is in `tests/benchmarks`.
"""
