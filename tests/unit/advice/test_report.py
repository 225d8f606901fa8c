"""The report: findings in their order, Markdown and JSON."""

from __future__ import annotations

import json
from pathlib import Path

from support.doctor_facts import machine, step, timed

from lightning_amp.advice import DoctorReport, Finding, Memory, Reason, Variant
from lightning_amp.advice._findings import worst_first


def test_the_worst_comes_first() -> None:
    found = worst_first(
        [Finding("note", "a", "", share=0.9), Finding("warning", "b", "", share=0.1), Finding("ok", "c", ""),
         Finding("error", "d", ""), Finding("warning", "e", "", share=0.8)]
    )  # fmt: skip
    assert [finding.code for finding in found] == ["d", "e", "b", "a", "c"]
    assert [finding.is_problem for finding in found] == [True, True, True, False, False]


def test_a_healthy_module_has_nothing_to_do() -> None:
    report = DoctorReport(machine(), step())
    (finding,) = report.findings
    assert (finding.severity, finding.code) == ("ok", "nothing-to-do")
    assert "takes 100 ms without its data, and 250 ms in fp32 (2.50x as fast (2.50 to 2.50))" in finding.message
    assert "its peak of memory is 140 MiB, and 220 MiB in fp32" in finding.message
    assert not report.has_problems


def test_a_step_that_could_not_be_timed_is_not_said_to_be_healthy() -> None:
    report = DoctorReport(machine(), step(variants=(Variant("as it is", (), "no dataset"), timed("fp32", 0.1))))
    (finding,) = report.findings
    assert (finding.severity, finding.code) == ("note", "not-timed")
    assert "no dataset" in finding.message


def test_a_machine_alone_has_a_verdict() -> None:
    report = DoctorReport(machine())
    assert [finding.code for finding in report.findings] == ["emulated-precision", "precision"]
    assert not report.has_problems
    assert DoctorReport(machine(), None, "fp16").has_problems


def test_markdown() -> None:
    slow = step(
        reasons=(Reason("autocast off", 'net.py:3 "a | b"', 10**8),),
        notes=("channels_last: out of memory",),
        skipped=3,
        variants=(*step().variants, timed("fused=True", 0.09), Variant("channels_last", (), "out of memory")),
    )
    text = DoctorReport(machine(), slow).to_markdown()
    assert text.startswith("# AmpPrecision('bf16') on a CPU, 2 threads\n\nA step in bf16 takes 100 ms without")
    assert "- ! warning `autocast-off`: 33.3 % of the FLOPs" in text
    assert "| backward | 60 ms | 63.8 % |" in text
    assert "| fused=True | 90 ms | noise: 1.02x as fast is possible at most |" in text
    assert "they alone would make a step 2.5x as fast (Amdahl)" in text
    assert "| activations | 100 MiB | 180 MiB |" in text
    assert "- not measured: channels_last: out of memory" in text
    assert "3 steps were skipped" in text
    assert "| bf16 | 4 | native: avx512_bf16 |" in text
    assert str(DoctorReport(machine(), slow)) == text


def test_a_step_in_fp32_is_compared_with_nothing() -> None:
    alone = step(precision="fp32", variants=(Variant("as it is", (0.1,)),), fp32_memory=None)
    (finding,) = DoctorReport(machine(), alone).findings
    assert finding.message == "Nothing to do. A step in fp32 takes 100 ms without its data."


def test_json_is_valid(tmp_path: Path) -> None:
    broken = step(memory=Memory(1, 1, 1, 1, 0, 0, 0, 4, 1), product_s=float("nan"))
    DoctorReport(machine(), broken).to_json(tmp_path / "report.json")
    data = json.loads((tmp_path / "report.json").read_text(), parse_constant=lambda _: 1 / 0)
    assert data["step"]["product_s"] == "nan"
    assert data["precision"] == "bf16"
    assert data["machine"]["formats"][1]["support"] == "native"
    assert {*data["findings"][0]} == {"severity", "code", "message", "action", "share"}
    DoctorReport(machine()).to_json(tmp_path / "machine.json")
    assert json.loads((tmp_path / "machine.json").read_text())["step"] is None


def test_its_name() -> None:
    assert repr(DoctorReport(machine(), step())) == "DoctorReport(['nothing-to-do'])"
