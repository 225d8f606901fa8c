"""One run measures what its record says; the command starts a process for each run, and continues where it stopped."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import CountReads
from torch import nn

from benchmarks import _processes
from benchmarks._machine import RESULTS, Machine
from benchmarks.headline.__main__ import main
from benchmarks.headline._arms import ARMS
from benchmarks.headline._one_run import forward_flops, measure
from benchmarks.headline._plan import Run
from benchmarks.headline._records import Outcome, Record, append, read
from benchmarks.headline._series import Series
from benchmarks.headline.models import MODELS, Batch, Model, Size, Workload

A_TOY_EVERYWHERE = """
from dataclasses import replace

import torch
from benchmarks.headline.models import MODELS, Workload
from torch import nn


def make(size, tiny):
    batch = {"x": torch.rand(size.batch, 8)}
    net = nn.Linear(8, 8)
    return Workload(net, lambda net, batch: net(batch["x"]).float().square().mean(), batch, [net], "toy 1")


MODELS["resnet50"] = replace(MODELS["resnet50"], make=make)
"""
"""Written as `sitecustomize.py`, so that the processes need no library that has the model."""

MACHINE = Machine("a device", ("torch 2.11.0",), tiny=True)


def make_toy(size: Size, tiny: bool) -> Workload:
    net = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 32))
    batch = {"x": torch.rand(size.batch, 32), "y": torch.rand(size.batch, 32)}
    return Workload(net, toy_loss, batch, [net[1]], "toy 1")


def toy_loss(net: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.mse_loss(net(batch["x"]).float(), batch["y"])


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[..., Run]]:
    """Put a toy into the list of models under the name of ResNet-50; return its runs."""

    def put(make: Callable[[Size, bool], Workload] = make_toy, **fields: Any) -> Callable[..., Run]:
        usual = MODELS["resnet50"]
        known = {name: getattr(usual, name) for name in ("title", "sizes", "unit", "why_sizes", "num_parameters")}
        model = Model(
            **{**known, "name": "resnet50", "make": make, "tiny": Size(16, 1), "optimizer": "AdamW", **fields}
        )
        monkeypatch.setitem(MODELS, "resnet50", model)
        return lambda arm, compiled=False: Run("resnet50", arm, 16, 1, compiled)

    return put


@pytest.fixture(autouse=True)
def restore_switches() -> Iterator[None]:
    found = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    yield
    torch.set_float32_matmul_precision(found[0])
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = found[1:]


# -- one run -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", [name for name in ARMS if name != "fp8"])
def test_a_run_is_measured(toy: Any, arm: str) -> None:
    outcome = measure(toy()(arm), "cpu", tiny=True)
    num = 32 * 64 + 64 * 64 + 64 * 32 + 64 + 64 + 32
    assert outcome.status == "measured"
    assert outcome.samples_per_s is not None
    median, low, high = outcome.samples_per_s
    assert 0 < low <= median <= high
    assert outcome.num_parameters == num
    assert {name: outcome.memory[name] for name in ("weights", "gradients")} == {
        "weights": 4 * num,
        "gradients": 4 * num,
    }
    assert outcome.memory["states"] == pytest.approx(8 * num, abs=100)  # the counts of steps are logged as well
    assert outcome.activations is not None
    assert outcome.activations > 0
    assert outcome.flops == 3 * 2 * 16 * (32 * 64 + 64 * 64 + 64 * 32)
    assert (outcome.mfu, outcome.waits) == (None, None)
    assert outcome.loss is not None
    json.dumps(outcome.as_dict(), allow_nan=False)


@pytest.mark.parametrize("arm", ["tf32", "lightning_fp16", "fp16"])
def test_on_a_gpu_memory_is_the_allocators_and_waits_are_counted(toy: Any, device: torch.device, arm: str) -> None:
    on_cuda = device.type == "cuda"
    outcome = measure(toy()(arm), "cuda" if on_cuda else "cpu", tiny=True)
    assert (outcome.status, outcome.memory_of) == ("measured", "device" if on_cuda else "tensors")
    assert outcome.waits == (0 if on_cuda else None)  # fused optimizers never wait


@pytest.mark.filterwarnings("ignore:lightning_amp. fp8 is emulated")
def test_fp8_is_emulated_on_the_cpu(toy: Any) -> None:
    pytest.importorskip("torchao")
    outcome = measure(toy()("fp8"), "cpu", tiny=True)
    assert outcome.status == "measured"
    assert ", torchao " in outcome.source


def test_blocks_are_compiled_only_where_that_is_asked_for(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backends: list[str] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, backend: backends.append(backend))
    measure(toy()("bf16"), "cpu", tiny=True)
    assert backends == []
    measure(toy()("bf16", compiled=True), "cpu", tiny=True)
    assert backends == ["aot_eager"]


@pytest.mark.parametrize(
    ("arm", "highest"), [("fp32", True), ("tf32", False), ("bf16", False), ("lightning_fp16", False)]
)
def test_only_the_strict_arm_has_no_tf32(arm: str, highest: bool) -> None:
    ARMS[arm].set_fp32()
    assert (torch.get_float32_matmul_precision() == "highest") == highest
    assert torch.backends.cudnn.allow_tf32 != highest


def test_not_enough_memory_is_a_result_and_another_error_is_none(toy: Any) -> None:
    def fails(error: Exception) -> Callable[[nn.Module, Batch], torch.Tensor]:
        def loss(net: nn.Module, batch: Batch) -> torch.Tensor:
            raise error

        return loss

    def make(error: Exception) -> Callable[[Size, bool], Workload]:
        return lambda size, tiny: make_toy(size, tiny)._replace(loss=fails(error))

    outcome = measure(
        toy(make(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")))("fp32"), "cpu", tiny=True
    )
    assert outcome.status == "does not fit"
    assert "Tried to allocate" in outcome.reason
    outcome = measure(toy(make(RuntimeError("\"conv\" not implemented for 'Half'")))("fp16"), "cpu", tiny=True)
    assert outcome.status == "cannot"
    with pytest.raises(ZeroDivisionError):
        measure(toy(make(ZeroDivisionError()))("fp32"), "cpu", tiny=True)


def test_a_run_with_skipped_steps_or_without_a_finite_loss_is_not_measured(toy: Any) -> None:
    def overflows(net: nn.Module, batch: Batch) -> torch.Tensor:
        return toy_loss(net, batch) * torch.inf

    found = {arm: measure(toy(lambda s, t: make_toy(s, t)._replace(loss=overflows))(arm), "cpu", tiny=True)
             for arm in ("tf32", "bf16", "lightning_fp16")}  # fmt: skip
    assert found["tf32"] == Outcome("not measured", "the loss is not finite")
    for arm in ("bf16", "lightning_fp16"):
        assert found[arm].status == "not measured"
        assert re.fullmatch(r"(\d+) of \1 timed steps were skipped", found[arm].reason)


def test_flops_of_convolutions_with_groups_are_not_counted_once_per_group() -> None:
    net = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False)
    batch = {"x": torch.rand(1, 16, 8, 8)}
    made = Workload(net, lambda net, batch: net(batch["x"]).sum(), batch, (), "")
    assert forward_flops(made) == 2 * 16 * 9 * 64


def test_timed_steps_do_not_wait_for_the_device(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only training itself may read from the device between warm-up and end; in fp32 it reads nothing."""
    reads: list[int] = []

    def counted(net: nn.Module, batch: Batch) -> torch.Tensor:
        reads.append(counter.count)
        return toy_loss(net, batch)

    with CountReads() as counter:
        measure(toy(lambda s, t: make_toy(s, t)._replace(loss=counted))("fp32"), "cpu", tiny=True)
    assert reads[-1] == reads[2]
    assert counter.count > reads[-1]  # the loss is read at the end


