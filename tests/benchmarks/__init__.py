"""Small benchmarks for work on this package: two sides in one process, and the ratio between them.

Those whose figures are published, of whole models on a GPU, are in `benchmarks` at the root.
"""
