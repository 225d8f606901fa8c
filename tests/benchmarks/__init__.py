"""Small benchmarks for work on this package: two sides in one process, and the ratio between them.

The benchmarks whose figures are published time whole models on a GPU; they are in `benchmarks` at the root.
"""
