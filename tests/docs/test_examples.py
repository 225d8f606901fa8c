"""Every example runs, in its fast form, in a process of its own, and the guide by symptom shows what one prints."""

from __future__ import annotations

import ast
import csv
import importlib.util
import logging
import os
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed.run
from support import warm

from lightning_amp._text import exact

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
"""As tests have: the models are tiny."""
GALLERY = {
    "compare_digits", "ddp", "detection", "digits", "fabric_gpt", "finetune", "fsdp2", "gan", "gpt", "lstm",
    "metric_comparison", "symptoms", "vae",
}  # fmt: skip
SIDE_BY_SIDE = {  # what is printed in fast form: the figure, its value before, a bound after, how far from fp32
    "vae": ("nats per image", 44.3, 30, 0.1),
    "lstm": ("nats per character", 4.86, 3.2, 0.02),
    "fabric_gpt": ("nats per character", 4.85, 3.4, 0.02),
    "detection": ("F1 of the boxes", 0.0, 0.15, 0.05),
    "finetune": ("loss", 1.79, 1.72, 0.01),
    "finetune --lora": ("loss", 1.79, 1.72, 0.01),
}
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or importlib.util.find_spec("peft") is None,
    reason="needs transformers and peft",
)


@pytest.fixture(autouse=True)
def as_loud_as_before() -> Iterator[None]:
    """Examples keep Lightning quiet; tests that come after read its log."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def run_example(path: Path, *arguments: str | Path) -> str:
    done = warm.run_script(path, *arguments, cwd=ROOT, env=ONE_THREAD)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_gallery_is_complete() -> None:
    assert {path.stem for path in EXAMPLES} == GALLERY


EXTRA = {"sklearn.datasets": "scikit-learn", "transformers": "transformers", "peft": "peft"}
"""Modules that examples import from the extra `examples`, and the package of each."""
LACKS = r"This example needs {} \(.+\)\. Run: pip install '\.\[examples\]'"


def needed_modules(path: Path) -> set[str]:
    """Return what an example, or the example that it imports, needs from the extra `examples`."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)]
    found = {name for node in nodes if node.module for name in EXTRA if node.module == name}
    beside = [path.with_name(f"{node.module}.py") for node in nodes if node.module in GALLERY]
    return found.union(*map(needed_modules, beside))


NEED_EXTRA = [path for path in EXAMPLES if needed_modules(path)]


def test_examples_import_nothing_else() -> None:
    known = {*sys.stdlib_module_names, *GALLERY, "lightning", "lightning_amp", "torch", "torchao", "torchmetrics"}
    for path in EXAMPLES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.partition(".")[0] for name in names if name not in EXTRA} <= known, path
    assert len(NEED_EXTRA) == 8


@pytest.mark.parametrize("path", NEED_EXTRA, ids=lambda path: path.stem)
def test_an_example_says_which_package_it_lacks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = needed_modules(path) - {"peft"}
    monkeypatch.syspath_prepend(path.parent)
    monkeypatch.delitem(sys.modules, "digits", raising=False)
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)
    (package,) = (EXTRA[name] for name in modules)
    with pytest.raises(SystemExit, match=LACKS.format(package)):
        runpy.run_path(str(path))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(GALLERY - {"gpt", "symptoms", *SIDE_BY_SIDE}))
def test_example_runs(name: str, tmp_path: Path) -> None:
    run_example(ROOT / "examples" / f"{name}.py", "--fast", "--out", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [pytest.param(c, marks=needs_transformers) if "finetune" in c else c for c in SIDE_BY_SIDE]
)
def test_example_learns_the_same_in_every_precision(command: str, tmp_path: Path) -> None:
    figure, before, bound, tolerance = SIDE_BY_SIDE[command]
    name, *options = command.split()
    printed = run_example(ROOT / "examples" / f"{name}.py", *options, "--fast", "--out", tmp_path).splitlines()
    exact = 0.0
    for line, precision in zip(printed, ("fp32", "bf16", "fp16"), strict=True):
        found = re.search(rf"{figure} ([\d.]+) -> ([\d.]+).*   (\d+) of \d+ steps skipped", line)
        assert found, line
        first, last, skipped = map(float, found.groups())
        exact = exact or last
        assert first == pytest.approx(before, abs=0.02), "the same data, the same first weights"
        assert (last < bound) == (bound < before), "it has learned"
        assert last == pytest.approx(exact, abs=tolerance), precision
        assert skipped <= (2 if precision == "fp16" else 0), "the scale settles at once"
        assert (tmp_path / precision / "scale_history.csv").is_file()


