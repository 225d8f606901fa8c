"""Each fault of `make test-mutations` can be planted: its text is there once, and the tests that it names exist."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutations.patches import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.behaviour)
def test_a_fault_can_be_planted(mutation: Mutation) -> None:
    text = (ROOT / "lightning_amp" / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1, f"change the patch, so that still: {mutation.behaviour}"
    for test in mutation.tests:
        file, _, name = test.partition("::")
        assert name in (ROOT / file).read_text(encoding="utf-8")


def test_there_are_enough() -> None:
    assert len(MUTATIONS) >= 40
    assert len({mutation.behaviour for mutation in MUTATIONS}) == len(MUTATIONS)
