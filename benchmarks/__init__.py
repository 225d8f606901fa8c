"""Benchmarks whose figures are published, under `docs/results/`.

Benchmarks for work on a change, which compare two sides in one process, are in `tests/benchmarks`.
"""