@pytest.mark.slow
def test_gpt_learns_the_same_in_every_precision(tmp_path: Path) -> None:
    precisions = ["fp32", "bf16"]
    emulated = ["fp8", "--emulate"] if importlib.util.find_spec("torchao") else []
    printed = run_example(
        ROOT / "examples" / "gpt.py", "--fast", "--out", tmp_path, "--precision", *precisions, *emulated
    ).splitlines()  # fmt: skip
    start = next(i for i, line in enumerate(printed) if line.split()[:3] == ["precision", "val", "loss"])
    rows = {line.split()[0]: line.split() for line in printed[start + 2 : printed.index("", start)]}
    assert list(rows) == precisions + emulated[:1]
    exact = float(rows["fp32"][1])
    assert exact < 3.6  # 4.85 before the first step
    for name, row in rows.items():
        assert float(row[1]) == pytest.approx(exact, abs=0.01)
        assert row[-1] == "0", "no step is skipped"
        with open(tmp_path / "gpt" / name / "metrics.csv", newline="", encoding="utf-8") as file:
            assert float(list(csv.DictReader(file))[-1]["val_loss"]) == pytest.approx(float(row[1]), abs=1e-4)
    if emulated:
        assert rows["fp8"][-4:-1] == ["7", "of", "9"]
        assert any("emulated" in line for line in printed)
    assert printed[-1], "what the model has written"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_example_runs_on_two_ranks(name: str, tmp_path: Path) -> None:
    """As its docstring says: with torchrun. Rank zero prints, and writes one history for both."""
    done = warm.run_script(
        torch.distributed.run.__file__, "--standalone", "--nproc-per-node=2", *warm.as_ranks(),
        ROOT / "examples" / f"{name}.py", "--fast", "--out", tmp_path,
        cwd=ROOT, env=ONE_THREAD,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "peer ranks" not in line]  # of torch 2.9
    found = re.fullmatch(
        r"16-mixed, 2 ranks: loss scale (\d+), (\d+) steps applied, (\d+) skipped, accuracy ([\d.]+)%", lines[0]
    )
    assert found, done.stdout
    titles = [line for line in lines if line.endswith(":")]
    tables = ["The same weights validated in fp32:", "Gradients against fp32:"]
    assert titles == (tables if name == "fsdp2" else []), done.stdout
    scale, steps, skipped, accuracy = map(float, found.groups())
    assert skipped > 0, "the first scale is too high on purpose"
    assert scale == 2.0 ** (24 - skipped)
    assert steps + skipped == 3 * 23
    assert accuracy > 85
    with open(tmp_path / "scale_history.csv", newline="", encoding="utf-8") as file:
        assert sum(row["skipped"] in ("True", "1") for row in csv.DictReader(file)) == skipped


NATS = re.compile(r"nats per character ([\d.]+) -> ([\d.]+)   (\d+) of (\d+) steps skipped")


@pytest.mark.slow
def test_the_loop_with_fabric_shards_and_resumes(tmp_path: Path) -> None:
    """On two ranks, from the beginning and from the checkpoint in the middle: the same model each time."""
    example, fast = ROOT / "examples" / "fabric_gpt.py", ("--fast", "--precision", "fp16")
    alone = run_example(example, *fast, "--out", tmp_path / "one")
    resumed = run_example(example, *fast, "--resume", tmp_path / "one" / "fp16" / "step-00020.ckpt")
    torchrun = (torch.distributed.run.__file__, "--standalone", "--nproc-per-node=2", *warm.as_ranks(), example, *fast)
    sharded = [run_example(*torchrun, "--out", tmp_path / "two")]
    sharded += [run_example(*torchrun, "--resume", tmp_path / "two" / "fp16" / "step-00020.ckpt")]
    (first, last, skipped, steps), *others = (
        found.groups() for printed in (alone, resumed, *sharded) if (found := NATS.search(printed))
    )
    assert (float(first), skipped, steps) == (pytest.approx(4.85, abs=0.02), "0", "40")
    assert [other[1] for other in others[:1]] == [last], "resumed bit for bit"
    assert [float(other[1]) for other in others[1:]] == pytest.approx(2 * [float(last)], abs=0.01)
    assert [other[3] for other in others] == ["20", "40", "20"]
    for folder in ("one", "two"):
        with open(tmp_path / folder / "fp16" / "scale_history.csv", newline="", encoding="utf-8") as file:
            assert list(csv.DictReader(file))[-1]["index"] == "39"


