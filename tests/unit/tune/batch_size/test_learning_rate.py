"""The rule for each optimizer, and the sentence if there is none."""

from __future__ import annotations

import pytest

from lightning_amp.tune.batch_size._learning_rate import UsedRate, suggested_rate


@pytest.mark.parametrize(
    ("optimizer", "expected", "rule"),
    [
        ("SGD", 0.4, "linear rule for SGD"),
        ("Adam", 0.2, "square root rule for Adam"),
        ("AdamW", 0.2, "square root rule for AdamW"),
        ("AdamW8bit", 0.2, "square root"),
        ("RMSprop", 0.2, "square root"),
        ("LAMB", 0.2, "square root"),
        ("LARS", 0.4, "linear"),
    ],
)
def test_rules(optimizer: str, expected: float, rule: str) -> None:
    lr, text = suggested_rate([UsedRate(optimizer, 0.1)] * 2, 32, 128)
    assert lr == pytest.approx(expected)
    assert f"Learning rate to try: {expected:g}, scaled from 0.1 at batch size 32 ({rule}" in text
    assert "a starting point only" in text


def test_the_same_size_has_the_same_rate() -> None:
    assert suggested_rate([UsedRate("Adam", 0.123456)], 32, 32)[0] == 0.123456


def test_a_smaller_batch_has_a_smaller_rate() -> None:
    assert suggested_rate([UsedRate("SGD", 0.1)], 64, 48)[0] == 0.075


@pytest.mark.parametrize(
    ("used", "text"),
    [
        ([], "the module has no optimizer with an `lr`"),
        ([("LBFGS", 1.0)], "are for SGD (linear) and for Adam and its kin (square root), not for LBFGS"),
        ([("Adam", 0.1), ("SGD", 0.1)], "not for Adam, SGD"),
        ([("Adam", 0.0001), ("Adam", 0.0004)], "several learning rates (0.0001, 0.0004): multiply each by 2 (square r"),
    ],
)
def test_there_is_no_single_one(used: list[tuple[str, float]], text: str) -> None:
    lr, message = suggested_rate([UsedRate(*rate) for rate in used], 32, 128)
    assert lr is None
    assert text in message
