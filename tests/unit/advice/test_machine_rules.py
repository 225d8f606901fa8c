"""What is said of a machine."""

from __future__ import annotations

from support.doctor_facts import machine, step

from lightning_amp.advice import Format, Trap
from lightning_amp.advice._machine_rules import machine_findings, verdict


def test_what_is_emulated_is_a_note_and_an_error_where_it_is_wanted() -> None:
    (note,) = (f for f in machine_findings(machine(), "bf16") if f.code == "emulated-precision")
    assert note.severity == "note"
    assert "its matrix products reach 0.1 TFLOP/s, 10 times as slow as those of fp32" in note.message
    (error,) = machine_findings(machine(), "fp16")
    assert (error.severity, error.code) == ("error", "emulated-precision")
    assert error.action == 'Use `AmpPrecision("bf16")`: this CPU has bfloat16 instructions.'


def test_what_is_missing_matters_only_where_it_is_wanted() -> None:
    assert not [f for f in machine_findings(machine(), "bf16") if "fp8" in f.message]
    (error,) = (f for f in machine_findings(machine(), "fp8") if f.is_problem)
    assert (error.severity, error.code) == ("error", "emulated-precision")
    assert "has no fp8: no matrix units for it" in error.message


def test_beside_a_module_nothing_is_said_of_formats_that_are_not_used() -> None:
    assert list(machine_findings(machine(), "bf16", step())) == []


def test_products_that_are_no_faster() -> None:
    slow = machine(formats=(Format("fp32", "native", "", 1.0), Format("bf16", "native", "", 1.02)))
    (found,) = machine_findings(slow, "bf16")
    assert (found.severity, found.code) == ("warning", "no-faster-products")
    assert not list(machine_findings(slow, "fp32"))


def test_tf32_that_is_off() -> None:
    formats = (Format("fp32", "native", "", 20.0), Format("tf32", "native", "", 300.0))
    (found,) = machine_findings(machine(formats=formats, tf32="off: full precision"), "bf16")
    assert (found.severity, found.code) == ("note", "tf32-off")
    assert "20 TFLOP/s, and 300 with TF32" in found.message
    assert not list(machine_findings(machine(formats=formats, tf32="on: TF32"), "bf16"))


def test_traps_are_told_where_they_concern_somebody() -> None:
    traps = tuple(Trap("torch", "2.0", f"trap {c}", "a source", c) for c in ("", "convolutions", "torch.compile"))
    bare = machine(traps=traps, formats=())
    assert [f.message for f in machine_findings(bare, "bf16")] == [f"torch 2.0: {t.text}." for t in traps]
    assert [f.message for f in machine_findings(bare, "bf16", step())] == ["torch 2.0: trap ."]
    with_images = [f.message for f in machine_findings(bare, "bf16", step(convolutions=1))]
    assert with_images == ["torch 2.0: trap .", "torch 2.0: trap convolutions."]


def test_the_verdict() -> None:
    text = verdict(machine()).message
    assert text == (
        'Use "bf16" here: this CPU has bfloat16 instructions; its matrix products reach 4 TFLOP/s, 4 times those of'
        " fp32, from 512 rows and columns on."
    )
    plain = verdict(machine(precision="fp32", precision_reason="there is nothing else")).message
    assert plain == 'Use "fp32" here: there is nothing else.'