@pytest.mark.slow
def test_digits_demo_prints_one_table_and_leaves_files(tmp_path: Path) -> None:
    out = tmp_path / "results"
    printed = run_example(ROOT / "examples" / "digits.py", "--demo", "--fast", "--out", out).strip().splitlines()

    header, rule, *rows, empty, where = printed
    assert set(rule) == {"-"}
    assert empty == ""
    assert str(out) in where
    columns = ["precision", "val_acc", "same weights in fp32", "difference", "steps", "skipped", "final scale"]
    positions = [header.index(name) for name in [*columns, "samples/s", "speed"]]
    assert positions == sorted(positions)
    cells = {row.split()[0]: row.replace(" pt", "").split() for row in rows}
    assert list(cells) == ["fp32", "bf16", "fp16"]
    for name, row in cells.items():
        accuracy, in_fp32, difference = (float(cell.rstrip("%")) for cell in row[1:4])
        assert accuracy > 60  # two epochs of a small model; chance is 10 %
        assert accuracy - in_fp32 == pytest.approx(difference, abs=0.011)  # each is rounded to 0.01
        if name == "fp32":
            assert difference == 0.0
        else:
            assert row[-4:] == ["one", "run", "of", "each"]
    steps, skipped = ({name: int(row[at]) for name, row in cells.items()} for at in (5, 6))
    assert skipped["fp32"] == skipped["bf16"] == 0
    assert skipped["fp16"] > 0, "the demo starts from a scale that must first come down"
    assert steps["fp16"] + skipped["fp16"] == steps["fp32"] == steps["bf16"]

    expected = {f"{name}_{kind}.csv" for name in cells for kind in ("scale_history", "comparison")}
    assert {path.name for path in out.iterdir()} == expected | {"fp16_scale_history.png"}
    assert (out / "fp16_scale_history.png").read_bytes().startswith(b"\x89PNG")
    for name in expected:
        with open(out / name, newline="", encoding="utf-8") as file:
            assert list(csv.DictReader(file)), name


# -- the guide by symptom ----------------------------------------------------------------------------------------------


BLOCK = re.compile(r"^<!-- ([\w-]+) -->\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GUIDE = (ROOT / "docs" / "guide" / "symptoms.md").read_text(encoding="utf-8")


def without_numbers(text: str) -> str:
    """They may differ in their last digits from one CPU to the next."""
    text = re.sub(r"2\*\*-?\d+|[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?%?", "#", text)
    return re.sub(r"\s+", " ", text).replace("-#", "#")  # lines break elsewhere, too


@pytest.mark.slow
def test_output_in_the_guide_is_real() -> None:
    """One process for all: they print one after the other, each below a line with its name."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = warm.run_script(
        Path(__file__).with_name("symptoms_script.py"),
        "--fast",
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    printed = dict(re.findall(r"^--- ([\w-]+): (.*?)(?=^--- |\Z)", done.stdout, re.MULTILINE | re.DOTALL))
    assert printed.keys() == {name for name, _ in BLOCK.findall(GUIDE)}
    for name, block in BLOCK.findall(GUIDE):
        assert without_numbers(block) in without_numbers(printed[name]), printed[name]


def test_scales_are_spelled_as_they_are_printed() -> None:
    """Which the comparison above cannot see."""
    spelled = re.findall(r"(?:scale|scale of|->) (\d+)\b(?!\*)", "".join(block for _, block in BLOCK.findall(GUIDE)))
    assert spelled
    assert [number for number in spelled if number != exact(float(number))] == []


def test_every_symptom_is_in_the_guide() -> None:
    sections = re.findall(r"^## (.*)$", GUIDE, re.MULTILINE)
    assert len(sections) == 7  # the last is about errors of torch
    assert {name for name, _ in BLOCK.findall(GUIDE)} == {
        "nan-loss", "falling-scale", "many-skips", "accuracy", "speed", "memory",
    }  # fmt: skip
    assert GUIDE.count("```text") == len(BLOCK.findall(GUIDE))
