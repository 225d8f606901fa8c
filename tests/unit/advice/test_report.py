"""The report: the order of its findings, its Markdown and its JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.doctor_facts import machine, product, speed, step, timed, without_autocast

from lightning_amp._user_line import Place
from lightning_amp.advice import DoctorReport, Finding, details, summary, title
from lightning_amp.advice._machine import Convolution
from lightning_amp.advice._record import Loss, Memory, Recording, Variant
from lightning_amp.advice.findings._finding import worst_first


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
    assert finding.message == (
        "Nothing to do. A step in bf16 takes 100 ms without its data, and 250 ms in fp32 (2.50x as fast (2.50 to"
        " 2.50)); its peak of memory is 140 MiB, and 220 MiB in fp32."
    )
    assert not report.has_problems
    assert repr(report) == "DoctorReport(['nothing-to-do'])"


def test_a_step_that_could_not_be_timed_is_not_called_healthy() -> None:
    report = DoctorReport(machine(), step(variants=(Variant("as it is", (), "no dataset"), timed("fp32", 0.1))))
    (finding,) = report.findings
    assert (finding.severity, finding.code) == ("note", "not-timed")
    assert "no dataset" in finding.message


def test_a_machine_alone_has_a_verdict() -> None:
    report = DoctorReport(machine())
    assert title(machine(), None) == "a CPU, 2 threads"
    assert [finding.code for finding in report.findings] == ["emulated-precision", "precision"]
    assert not report.has_problems
    assert DoctorReport(machine(), None, "fp16").has_problems


def test_markdown() -> None:
    slow = step(
        without_autocast(10**8, Place("net.py", 3)),
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
    memory = Memory(1, 1, 1, 1, 0, 0, 0, 4, 1)
    broken = step(without_autocast(10**8), memory=memory, losses=(Loss(4, 10),), fp32_product_share=float("nan"))
    DoctorReport(machine(), broken).to_json(tmp_path / "report.json")
    data = json.loads((tmp_path / "report.json").read_text(), parse_constant=lambda _: 1 / 0)
    assert data["step"]["fp32_product_share"] == "nan"
    assert data["step"]["product_s"] == pytest.approx(0.05)
    assert data["step"]["module_flops"] == {"net": {"bfloat16": 2 * 10**8}, "": {"float32": 10**8}}
    assert data["step"]["reasons"] == [{"why": "autocast off", "where": "nowhere.py:7", "flops": 10**8}]
    assert data["step"]["logits"] == [4, 10]
    assert data["step"]["casts"] == data["step"]["waits"] == data["step"]["slower"] == []
    assert not {"recorded", "fp32_recorded"} & data["step"].keys()
    assert data["precision"] == "bf16"
    assert data["machine"]["formats"][1]["support"] == "native"
    assert {*data["findings"][0]} == {"severity", "code", "message", "action", "share"}
    DoctorReport(machine()).to_json(tmp_path / "machine.json")
    assert json.loads((tmp_path / "machine.json").read_text())["step"] is None


# -- words -------------------------------------------------------------------------------------------------------------


def test_modules_beyond_the_first_ones_are_one_row() -> None:
    outside = product("", "float32", 10**9)
    blocks = [product(f"block.{i}", flops=10**9) for i in range(9)]
    text = "\n".join(map(str, details(machine(), step(recorded=Recording((*blocks, outside))))))
    assert "| `block.5` | 1 | bfloat16 |" in text
    assert "| 4 more | 4 | bfloat16, float32 |" in text
    assert "| outside of modules |" in "\n".join(map(str, details(machine(), step(recorded=Recording((outside,))))))


def test_failed_measurements_of_the_machine_are_listed() -> None:
    text = DoctorReport(machine(notes=("bf16 products of 512 were not measured: no kernel",))).to_markdown()
    assert "- bf16 products of 512 were not measured: no kernel" in text


def test_parts_that_do_not_add_up_to_the_step_of_the_race_are_explained() -> None:
    assert "Without data" not in "\n".join(map(str, details(machine(), step())))
    busy = step(parts={"data": 0.5, "forward": 0.4, "backward": 0.9}, num_timed=6)
    text = "\n".join(map(str, details(machine(), busy)))
    assert "Without data, the parts add up to 1.3 s, the mean of 6 steps." in text
    assert "their median is 100 ms" in text
    assert "takes 100 ms without its data" in summary(busy)


def test_a_ratio_below_one_is_written_as_slow() -> None:
    slow = step(variants=(timed("as it is", 0.4), timed("fp32", 0.1)))
    text = "\n".join([summary(slow), *map(str, details(machine(), slow))])
    assert "100 ms in fp32 (4.00x as slow (4.00 to 4.00))" in text
    assert "| in fp32 | 100 ms | 4.00x as fast (4.00 to 4.00) |" in text


def test_convolutions_have_a_table() -> None:
    probed = (Convolution("fp16", "forward", 1, speed(1.0)), Convolution("fp16", "backward", 1, speed(0.01)))
    text = "\n".join(map(str, details(machine(convolutions=probed), None)))
    assert "| against fp32 | 3x3 convolution, forward | 3x3 convolution, backward |" in text
    assert "| fp16, stride 1 | as fast within 5 % | 100x as slow" in text


@pytest.mark.parametrize(
    ("on", "device_type", "words"),
    [
        ("on", "cpu", "on: fp32 products may be computed in bf16 (`set_float32_matmul_precision`)"),
        ("on", "cuda", "on: fp32 products are computed in TF32"),
        ("off", "cuda", "off: fp32 products are computed in full precision"),
    ],
)
def test_the_switch_of_tf32(on: Any, device_type: str, words: str) -> None:
    assert f"TF32 is {words}." in [*details(machine(tf32=on, device_type=device_type), None)]
