"""Findings about a machine: `emulated-precision`, `no-faster-products`, `tf32-off`, `version-trap`, `precision`."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support.doctor_facts import convolution, machine, machine_with, speed, step, timed

from lightning_amp.advice._decision import decide
from lightning_amp.advice._machine import Convolution, Format, Machine, Trap
from lightning_amp.advice._record import Step
from lightning_amp.advice.findings import about_the_machine, known_traps
from lightning_amp.advice.findings._version_trap import _TRAPS


def said(on: Machine, precision: str, beside: Step | None = None) -> list[Any]:
    found = about_the_machine(on, decide(on, precision, beside), beside)
    return [finding for finding in found if finding.code != "precision"]


def verdict_of(on: Machine, precision: str | None = None) -> str:
    *_, verdict = about_the_machine(on, decide(on, precision or on.precision), None)
    assert (verdict.severity, verdict.code) == ("ok", "precision")
    return verdict.message


def test_an_emulated_format_is_a_note_or_an_error_if_it_was_asked_for() -> None:
    (note,) = (f for f in said(machine(), "bf16") if f.code == "emulated-precision")
    assert note.severity == "note"
    assert "its matrix products of 256 rows and columns reach 0.1 TFLOP/s (10.0x as slow" in note.message
    assert note.action == 'Do not train in "fp16" here to save time.'
    (error,) = said(machine(), "fp16")
    assert (error.severity, error.code) == ("error", "emulated-precision")
    assert error.action.startswith('Use `AmpPrecision("bf16")`: its matrix products are 4.0')


def test_an_emulated_format_is_no_error_if_the_step_is_no_slower() -> None:
    beside = step(precision="fp16", variants=(timed("as it is", 0.1), timed("fp32", 0.12)))
    (note,) = said(machine(), "fp16", beside)
    assert (note.severity, note.action) == ("note", "")
    assert "A step in it: 1.20x as fast" in note.message


def test_an_emulated_step_that_is_slower_is_told_with_its_reason() -> None:
    beside = step(precision="fp16", recorded_s=0.1, variants=(timed("as it is", 0.4), timed("fp32", 0.1)))
    (error,) = said(machine(), "fp16", beside)
    assert (error.severity, error.action) == ("error", 'Use `AmpPrecision("fp32")`.')
    assert "A step in it: 4.00x as slow" in error.message


def test_a_missing_format_matters_only_if_it_was_asked_for() -> None:
    assert not [f for f in said(machine(), "bf16") if "fp8" in f.message]
    (error,) = (f for f in said(machine(), "fp8") if f.is_problem)
    assert (error.severity, error.code) == ("error", "emulated-precision")
    assert "has no fp8: no matrix units for it" in error.message


def test_with_a_module_unused_formats_are_not_mentioned() -> None:
    assert said(machine(), "bf16", step()) == []


@pytest.mark.parametrize(("ratio", "words"), [(0.5, "2.00x as slow"), (1.0, "as fast as in fp32 within 5 %")])
def test_products_that_are_no_faster(ratio: float, words: str) -> None:
    slow = machine_with(bf16=ratio)
    (found,) = said(slow, "bf16")
    assert (found.severity, found.code) == ("warning", "no-faster-products")
    assert words in found.message
    assert found.action == 'Use `AmpPrecision("fp32")`.'
    assert not said(slow, "fp32")


def test_products_that_are_not_decided_are_no_finding() -> None:
    assert not said(machine_with(bf16=speed(0.9, noise=0.5)), "bf16")


def test_tf32_that_is_off() -> None:
    formats = (Format("fp32", "native", "", 20.0), Format("tf32", "native", "", 300.0))
    (found,) = said(machine(formats=formats, tf32="off", products=()), "bf16")
    assert (found.severity, found.code) == ("note", "tf32-off")
    assert "20 TFLOP/s, and 300 with TF32" in found.message
    assert not said(machine(formats=formats, tf32="on", products=()), "bf16")


def test_faults_of_versions_are_reported_if_they_concern_the_module() -> None:
    traps = tuple(Trap("torch", "2.0", f"trap {c}", "a source", c) for c in ("", "convolutions", "torch.compile"))
    bare = machine(traps=traps, formats=())
    assert [f.message for f in said(bare, "bf16")] == [f"torch 2.0: {t.text}." for t in traps]
    assert [f.message for f in said(bare, "bf16", step())] == ["torch 2.0: trap ."]
    with_images = [f.message for f in said(bare, "bf16", step(convolution(1)))]
    assert with_images == ["torch 2.0: trap .", "torch 2.0: trap convolutions."]


def test_the_verdict() -> None:
    assert verdict_of(machine_with(bf16=4.0)) == (
        'Use "bf16" here: its matrix products reach 4 TFLOP/s (4.0x as fast as in fp32 (3.9 to 4.0)).'
    )
    slow = verdict_of(machine_with(bf16=0.25))
    assert slow.startswith('Use "fp32" here: no half precision is measured to be faster (matrix products in bf16: 4.0')
    assert slow.endswith('`auto` picks "bf16" here: name "fp32" instead.')
    alone = machine(precision="fp32", precision_reason="", formats=(Format("fp32", "native", ""),), products=())
    assert verdict_of(alone) == 'Use "fp32" here: no half precision runs.'


def test_a_verdict_that_is_undecided() -> None:
    text = verdict_of(machine_with(bf16=speed(0.9, noise=0.5)))
    assert text.startswith("Undecided: matrix products in bf16: speed undecided: 0.")
    assert verdict_of(machine_with(bf16=None)).startswith(
        "Undecided: bf16 is native (avx512_bf16), its products were not"
    )


def test_another_format_than_the_one_that_auto_picks_may_be_faster() -> None:
    text = verdict_of(machine_with(bf16=0.5, fp16=2.0))
    assert text.startswith('Use "fp16" here: its matrix products')
    assert '`auto` picks "bf16" here: name "fp16" instead.' in text


def test_products_alone_do_not_speak_for_convolutions() -> None:
    found = machine_with(bf16=2.0)
    probed = (Convolution("bf16", "backward", 2, speed(1 / 15)), Convolution("bf16", "forward", 2, speed(1.1)))
    text = verdict_of(machine(formats=found.formats, products=found.products, convolutions=probed))
    assert "Not for convolutions: the backward of a 3x3 one with stride 2 is 15.0x as slow" in text


# -- traps ------------------------------------------------------------------------------------------------------------


def concerns(device_type: str = "cpu", **versions: str) -> list[tuple[str, str]]:
    return [(trap.package, trap.concerns) for trap in known_traps(versions, device_type)]


def test_only_what_is_installed_is_told() -> None:
    assert concerns() == []
    assert concerns(torch="2.12.0+cpu") == []
    assert concerns(torch="2.13.0+cpu") == [("torch", "convolutions")]
    assert concerns(torch="2.13.1") == [("torch", "convolutions")]
    assert concerns("cuda", torch="2.13.0") == [("torch", "torch.compile")]
    assert concerns(torch="2.8.0") == [("torch", "torch.compile"), ("torch", "FSDP2")]
    assert concerns(lightning="2.6.1") == [("lightning", "")]
    assert concerns(lightning="2.6.6") == []


def test_a_nightly_build_counts_as_its_version() -> None:
    assert concerns(torch="2.13.0.dev20260512+cpu") == []  # before 2.13
    assert concerns(torch="2.13.0a0+git1234") == []


def test_each_fault_has_a_source_and_says_what_to_do() -> None:
    for known in itertools.chain(*_TRAPS.values()):
        assert known.source.startswith(("https://github.com/", "docs/guide/"))
        assert len(known.text) > 30


def test_faults_of_all_devices_apply_to_any_device() -> None:
    assert [trap.package for trap in known_traps({"lightning": "2.6.0"}, "npu")] == ["lightning"]
    assert known_traps({"torch": "2.13.0"}, "npu") == ()
