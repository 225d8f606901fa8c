"""What the guards find today and others are about to mend, by guard: to be emptied, and then deleted with its tests."""

# ruff: noqa: E501

from __future__ import annotations

KNOWN: dict[str, set[str]] = {
    "without_mirror": {
        "precision/_amp.py: has no tests/unit/precision/test_amp.py",
        "precision/_any_plugin.py: has no tests/unit/precision/test_any_plugin.py",
        "precision/_clipping.py: has no tests/unit/precision/test_clipping.py",
        "precision/_fit.py: has no tests/unit/precision/test_fit.py",
        "precision/_fold_plan.py: has no tests/unit/precision/test_fold_plan.py",
        "precision/_forward.py: has no tests/unit/precision/test_forward.py",
        "precision/_fsdp.py: has no tests/unit/precision/test_fsdp.py",
        "precision/_hooks.py: has no tests/unit/precision/test_hooks.py",
        "precision/_idle_rules.py: has no tests/unit/precision/test_idle_rules.py",
        "precision/_ledger.py: has no tests/unit/precision/test_ledger.py",
        "precision/_run.py: has no tests/unit/precision/test_run.py",
        "precision/_settings.py: has no tests/unit/precision/test_settings.py",
        "skipped_steps/_averages.py: has no tests/unit/skipped_steps/test_averages.py",
        "skipped_steps/_protection.py: has no tests/unit/skipped_steps/test_protection.py",
        "skipped_steps/_schedules.py: has no tests/unit/skipped_steps/test_schedules.py",
        "skipped_steps/_snapshots.py: has no tests/unit/skipped_steps/test_snapshots.py",
        "skipped_steps/_statistics.py: has no tests/unit/skipped_steps/test_statistics.py",
    },
}
