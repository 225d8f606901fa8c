"""The report: its headline, its Markdown and its JSON."""

from __future__ import annotations

import json
from pathlib import Path

from support.doctor_facts import machine, machine_with, product, speed, step, timed, without_autocast

from lightning_amp._user_line import Place
from lightning_amp.advice import DoctorReport
from lightning_amp.advice._step import Loss, Memory, Recording, Variant


def test_a_healthy_module_has_nothing_to_do() -> None:
    report = DoctorReport(machine(), step())
    (finding,) = report.findings
    assert (finding.severity, finding.code) == ("ok", "nothing-to-do")
    assert report.headline == (
        "A step in bf16 takes 100 ms without its data, and 250 ms in fp32 (2.50x as fast (2.50 to 2.50)); its peak of"
        ' memory is 140 MiB, and 220 MiB in fp32. Stay with "bf16".'
    )
    assert not report.has_problems
    assert repr(report) == "DoctorReport(['nothing-to-do'])"


def test_a_step_that_was_not_timed() -> None:
    assert DoctorReport(machine(), step(parts={}, variants=())).headline.startswith("A step in bf16 was not timed; its")
    failed = (Variant("as it is", (), "no dataset"), timed("fp32", 0.1))
    assert DoctorReport(machine(), step(variants=failed)).headline.startswith("A step in bf16 takes 94 ms; its peak")


def test_a_step_in_fp32_is_compared_with_nothing() -> None:
    alone = step(precision="fp32", variants=(Variant("as it is", (0.1,)),), fp32_memory=None)
    assert DoctorReport(machine(), alone).headline == "A step in fp32 takes 100 ms without its data."


def test_a_ratio_below_one_is_written_as_slow() -> None:
    report = DoctorReport(machine(), step(variants=(timed("as it is", 0.4), timed("fp32", 0.1))))
    assert "100 ms in fp32 (4.00x as slow (4.00 to 4.00))" in report.headline
    assert report.headline.endswith('Use "fp32".')
    assert "| in fp32 | 100 ms | 4.00x as fast (4.00 to 4.00) |" in str(report)


def test_a_machine_alone_has_a_verdict() -> None:
    report = DoctorReport(machine())
    assert str(report).startswith("# a CPU, 2 threads\n")
    assert report.headline == 'Use "bf16" here: its matrix products are 4.0x as fast as in fp32 (3.9 to 4.0).'
    assert not report.has_problems
    assert DoctorReport(machine(), None, "fp16").has_problems
    slow = DoctorReport(machine_with(bf16=0.25)).headline
    assert slow == 'Use "fp32" here: no half precision is measured to be faster. `auto` picks "bf16": name "fp32".'
    undecided = DoctorReport(machine_with(bf16=speed(0.9, noise=0.5))).headline
    assert undecided.startswith("Undecided: matrix products do not tell which precision is faster (speed undecided: 0.")


def test_markdown() -> None:
    slow = step(
        without_autocast(10**8, Place("net.py", 3)),
        variants=(*step().variants, timed("fused=True", 0.09), Variant("channels_last", (), "out of memory")),
    )
    text = DoctorReport(machine(notes=("bf16 products failed",), tf32=True), slow).to_markdown()
    assert text.startswith("# AmpPrecision('bf16') on a CPU, 2 threads\n\nA step in bf16 takes 100 ms without")
    assert "- ! warning `autocast-off`: 33.3 % of the FLOPs" in text
    assert "| backward | 60 ms | 63.8 % |" in text
    assert "| fused=True | 90 ms | noise: more than this change can gain |" in text
    assert "they alone would make a step 2.5x as fast (Amdahl)" in text
    assert "Products of a step have 1 GFLOP: 90 % in bfloat16, 10 % in float32." in text
    assert "| `net` | 0.2 | bfloat16 |" in text
    assert "| activations | 100 MiB | 180 MiB |" in text
    assert "- not measured: channels_last: out of memory" in text
    assert "| bf16 | 4 | native: avx512_bf16 |" in text
    assert "TF32 is on: fp32 products are computed with fewer bits" in text
    assert "- bf16 products failed" in text
    assert "`auto` picks bf16: this CPU has bfloat16 instructions." in text
    assert "module (forward)" not in str(DoctorReport(machine(), step()))  # all in one dtype: nothing to see


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
    assert data["step"]["recorded"]["module_flops"] == {"net": {"bfloat16": 2 * 10**8}, "": {"float32": 10**8}}
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
