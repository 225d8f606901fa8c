"""The page says what the records say, and nothing else."""

from __future__ import annotations

from pathlib import Path

from benchmarks._machine import Machine
from benchmarks.headline._page import page, ratio
from benchmarks.headline._plan import Run
from benchmarks.headline._records import Outcome, Record, read

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
H200 = Machine("NVIDIA H200 (sm_90)", ("torch 2.11.0+cu130",))
A100 = Machine("NVIDIA A100 (sm_80)", ("torch 2.11.0+cu130",))
GIB = 2**30


def resnet(arm: str, *, batch: int = 256) -> Run:
    return Run("resnet50", arm, batch, 224)


def measured(speed: float, *, spread: float = 0.01, peak: int = 20, **fields: object) -> Outcome:
    memory = {"weights": GIB, "gradients": GIB, "states": 2 * GIB, "peak": peak * GIB}
    outcome = Outcome(
        "measured", "", (speed, speed * (1 - spread), speed * (1 + spread)), 29, memory, "device", loss=1.0
    )
    return outcome._replace(**fields)  # type: ignore[arg-type]


def record(run: Run, outcome: Outcome, machine: Machine = H200) -> Record:
    return Record(machine, run, outcome, "2026-11-22")


def row(text: str, start: str) -> list[str]:
    """Return the cells of the only row that begins with these words."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def section(text: str, title: str) -> str:
    """Return the text under a heading of the second or third level, up to the next such heading."""
    (found,) = [part for part in text.replace("\n### ", "\n## ").split("\n## ") if part.startswith(title)]
    return found


def test_the_published_page_is_that_of_the_published_records() -> None:
    text = (RESULTS / "headline.md").read_text(encoding="utf-8")
    assert text == page(read(RESULTS / "headline.json")), "run `python -m benchmarks.headline --page-only`"


def test_without_records_every_model_is_not_yet_measured_and_every_claim_is_there() -> None:
    text = page([])
    claims = text[: text.index("## Reasons for differences")]
    assert claims.count("| not yet measured | not yet measured |") == 6
    for speed, reduction in (("1.6", 40), ("1.8", 45), ("1.4", 35), ("1.7", 42)):
        assert f"{speed}x as fast, {reduction} % less memory" in claims
    assert "2.4x as fast, 42 GB instead of 75 GB" in claims
    assert "16 bytes per parameter" in text
    assert "compare with fp32 without TF32" in text


def test_what_was_measured_stands_beside_the_claim() -> None:
    text = page(
        [
            record(resnet("fp32"), measured(400, peak=24)),
            record(resnet("tf32"), measured(1000, peak=24)),
            record(resnet("bf16"), measured(2000, peak=14)),
        ]
    )
    claims = section(text, H200.device)
    assert row(claims, "ResNet-50")[1:] == [
        "1.6x as fast, 40 % less memory",
        "our bf16 5.00x, 2.00x",
        "our bf16 24 to 14 GiB, 42 % less (activations 50 % less)",
    ]
    assert row(claims, "GPT-2")[2:] == ["not yet measured", "not yet measured"]
    assert "Not yet measured." in section(text, "GPT-2")


def test_a_row_has_ratios_to_both_baselines_and_to_lightnings_own() -> None:
    arms = {"fp32": 100.0, "tf32": 200.0, "lightning_bf16": 400.0, "bf16": 500.0, "fp16": 600.0}
    text = page([record(resnet(arm), measured(speed, mfu=0.414, waits=1.0)) for arm, speed in arms.items()])
    table = section(text, "ResNet-50")
    assert row(table, "our bf16") == [
        "our bf16", "500 (495 to 505)", "5.00x", "2.50x", "1.25x", "20", "1 + 1 + 2", "16", "41 %", "1",
    ]  # fmt: skip
    assert row(table, "our fp16")[2:5] == ["6.00x", "3.00x", "-"]  # Lightning's fp16 is missing from the records
    assert row(table, "fp32, strict")[2:5] == ["-", "0.50x", "-"]
    assert row(table, "Lightning's fp16")[1] == "not yet measured"


def test_a_ratio_of_one_process_of_each_has_no_interval_and_the_page_says_so() -> None:
    outcomes = {resnet("tf32"): measured(100, spread=0.1), resnet("bf16"): measured(105)}
    assert ratio(resnet("bf16"), "tf32", outcomes) == "1.05x"
    assert "compares one process of each arm, run one after the other, so it has no interval" in page([])


def test_only_the_same_batch_is_compared() -> None:
    text = page([record(resnet("tf32"), measured(100)), record(resnet("bf16", batch=512), measured(300))])
    table = section(text, "ResNet-50")
    doubled = table[table.index("512 images") :]
    assert row(doubled, "our bf16")[3] == "-"


def test_what_does_not_fit_is_a_result() -> None:
    text = page(
        [
            record(resnet("fp32"), Outcome("does not fit", "CUDA out of memory. Tried to | allocate")),
            record(resnet("bf16"), measured(100)),
        ]
    )
    table = section(text, "ResNet-50")
    assert row(table, "fp32, strict")[1:] == ["does not fit", *["-"] * 8]
    assert "- fp32, strict: does not fit: CUDA out of memory. Tried to \\| allocate" in table
    assert row(table, "our bf16")[2] == "-"


def test_a_claim_says_why_there_is_nothing_to_compare_with() -> None:
    seven = Run("llama_7b", "bf16", 2, 2048)
    outcomes = {"fp32": Outcome("does not fit"), "bf16": measured(3), "fp16": Outcome("failed", "a reason")}
    text = page([record(seven._replace(arm=arm), outcome) for arm, outcome in outcomes.items()])
    assert row(section(text, H200.device), "LLaMA-like, 7B")[2:] == [
        "our bf16 fp32, strict: does not fit, fp32 with TF32: not yet measured; our fp16 failed",
        "our bf16 20 GiB (fp32, strict: does not fit); our fp16 failed",
    ]


def test_a_run_that_did_not_train_has_no_figure_and_its_row_says_why() -> None:
    skipped = Outcome("not measured", "3 of 36 timed steps were skipped")
    text = page([record(resnet("fp16"), skipped), record(resnet("tf32"), measured(100))])
    table = section(text, "ResNet-50")
    assert row(table, "our fp16")[1:] == ["not measured: 3 of 36 timed steps were skipped", *["-"] * 8]
    assert "- our fp16" not in table
    assert row(section(text, H200.device), "ResNet-50")[2:] == ["our fp16 not measured"] * 2


def test_what_was_odd_in_a_run_is_said() -> None:
    text = page([record(resnet("fp16"), measured(100, num_steps=6))])
    assert "- our fp16: the medians are over 6 steps only" in text


def test_machines_and_versions_are_never_mixed() -> None:
    newer = H200._replace(versions=("torch 2.12.0+cu130",))
    records = [record(resnet("tf32"), measured(1000)), record(resnet("bf16"), measured(2000), A100)]
    text = page([*records, record(resnet("bf16"), measured(3000), newer)])
    assert text.count("\n## NVIDIA") == 3
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| our bf16 |")]
    assert [cells[1].partition(" ")[0] for cells in rows] == ["2,000", "not", "3,000"]
    assert all(cells[2:5] == ["-", "-", "-"] for cells in rows)


def test_the_page_of_a_tiny_run_says_that_it_means_nothing() -> None:
    tiny = Machine("a CPU", ("torch 2.13.0",), tiny=True)
    text = page([record(Run("resnet50", "bf16", 2, 32), measured(1), tiny), record(resnet("bf16"), measured(2000))])
    assert text.index("## NVIDIA H200") < text.index("## a CPU")
    assert "A rehearsal: no figure of this section means anything" in text[text.index("## a CPU") :]
    assert "A rehearsal" not in text[: text.index("## a CPU")]
