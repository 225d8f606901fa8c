"""What the guards find today and others are about to mend, by guard: to be emptied, and then deleted with its tests."""

from __future__ import annotations

KNOWN: dict[str, set[str]] = {
    "without_mirror": {
        "scaling/_backward_watch.py: has no tests/unit/scaling/test_backward_watch.py",
        "scaling/_derivatives.py: has no tests/unit/scaling/test_derivatives.py",
        "scaling/_gradient_state.py: has no tests/unit/scaling/test_gradient_state.py",
        "scaling/_gradients.py: has no tests/unit/scaling/test_gradients.py",
        "scaling/_saved.py: has no tests/unit/scaling/test_saved.py",
        "scaling/_scale_update.py: has no tests/unit/scaling/test_scale_update.py",
        "scaling/_skip.py: has no tests/unit/scaling/test_skip.py",
        "scaling/_step.py: has no tests/unit/scaling/test_step.py",
        "skipped_steps/_averages.py: has no tests/unit/skipped_steps/test_averages.py",
        "skipped_steps/_protection.py: has no tests/unit/skipped_steps/test_protection.py",
        "skipped_steps/_schedules.py: has no tests/unit/skipped_steps/test_schedules.py",
        "skipped_steps/_snapshots.py: has no tests/unit/skipped_steps/test_snapshots.py",
        "skipped_steps/_statistics.py: has no tests/unit/skipped_steps/test_statistics.py",
    },
}
