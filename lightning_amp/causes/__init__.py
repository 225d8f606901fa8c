"""Why a step was skipped, a gradient lost, or a metric changed: the user's step run again, and what helps.

Read `_attempts.py` first.
"""
