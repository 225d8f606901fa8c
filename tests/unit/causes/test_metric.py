"""The search for the cause of a wrong metric. `tests/promises/test_evaluation_diseases.py` has planted faults."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support import DEVICE, quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from zoo.evaluation import BATCH_SIZE, Case, Offset, Temperatures, rows_for, validate

from lightning_amp import AmpPrecision
from lightning_amp.causes.metric._blame import Blame, blame_module, more_modules, origin_in_fp32, worst_db
from lightning_amp.causes.metric._replay import EvaluationReplay
from lightning_amp.findings import EvaluationReport
from lightning_amp.shadow import ComparedEvaluation, FirstBatches, OutputComparison, _first_batches

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")

WRONG = EvaluationReport("val_loss", 2.0, 1.0, batch_amp=2.0, batch_fp32=1.0)
NOT_FINITE = EvaluationReport("val_loss", math.nan, 1.0, batch_amp=math.nan, batch_fp32=1.0)


# -- the search --------------------------------------------------------------------------------------------------------


def test_a_batch_that_was_not_kept_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_first_batches, "MAX_BYTES", 700)
    module = Case()
    rows = rows_for(module)
    rows[BATCH_SIZE * 3]["y"][:] = float("nan")
    comparison, (said,) = validate(module, rows, "bf16")
    assert comparison.report is not None
    assert (comparison.report.batch_idx, comparison.report.cause) == (3, "unknown")
    assert "this batch was not kept for a second look" in said


def test_batches_that_are_edited() -> None:
    class Edits(Temperatures):
        def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx)
            batch["x"].mul_(2)

    torch.manual_seed(0)
    module = Edits()
    comparison, _ = validate(module, rows_for(module), "bf16")
    assert comparison.report is not None
    assert comparison.report.module == "kelvin"


def test_a_second_run_that_fails_is_no_error() -> None:
    class Twice(Offset):
        runs = 0

        def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
            Twice.runs += 1
            if Twice.runs > 8:
                raise RuntimeError("only so often")
            self.log("val_loss", float("nan"))

    module = Twice()
    comparison, (said,) = validate(module, rows_for(module), "bf16")
    assert comparison.report is not None
    assert "the validation step could not be run a second time (RuntimeError: only so often)" in said


def test_a_remedy_that_fails_is_no_error() -> None:
    class Strict(nn.Linear):
        autocast = False

        def forward(self, x: Tensor) -> Tensor:
            if self.autocast and not torch.is_autocast_enabled(DEVICE):
                raise RuntimeError("not so")
            return super().forward(x)

    class NotInFp32Alone(Offset):
        def __init__(self) -> None:
            super().__init__()
            self.out = Strict(16, 1)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            self.out.autocast = torch.is_autocast_enabled(DEVICE)
            return super().forward(batch)

    torch.manual_seed(0)
    module = NotInFp32Alone()
    comparison, (said,) = validate(module, rows_for(module), "bf16")
    assert comparison.report is not None
    assert comparison.report.cause == "operation"
    assert [one.setting for one in comparison.report.tried] == ["eval_precision='fp32'"]
    assert "note: the validation step could not be run a second time (RuntimeError: not so)" in said


def test_a_finite_metric_without_a_reason_is_left_alone() -> None:
    class Autocast(Case):
        def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("autocast", 0.3 + float(torch.is_autocast_enabled(DEVICE)))

    module = Autocast()
    comparison, said = validate(module, rows_for(module), "bf16")
    assert (said, comparison.report) == ([], None)
    assert comparison.table[0].diff == pytest.approx(1)


# -- which module ------------------------------------------------------------------------------------------------------


class Thousand(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1000


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.offset, self.fc = Thousand(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.offset(x) - 1000)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.block = nn.Linear(4, 4), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.inp(x))


def compared(net: nn.Module, x: Tensor, dtype: torch.dtype = torch.bfloat16) -> OutputComparison:
    outputs = OutputComparison(inputs=True)
    with outputs.recording(net):
        net(x)
    with outputs.comparing(net), torch.autocast("cpu", dtype):
        net(x)
    return outputs


def test_the_innermost_module_comes_first() -> None:
    blame = blame_module(WRONG, compared(Net(), torch.randn(64, 4)))
    found = blame.report
    assert (found.cause, found.module, found.module_class) == ("module", "block.offset", "Thousand")
    assert blame.only_varying
    assert blame.first_in_fp32 == "block.offset"
    assert found.input_sqnr_db > 40
    assert found.output_sqnr_db < 5
    healthy = compared(nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.randn(64, 4))
    step = compared(Thousand(), torch.randn(64, 4))  # the outermost module stands for the step
    assert blame_module(WRONG, healthy) == blame_module(WRONG, step) == Blame(WRONG)


def test_for_a_metric_that_is_not_finite_only_such_outputs_are_wrong() -> None:
    assert blame_module(NOT_FINITE, compared(Net(), torch.randn(64, 4))) == Blame(NOT_FINITE)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[0].weight.data.mul_(1e6)
    found = blame_module(NOT_FINITE, compared(net, torch.ones(8, 4), torch.float16)).report
    assert (found.module, found.in_fp32_too) == ("0", False)


def test_origins_in_fp32() -> None:
    net, x = Net(), torch.randn(8, 4)
    net.block.fc.bias.data[0] = torch.nan
    found = origin_in_fp32(NOT_FINITE, compared(net, x), {"x": x}, net).report
    assert (found.cause, found.names, found.module) == ("weights", ("block.fc.bias",), "block.fc")
    net, x = Net(), torch.randn(8, 4)
    x[0, 0] = torch.inf
    found = origin_in_fp32(NOT_FINITE, compared(net, x), {"x": x}, net).report
    assert (found.cause, found.names, found.module) == ("batch", ("1 in `batch['x']`",), "inp")
    found = origin_in_fp32(NOT_FINITE, compared(Net(), torch.randn(8, 4)), {}, net).report
    assert (found.cause, found.in_fp32_too) == ("operation", True)


@pytest.mark.parametrize(
    ("rules", "blamed", "more"),
    [
        (["inp"], "block.fc", ["inp", "block.fc"]),
        (["block.fc"], "block.fc", ["block"]),
        (["block"], "block", ["block", "inp"]),
        (["inp"], "inp", None),
        (["inp"], None, None),
    ],
)
def test_more_modules(rules: list[str], blamed: str | None, more: list[str] | None) -> None:
    report = EvaluationReport("val_loss", 2.0, 1.0, "module" if blamed else "unknown", module=blamed)
    assert more_modules(rules, Blame(report), compared(Net(), torch.randn(64, 4))) == more


def test_nothing_to_compare_is_exact() -> None:
    assert worst_db(None) == torch.inf


# -- batches that run again: the real module, its metrics and random numbers stay --------------------------------------


class AtTheEnd(pl.Callback):
    """Calls a function at the end of the evaluation."""

    def __init__(self, work: Any) -> None:
        self.batches = FirstBatches("cpu", 1)
        self.work = work

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.batches.add(batch, batch_idx, None)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        compared = ComparedEvaluation("validation", {}, {}, [], [], self.batches, None)
        for metric in ("val_loss", "other"):
            self.work(EvaluationReplay(trainer, pl_module, compared, metric), self.batches.kept)


def run(module: Case, work: Any) -> None:
    trainer = quiet_trainer(plugins=AmpPrecision("bf16"), callbacks=[AtTheEnd(work)])
    trainer.validate(module, DataLoader(rows_for(module), batch_size=BATCH_SIZE), verbose=False)


def test_one_batch_or_several() -> None:
    found: dict[str, Any] = {}

    def work(replay: EvaluationReplay, kept: list[Any]) -> None:
        if found:
            assert replay.in_fp32(kept[:1]).value is None  # a metric that is not logged
            return
        before = torch.get_rng_state()
        found["fp32"] = [replay.in_fp32([one]).value for one in kept]
        found["all"] = replay.in_fp32(kept)
        found["amp"] = replay.in_amp(kept[:1]).value
        found["again"] = replay.in_amp(kept[:1]).value
        found["cured"] = replay.in_amp(kept[:1], rules=["kelvin"]).value
        found["eval"] = replay.in_fp32(kept[:1], upcast=False).value
        assert torch.equal(before, torch.get_rng_state())

    torch.manual_seed(0)
    module = Temperatures()
    module.kelvin.register_buffer("seen", torch.ones((), dtype=torch.bfloat16))
    run(module, work)
    assert found["all"].value == pytest.approx(sum(found["fp32"]) / len(found["fp32"]))
    assert found["all"].held["kelvin.seen"].dtype == torch.float32
    assert found["amp"] == found["again"]
    assert found["amp"] > 5 * found["fp32"][0]
    assert found["cured"] == pytest.approx(found["fp32"][0], rel=0.2)
    assert found["eval"] == found["fp32"][0]
    assert "forward" not in vars(module.kelvin)


def test_operations() -> None:
    names: list[str] = []

    def work(replay: EvaluationReplay, kept: list[Any]) -> None:
        fp32, amp = replay.operations(kept[:1])
        assert [call.name for call in fp32.calls] == [call.name for call in amp.calls]
        names.extend(call.name for call in amp.calls)

    run(Case(), work)
    assert names[:5] == ["linear", "tanh", "linear", "float", "mse_loss"]