# -- the series --------------------------------------------------------------------------------------------------------


def series(path: Path, **limits: float) -> Series:
    return Series(MACHINE, "cpu", path, **{"run_limit_s": 60.0, "limit_s": 600.0, **limits})


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """Return the runs for which a process would start; their results are made up."""
    started: list[Run] = []

    def write_result(command: list[str], output: int, errors: int, limit_s: float) -> int:
        run = Run(**json.loads(command[3]))
        started.append(run)
        fits = run.batch < 512 and run.arm != "fp32"
        outcome = Outcome("measured", "", (1.0, 1.0, 1.0)) if fits else Outcome("does not fit", "out of memory")
        Path(command[command.index("--out") + 1]).write_text(json.dumps(outcome.as_dict()))
        return 0

    monkeypatch.setattr(_processes, "wait", write_result)
    return started


RUNS = [Run("resnet50", arm, 256, 224) for arm in ("fp32", "bf16", "fp16")]


def test_what_is_on_record_is_not_run_again(tmp_path: Path, processes: list[Run]) -> None:
    path = tmp_path / "records.json"
    append(path, Record(MACHINE, RUNS[0], Outcome("failed", "a reason"), "2026-11-22"))
    append(path, Record(Machine("another device", ()), RUNS[1], Outcome("failed", "a reason"), "2026-11-22"))
    series(path).go(RUNS)
    assert processes == RUNS[1:]
    series(path).go(RUNS)
    assert processes == RUNS[1:]
    series(path).go(RUNS, retry=True)
    assert processes == [*RUNS[1:], RUNS[0]]
    assert len(read(path)) == 4


