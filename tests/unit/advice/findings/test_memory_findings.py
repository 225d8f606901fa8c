"""Findings about memory: `large-logits`, `state-dominates` and `memory-not-lower`."""

from __future__ import annotations

from typing import Any

import pytest
from support.doctor_facts import MIB, machine, said, step

from lightning_amp.advice._record import Loss, Memory, OptimizerFacts

SMALL = machine(memory_gib=1.0)
"""A device so small that these steps fill a good part of it."""


def memory(**parts: int) -> Memory:
    names = ("weights", "gradients", "states", "activations", "logits", "casts", "temporaries")
    held = {name: parts.get(name, 0) * MIB for name in names}
    return Memory(**held, peak=sum(held.values()), of_batch=held["activations"])


def found(on: Any = None, **facts: Any) -> list[Any]:
    return said(step(**facts), on or SMALL)


def test_memory_that_is_mostly_activations_is_no_finding() -> None:
    assert found() == []


@pytest.mark.parametrize(
    ("logits", "rest", "severity"), [(300, 100, "warning"), (60, 100, "note"), (5, 100, None), (3, 1, "note")]
)
def test_logits(logits: int, rest: int, severity: str | None) -> None:
    facts = {"memory": memory(logits=logits, activations=rest), "losses": (Loss(512, 32_000),)}
    assert [f.severity for f in found(machine(), **facts)] == ([severity] if severity else [])
    if severity:
        assert found(machine(), **facts)[0].code == "large-logits"
        assert f"512 x 32,000, hold {logits} MiB" in found(machine(), **facts)[0].message
        assert "checkpoint(chunk_loss" in found(machine(), **facts)[0].action


def test_logits_that_are_a_good_part_of_a_small_device_are_a_warning() -> None:
    facts = {"memory": memory(logits=40, activations=100), "losses": (Loss(512, 32_000),)}
    assert [f.severity for f in found(SMALL, **facts)] == ["warning"]


def test_a_loss_over_ten_classes_has_no_large_logits() -> None:
    assert "large-logits" not in [
        f.code for f in found(memory=memory(logits=300, activations=9), losses=(Loss(10**6, 10),))
    ]


def test_memory_that_did_not_fall() -> None:
    (finding,) = found(memory=memory(activations=230, casts=20))
    assert (finding.severity, finding.code) == ("note", "memory-not-lower")
    assert finding.message == (
        "The peak is 250 MiB, and 220 MiB in fp32: weights, gradients and the optimizer hold 0 KiB, casts 20 MiB, and"
        " activations 230 MiB."
    )
    assert found(memory=memory(activations=230, casts=20), precision="fp32") == []


def test_states_that_dominate() -> None:
    held = memory(weights=40, gradients=40, states=80, activations=20)
    facts = {"memory": held, "fp32_memory": held, "num_parameters": 10 * MIB}
    (finding,) = found(**facts)
    assert (finding.severity, finding.code) == ("note", "state-dominates")
    assert "the optimizer hold 160 MiB, 88.9 % of the peak; that is 16 bytes per parameter" in finding.message
    assert "the peak is 180 MiB, and 180 MiB in fp32" in finding.message
    assert "each row takes 320 KiB" in finding.action
    assert "Sharding" not in finding.action
    (on_gpu,) = found(machine(memory_gib=1.0, device_type="cuda"), **facts)
    assert "Sharding over 8 devices" in on_gpu.action
    (finding,) = found(machine(memory_gib=0.2), **facts)
    assert finding.severity == "warning"  # the device is full


def test_what_the_step_of_an_optimizer_takes_counts() -> None:
    held = memory(weights=10, gradients=10, states=20, temporaries=40, activations=20)
    plain = OptimizerFacts("AdamW", True, 10 * MIB)
    (finding,) = found(machine(memory_gib=0.5), memory=held, optimizers=(plain,))
    assert "the optimizer (40 MiB of it in its step alone) hold 80 MiB, 80 % of the peak" in finding.message
    assert "`fused=True` saves 40 MiB" in finding.action
    (finding,) = found(machine(memory_gib=0.5), memory=held)
    assert "fused" not in finding.action


def test_states_in_eight_bits_are_for_adam() -> None:
    held = memory(weights=40, gradients=40, states=80, activations=20)
    adam, sgd = (
        found(memory=held, optimizers=(OptimizerFacts(name, False, 10 * MIB),))[0].action for name in ("AdamW", "SGD")
    )
    assert "States in 8 bits (`torchao.optim.AdamW8bit`) save 60 MiB, in bf16 40 MiB" in adam
    assert "8 bits" not in sgd


@pytest.mark.parametrize(("memory_gib", "weights", "fires"), [(16.0, 2, False), (16.0, 600, True), (0.0, 2, False)])
def test_states_that_are_small_for_the_device_are_not_reported(memory_gib: float, weights: int, fires: bool) -> None:
    held = memory(weights=weights, gradients=weights, states=2 * weights)
    assert bool(found(machine(memory_gib=memory_gib), memory=held, fp32_memory=held)) is fires
