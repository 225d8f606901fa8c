"""Find out why a step was skipped, or a gradient or a metric is wrong, by running the user's step again with remedies.

Read `_attempts.py` first.
"""