def test_what_cannot_be_done_needs_no_process(tmp_path: Path, processes: list[Run]) -> None:
    path = tmp_path / "records.json"
    series(path).go([RUNS[0], RUNS[0]._replace(batch=512), Run("gpt2", "fp8", 12, 1024)])
    assert processes == [RUNS[0]]
    outcomes = [record.outcome for record in read(path)]
    assert [outcome.status for outcome in outcomes] == ["does not fit", "does not fit", "cannot"]
    assert outcomes[1].reason == "a batch of 256 does not fit either"
    assert "Conv1D" in outcomes[2].reason


def test_no_run_is_started_that_would_not_end_in_time(
    tmp_path: Path, processes: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "records.json"
    series(path, limit_s=RUNS[0].estimated_s() - 1).go(RUNS)
    assert processes == []
    assert "with 3 runs left" in capsys.readouterr().out
    append(path, Record(MACHINE, RUNS[0], Outcome("measured", wall_s=2.0), "2026-11-22"))
    series(path, limit_s=RUNS[0].estimated_s() - 1).go(RUNS)  # the last run took two seconds, not the planned time
    assert processes == RUNS[1:]


@pytest.mark.parametrize(("limits", "status"), [({"run_limit_s": 5.0}, "took too long"), ({"limit_s": 17.0}, None)])
def test_a_run_that_takes_too_long_is_recorded_unless_it_was_the_series_that_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, float], status: str | None
) -> None:
    monkeypatch.setattr(_processes, "wait", lambda *args: None)
    path = tmp_path / "records.json"
    series(path, **limits).go(RUNS[:1])
    assert [record.outcome.status for record in read(path)] == ([status] if status else [])


def test_a_process_that_dies_is_recorded_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = _processes.wait
    codes = iter(["raise SystemExit('no luck')", "import os; os.kill(os.getpid(), 9)"])
    monkeypatch.setattr(_processes, "wait", lambda command, *rest: wait([sys.executable, "-c", next(codes)], *rest))
    path = tmp_path / "records.json"
    series(path).go(RUNS[:2])
    assert [(record.outcome.status, record.outcome.reason) for record in read(path)] == [
        ("failed", "its process ended with status 1: no luck"),
        ("failed", "its process was killed by signal 9"),
    ]


@pytest.mark.slow
def test_a_process_that_is_ended_takes_its_children_along(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    child = f"import time, pathlib; time.sleep(1.2); pathlib.Path({str(alive)!r}).touch()"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    with (tmp_path / "printed").open("wb") as file:
        assert _processes.wait([sys.executable, "-c", code], file.fileno(), file.fileno(), 0.6) is None
    time.sleep(1.4)
    assert not alive.exists()


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_runs_resumes_and_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(A_TOY_EVERYWHERE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    out = tmp_path / "results" / "headline.json"
    command = ["--tiny", "--only", "resnet50", "--out", str(out), "--arms"]
    assert main([*command, "fp32,fp8"]) == 0
    assert main([*command, "fp32,bf16,fp8", "--limit-minutes", "0"]) == 0
    assert "with 2 runs left" in capsys.readouterr().out
    assert main([*command, "fp32,lightning_fp16,fp8"]) == 0
    records = read(out)
    assert [(r.run.arm, r.outcome.status) for r in records] == [
        ("fp32", "measured"), ("fp8", "cannot"), ("lightning_fp16", "measured"),
    ]  # fmt: skip
    assert records[0].outcome.source == "toy 1"
    assert records[0].machine.tiny
    assert records[0].outcome.wall_s > 0
    text = out.with_suffix(".md").read_text()
    assert "A rehearsal: no figure of this section means anything" in text

    before = out.read_bytes()
    monkeypatch.setattr(_processes, "wait", lambda *args: pytest.fail("a process was started"))
    assert main([*command, "fp32,lightning_fp16,fp8"]) == 0
    assert out.read_bytes() == before
    out.with_suffix(".md").unlink()
    assert main(["--page-only", "--out", str(out)]) == 0
    assert out.with_suffix(".md").read_text() == text


def test_a_model_of_transformers_runs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    outcome = measure(Run("llama_7b", "bf16", *MODELS["llama_7b"].tiny), "cpu", tiny=True)
    assert outcome.status == "measured"
    assert outcome.source.startswith("transformers ")


def test_the_plan_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "gpt2,llama_1b"]) == 0
    printed = capsys.readouterr().out
    assert "gpt2, our bf16, 24 x 1024, eager" in printed
    assert "resnet50" not in printed
    assert "minutes on an H200" in printed


def test_wrong_use_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "resnet51"])
    assert "must be some of resnet50, bert_large" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--device", "cuda"])
    assert "--device is for --tiny" in capsys.readouterr().err
    assert main(["--tiny", "--out", str(RESULTS / "tiny" / "headline.json")]) == 2
    assert "is a rehearsal" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command in ([], ["--tiny", "--device", "cuda"]):
        assert main(command) == 2
        assert "`--tiny`" in capsys.readouterr().err
