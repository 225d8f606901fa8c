"""Markdown: tables that stay whole with any labels, and figures that a person can compare."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from support.reports import REPORTS, judged, make_report
from support.synthetic import compared, curve, failed, make_plan, make_run

from lightning_amp._plain_data import code, line
from lightning_amp._text import memory
from lightning_amp.compare._arm import Arm
from lightning_amp.compare._plan import CONTROL
from lightning_amp.compare._report import PrecisionReport
from lightning_amp.compare.views._words import ARM_COLUMNS, METRIC_COLUMNS, arm_row, figure, metric_row, signed
from lightning_amp.compare.views._words import notes as written_notes
from lightning_amp.findings import StepRecord
from lightning_amp.measure import SpeedComparison


def cells(row: str) -> list[str]:
    """Divide a row as GitHub does: a backslash escapes one character, so that `\\\\|` ends a cell."""
    parts = re.findall(r"(?:\\.|[^|\\])*(?:\||$)", row.strip())
    assert row.startswith("| ")
    assert row.endswith(" |")
    return [re.sub(r"\\([\\|<])", r"\1", part.removesuffix("|").strip()) for part in parts[1:-1]]


def tables(text: str) -> list[list[list[str]]]:
    """Return the tables of a text, each with its header."""
    found: list[list[list[str]]] = []
    for block in text.split("\n\n"):
        if block.startswith("|"):
            rows = [cells(row) for row in block.splitlines()]
            assert rows[1] == ["---"] * len(rows[0])
            assert {len(row) for row in rows} == {len(rows[0])}
            found.append([rows[0], *rows[2:]])
    return found


# -- the tables are whole ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in REPORTS if kind != "many"])  # which takes a second
def test_every_arm_and_metric_is_in_it(kind: str) -> None:
    report = REPORTS[kind]()
    text = report.to_markdown()
    text.encode()
    metrics, arms = ([], *tables(text)) if len(tables(text)) == 1 else tables(text)
    names = {name for arm in report.arms.values() for name in arm.metrics}
    assert [row[0] for row in arms[1:]] == [on_one_line(label) for label in report.arms]
    assert {tuple(row[:2]) for row in metrics[1:]} == {
        (on_one_line(name), on_one_line(label)) for label, arm in report.arms.items() for name in arm.metrics
    }
    assert bool(metrics) == bool(names)
    assert text.startswith(on_one_line(report.recommendation))
    assert text.endswith(".\n")
    for label, arm in report.arms.items():
        for seed, error in arm.errors.items():
            assert f"- {code(label)}, seed {seed}: {line(error)[:20]}" in text


def on_one_line(text: str) -> str:
    return re.sub(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]", "\ufffd", " ".join(text.split()))


NAMES = [
    "a|b", "|", "||", "a\\|b", "a\\\\|b", "\\", "ends in \\", "`|`", "`code`", "a `b", "<b>bold</b>", "\\<b>", "<!-- x",
    "a < b | c", "line\nline", "\n\n| x |\n", "\r\n", "\u2028x\x85y", " a  b ", "---", "x" * 5000, "# x", "*x*",
    "半 🔥", "&lt;", "<|im_end|>", "\\\\\\|",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_neither_tear_a_table_nor_become_html(name: str) -> None:
    text = compared({"fp32": [1.0] * 3, name: [1.0, 2.0, 3.0], "bf16": [None] * 3}, name=name).to_markdown()
    metrics, arms = tables(text)
    expected = on_one_line(name).strip()
    assert [row[0] for row in arms[1:]] == ["fp32", expected, "bf16"]
    assert [row[:2] for row in metrics[1:]] == [[expected, label] for label in ("fp32", expected)]
    without_code = re.sub(r"`[^`\n]*`", "", text).replace("`", "")
    assert not re.search(r"(?<!\\)(\\\\)*<[A-Za-z/!?]", without_code)


def test_errors_stay_on_their_line() -> None:
    error = "RuntimeError: a\nb | c `d` <e> \x1b[31mred\udcff"
    runs = [make_run("fp32", 0, curves={"val_loss": curve(1.0)}), failed("bf16", 0, error)]
    text = PrecisionReport(make_plan(["fp32", "bf16"], 1), runs).to_markdown()
    assert "Failed:\n\n- `bf16`, seed 0: RuntimeError: a b | c `d` \\<e> \ufffd[31mred\ufffd\n\n" in text
    assert text.encode()


# -- cells -------------------------------------------------------------------------------------------------------------


def metric_cells(report: PrecisionReport, label: str, name: str = "val_loss") -> dict[str, str]:
    arm = report.arms[label]
    return dict(zip(METRIC_COLUMNS, metric_row(arm, arm.metrics[name]), strict=True))


def arm_cells(arm: Arm) -> dict[str, str]:
    return dict(zip(ARM_COLUMNS, arm_row(arm), strict=True))


def test_a_metric() -> None:
    plan = make_plan(["fp32", "bf16"], 3, {"val_loss": 0.1})
    runs = [make_run("fp32", s, curves={"val_loss": curve(1.0, 1.25)}) for s in range(3)]
    runs += [
        make_run("bf16", s, curves={"val_loss": curve(1.0, 1.25 + 0.125 * s)}, same_weights={"val_loss": (1.5, 1.625)})
        for s in range(3)
    ]
    report = PrecisionReport(plan, runs)
    assert metric_cells(report, "fp32") == {
        "metric": "val_loss",
        "arm": "fp32",
        "final": "1.25",
        "best": "1",
        "difference": "-",
        "90 % interval": "-",
        "verdict": "no margin: all other arms are compared with it",
        "same weights, minus fp32": "-",
    }
    bf16 = metric_cells(report, "bf16")
    assert bf16["verdict"] == str(report.verdict("bf16", "val_loss"))
    del bf16["verdict"]
    assert bf16 == {
        "metric": "val_loss",
        "arm": "bf16",
        "final": "1.375",
        "best": "1",
        "difference": "+0.125",
        "90 % interval": "-0.0857 to +0.336",
        "same weights, minus fp32": "-0.125",
    }


def test_a_metric_of_a_single_seed_and_without_a_direction() -> None:
    found = metric_cells(compared({"fp32": [1.0], "bf16": [1.0]}, None, name="thing"), "bf16", "thing")
    assert (found["best"], found["difference"], found["90 % interval"]) == ("-", "0", "-")


def test_a_metric_that_is_not_finite() -> None:
    found = metric_cells(compared({"fp32": [1.0] * 3, "bf16": [math.nan] * 3}), "bf16")
    assert (found["final"], found["best"], found["difference"], found["90 % interval"]) == ("nan", "nan", "nan", "-")
    found = metric_cells(compared({"fp32": [1.0] * 3, "bf16": [math.inf] * 3}), "bf16")
    assert (found["final"], found["difference"], found["90 % interval"]) == ("inf", "+inf", "-")


def test_a_metric_of_an_arm_that_failed() -> None:
    found = metric_cells(compared({"fp32": [1.0] * 3, "bf16": [None] * 3}), "bf16")
    assert {name: text for name, text in found.items() if name not in ("metric", "arm", "verdict")} == {
        "final": "-", "best": "-", "difference": "-", "90 % interval": "-", "same weights, minus fp32": "-",
    }  # fmt: skip
    assert found["verdict"].startswith("undecided: it failed")


def test_an_arm() -> None:
    runs = tuple(
        make_run(
            "fp16",
            seed,
            precision="fp16",
            samples_per_s=(25600.0,),
            peak_memory_bytes=3 * 2**30 // 2,
            num_steps=1000,
            num_skipped=3,
            scale=(StepRecord(0, 0, 2.0**16, 2.0 ** (15 + seed), True, "gradient"),),
            matmul_flops={"float16": 0.977, "float32": 0.023},
        )
        for seed in range(2)
    )
    arm = Arm("fp16, head", "AmpPrecision('fp16')", False, False, runs, {}, SpeedComparison(1.8, 1.7, 1.9, 2))
    assert arm_cells(arm) == {
        "arm": "fp16, head",
        "ran as": "fp16",
        "samples/s": "25,600",
        "ms per step": "10.1 (10 to 10.1)",
        "speed": "1.8x as fast (1.7 to 1.9)",
        "peak memory": "1.5 GiB",
        "steps": "2,000",
        "skipped": "6",
        "loss scale": "2**15, 2**16",
        "products in": "98 % float16, 2 % float32",
    }
    same = replace(arm, runs=(runs[0], runs[0]))
    assert arm_cells(same)["loss scale"] == "2**15"
    slow = replace(arm, runs=(replace(runs[0], samples_per_s=(2.345,)),))
    assert arm_cells(slow)["samples/s"] == "2.35"


def test_an_arm_of_which_nothing_is_known() -> None:
    arm = Arm("fp16", "", False, False, (failed("fp16", 0),), {}, None)
    assert arm_row(arm) == ["fp16", "-", "-", "-", "-", "-", "0", "0", "-", "-"]


def test_figures() -> None:
    sizes = (0, 512, 1023, 2**10, 28_000, 2**20 - 1, 2**20, 3 * 2**19, 2**30 - 1, 2**30, 80 * 2**30, 3 * 2**40)
    assert [memory(size) for size in sizes] == [
        "0 KiB", "0.5 KiB", "0.999 KiB", "1 KiB", "27.3 KiB", "1,020 KiB", "1 MiB", "1.5 MiB", "1,020 MiB", "1 GiB",
        "80 GiB", "3,070 GiB",
    ]  # fmt: skip
    assert [figure(v) for v in (0.123456789, 12345.678, 0.0, math.nan, -math.inf)] == [
        "0.12346", "12346", "0", "nan", "-inf",
    ]  # fmt: skip
    assert [signed(v) for v in (0.0, -0.0, 1e-9, -0.12345, math.nan, math.inf, -math.inf)] == [
        "0", "0", "+1e-09", "-0.123", "nan", "+inf", "-inf",
    ]  # fmt: skip


def notes(report: PrecisionReport) -> str:
    return written_notes(judged(report))


# -- the notes ---------------------------------------------------------------------------------------------------------


def test_notes_say_how_it_was_measured() -> None:
    text = notes(make_report(3, 3))
    assert text.startswith("3 arms, seeds 0 to 2, `make_classifier` on `make_images`. The control")
    assert "Times are medians of steady training steps" in text
    assert "Peak memory is the device's own count, in training." in text
    assert text.endswith(
        "Ran on cuda: NVIDIA H200; TF32 was off; torch 2.13.0+cu130, lightning 2.6.6, lightning_amp 0.9.0, Python"
        " 3.12.4."
    )


def test_notes_say_only_what_is_so() -> None:
    text = notes(make_report(1, 1, step_s=(), peak_memory_bytes=None, memory_of=None, tf32=True))
    assert text.startswith("1 arm, seed 0, ")
    assert "One seed never decides" in text
    assert "TF32 was allowed in fp32" in text
    for absent in ("control", "steady", "Peak memory"):
        assert absent not in text
    assert "the memory of tensors on the CPU" in notes(make_report(2, 1, memory_of="tensors"))
    assert "Ran on" not in notes(REPORTS["all failed"]())


def test_runs_of_two_machines_are_told() -> None:
    """Finished runs are kept, and a later call may continue on another machine."""
    runs = [
        make_run("fp32", 0, device="old", versions={"torch": "1"}),
        make_run("bf16", 0, device="new", versions={"torch": "2"}),
    ]
    text = notes(PrecisionReport(make_plan(["fp32", "bf16"], 1), runs))
    assert "Ran on old and new; TF32 was off; torch 1, torch 2." in text


def test_a_whole_report() -> None:
    """Change this text when the printed words change."""
    report = compared({"fp32": [1.0], "bf16": [1.25], CONTROL: [1.0]}, None, step_s={"bf16": 0.005})
    assert str(report) == report.to_markdown() == WHOLE


WHOLE = """\
No recommendation: no margin says what a precision may cost. Pass `margins`, for example `margins={'val_loss': 0.01}`,\
 and at least three seeds. Measured speed of `bf16`: 2.0x as fast, one run of each.

