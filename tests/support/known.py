"""What the guards find today and others are about to mend, by guard: to be emptied, and then deleted with its tests."""

# ruff: noqa: E501

from __future__ import annotations

KNOWN: dict[str, set[str]] = {
    "without_mirror": {
        "precision/_hooks.py: has no tests/unit/precision/test_hooks.py",
        "precision/_run.py: has no tests/unit/precision/test_run.py",
        "skipped_steps/_averages.py: has no tests/unit/skipped_steps/test_averages.py",
        "skipped_steps/_protection.py: has no tests/unit/skipped_steps/test_protection.py",
        "skipped_steps/_schedules.py: has no tests/unit/skipped_steps/test_schedules.py",
        "skipped_steps/_snapshots.py: has no tests/unit/skipped_steps/test_snapshots.py",
        "skipped_steps/_statistics.py: has no tests/unit/skipped_steps/test_statistics.py",
    },
}
