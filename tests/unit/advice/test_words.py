"""How a report is written."""

from __future__ import annotations

from support.doctor_facts import machine, step

from lightning_amp.advice import DoctorReport, details, summary, title


def test_the_title_and_the_summary() -> None:
    assert title(machine(), None) == "a CPU, 2 threads"
    assert title(machine(), step()) == "AmpPrecision('bf16') on a CPU, 2 threads"
    assert summary(step()) == (
        "A step in bf16 takes 94 ms and is, without its data, 2.5 times as fast (middle half 2.5 of 5 rounds) as in"
        " fp32; its peak of memory is 140 MiB, and 220 MiB in fp32."
    )


def test_modules_beyond_the_first_ones_are_one_row() -> None:
    flops = {f"block.{i}": {"bfloat16": 10**9} for i in range(9)} | {"": {"float32": 10**9}}
    text = "\n".join(details(machine(), step(module_flops=flops)))
    assert "| `block.5` | 1 | bfloat16 |" in text
    assert "| 4 more | 4 | bfloat16, float32 |" in text
    assert "| outside of modules |" in "\n".join(details(machine(), step(module_flops={"": {"float32": 10**9}})))


def test_what_the_machine_could_not_measure_is_said() -> None:
    text = DoctorReport(machine(notes=("bf16 products of 512 were not measured: no kernel",))).to_markdown()
    assert "- bf16 products of 512 were not measured: no kernel" in text