| metric | arm | final | best | difference | 90 % interval | verdict | same weights, minus fp32 |
| --- | --- | --- | --- | --- | --- | --- | --- |
| val_loss | fp32 | 1 | 1 | - | - | no margin: all other arms are compared with it | - |
| val_loss | bf16 | 1.25 | 1.25 | +0.25 | - | no margin | - |
| val_loss | control | 1 | 1 | 0 | - | no margin | - |

| arm | ran as | samples/s | ms per step | speed | peak memory | steps | skipped | loss scale | products in |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
| fp32 | fp32 | - | 10.1 (10 to 10.1) | - | - | 0 | 0 | - | - |
| bf16 | bf16 | - | 5.05 (5.02 to 5.07) | 2.0x as fast, one run of each | - | 0 | 0 | - | - |
| control | control | - | 10.1 (10 to 10.1) | 1.000x as fast, one run of each | - | 0 | 0 | - | - |

2 arms, seed 0, `Net` on `Data`. The control is the reference with its initial weights moved in their last bit. Its\
 difference shows the run-to-run noise, and its speed shows how busy the machine was. Times are medians of steady\
 training steps, with their middle half. The first steps, compilation and validation do not count. With one seed, a\
 speed is one run of each arm. More seeds show how much it varies. Ran on cpu; TF32 was off; torch 2.13.0.
"""
