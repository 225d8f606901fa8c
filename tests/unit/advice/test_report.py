"""The report: its headline, its Markdown and its JSON."""

from __future__ import annotations

import json
from pathlib import Path

from support.approved import assert_approved
from support.doctor_facts import machine, machine_with, product, speed, step, timed, without_autocast

from lightning_amp._user_line import Place
from lightning_amp.advice import DoctorReport
from lightning_amp.advice._step import Loss, Memory, Recording, Variant


def test_the_whole_text() -> None:
    slow = step(
        without_autocast(10**8, Place("net.py", 3)),
        variants=(*step().variants, timed("fused=True", 0.09), Variant("channels_last", (), "out of memory")),
    )
    on = machine(notes=("bf16 products failed",), tf32=True)
    reports = {
        "healthy": DoctorReport(machine(), step()),
        "slow": DoctorReport(on, slow),
        "the machine alone": DoctorReport(machine()),
    }
    assert_approved("doctor", {case: report.to_markdown() for case, report in reports.items()})
    (finding,) = reports["healthy"].findings
    assert (finding.severity, finding.code) == ("ok", "nothing-to-do")
    assert [report.has_problems for report in reports.values()] == [False, True, False]


def test_headlines() -> None:
    failed = (Variant("as it is", (), "no dataset"), timed("fp32", 0.1))
    alone = step(precision="fp32", variants=(Variant("as it is", (0.1,)),), fp32_memory=None)
    cases = {
        "not timed": step(parts={}, variants=()),
        "failed": step(variants=failed),
        "fp32 is compared with nothing": alone,
        "slower than fp32": step(variants=(timed("as it is", 0.4), timed("fp32", 0.1))),
    }
    headlines = {case: DoctorReport(machine(), found).headline for case, found in cases.items()}
    headlines["half precision is slow here"] = DoctorReport(machine_with(bf16=0.25)).headline
    headlines["undecided"] = DoctorReport(machine_with(bf16=speed(0.9, noise=0.5))).headline
    assert_approved("doctor_headlines", headlines)
    assert DoctorReport(machine(), None, "fp16").has_problems


def test_a_known_fault_is_told_of_the_machine_alone() -> None:
    on = machine(traps=("torch 2.13 computes something slowly",))
    assert "- known fault: torch 2.13 computes" in str(DoctorReport(on))
    assert "known fault" not in str(DoctorReport(on, step()))


def test_json_is_valid(tmp_path: Path) -> None:
    memory = Memory(1, 1, 1, 0, 0, 1, 4)
    broken = step(without_autocast(10**8), memory=memory, losses=(Loss(4, 10),))
    DoctorReport(machine(memory_gib=float("nan")), broken).to_json(tmp_path / "report.json")
    data = json.loads((tmp_path / "report.json").read_text(), parse_constant=lambda _: 1 / 0)
    assert data["machine"]["memory_gib"] == "nan"
    assert data["step"]["recorded"]["module_flops"] == {"net": {"bfloat16": 2 * 10**8}, "Net": {"float32": 10**8}}
    assert data["step"]["fp32_recorded"] is None
    assert data["precision"] == "bf16"
    assert data["machine"]["formats"][1]["support"] == "native"
    assert {*data["findings"][0]} == {"severity", "code", "message", "action", "share"}
    DoctorReport(machine()).to_json(tmp_path / "machine.json")
    assert json.loads((tmp_path / "machine.json").read_text())["step"] is None


def test_the_largest_modules_have_a_row() -> None:
    outside = product("", "float32", 10**8)
    blocks = [product(f"block.{i}", flops=10**9) for i in range(9)]
    text = str(DoctorReport(machine(), step(recorded=Recording((*blocks, outside)))))
    assert "| `block.5` | 1 | bfloat16 |" in text
    assert "block.6" not in text
