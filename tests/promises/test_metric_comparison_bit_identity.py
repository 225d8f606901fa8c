"""`MetricComparison` only observes: training with it is bit-identical to training without.

Each test has a second half: in plain fp32 both sides are the same computation, so every difference must be exactly 0.
That holds only if batches, random draws, metric states, lists, buffers and weights are paired exactly.
"""

import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.profilers import PyTorchProfiler
from support import Recorder, evaluate
from support.averages import EMAWeightAveraging
from support.launch import run_ranks
from zoo.watched import Everything, everything_of, fit, loaders

from lightning_amp import AmpPrecision
from lightning_amp.callbacks._metric_comparison import MetricComparison

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*sampler has shuffling enabled"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists"),
    pytest.mark.filterwarnings("ignore:The default behavior for interval-based checkpointing"),
    pytest.mark.filterwarnings("ignore:The PyTorch ?Profiler"),
]

SCENARIOS: dict[str, dict[str, Any]] = {
    "one loader": {},
    "two loaders": {"num_loaders": 2},
    "manual optimization": {"manual": True},
    "twice per epoch": {"val_check_interval": 0.5},
    "limited": {"limit_batches": 1},
    "limited, two loaders": {"num_loaders": 2, "limit_batches": 2},
    "limited share, two loaders": {"num_loaders": 2, "limit_batches": 0.4},
    "averaged weights, before": {"average": "before"},
    "averaged weights, after": {"average": "after"},
    "no inference mode": {"inference_mode": False},
    "PyTorchProfiler": {"profile": True},
    "own plugin": {"own": True},
    "own plugin, limited, two loaders": {"own": True, "num_loaders": 2, "limit_batches": 2},
}
CASES = [
    pytest.param(name, marks=[pytest.mark.needs("profiler"), pytest.mark.slow]) if "profile" in options else name
    for name, options in SCENARIOS.items()
]


def run(*, compare: bool, precision: Any, tmp_path: Path, average: str = "", **options: Any) -> tuple[Any, ...]:
    torch.set_num_threads(1)
    pl.seed_everything(3, verbose=False)
    model = Everything(num_loaders=options.pop("num_loaders", 1), manual=options.pop("manual", False))
    if options.pop("own", False):
        precision = AmpPrecision("bf16" if precision.precision == "bf16-mixed" else "fp32")
    if options.pop("profile", False):
        options["profiler"] = PyTorchProfiler(export_to_chrome=False)
    comparison = MetricComparison(limit_batches=options.pop("limit_batches", None))
    callbacks: list[pl.Callback] = [comparison] if compare else []
    if average:
        ema = EMAWeightAveraging(decay=0.5)
        callbacks = [ema, *callbacks] if average == "before" else [*callbacks, ema]
    logger = Recorder()
    trainer = fit(model, *callbacks, tmp_path=tmp_path / str(compare), logger=logger, plugins=precision, **options)
    return everything_of(model, trainer, logger), comparison, trainer


@pytest.mark.parametrize("scenario", CASES)
@pytest.mark.few(5)
def test_training_is_bit_identical(scenario: str, tmp_path: Path) -> None:
    without, _, _ = run(compare=False, precision=bf16(), tmp_path=tmp_path, **SCENARIOS[scenario])
    with_it, comparison, _ = run(compare=True, precision=bf16(), tmp_path=tmp_path, **SCENARIOS[scenario])
    assert [key for key in without if without[key] != with_it[key]] == []
    assert len({row.metric for row in comparison.table}) >= 9
    assert any(row.diff != 0.0 for row in comparison.table)
    # Real rounding of a small network: if paired draws were off by one, the difference would be a hundred times this.
    assert max(abs(row.relative_diff) for row in comparison.table if row.metric.startswith("mse")) < 0.02


@pytest.mark.parametrize("scenario", CASES)
@pytest.mark.few(4)
def test_in_fp32_both_sides_are_equal(scenario: str, tmp_path: Path) -> None:
    _, comparison, trainer = run(compare=True, precision=AmpPrecision("fp32"), tmp_path=tmp_path, **SCENARIOS[scenario])
    assert {row.diff for row in comparison.table} == {0.0}
    compared = {row.metric for row in comparison.table}
    ours = {name.removeprefix("amp/diff/") for name in trainer.callback_metrics if name.startswith("amp/diff/")}
    assert ours == compared
    assert compared >= {
        name for name in trainer.callback_metrics if not name.startswith(("amp/", "train", "mse_of_all"))
    }


def test_fp32_side_is_what_an_fp32_validation_says(tmp_path: Path) -> None:
    _, comparison, trainer = run(compare=True, precision=bf16(), tmp_path=tmp_path)
    model: Any = trainer.lightning_module
    results: dict[str, dict[str, float]] = {}
    for name, plugin, callbacks in (("amp", bf16(), [comparison]), ("fp32", Precision(), [])):
        pl.seed_everything(4, verbose=False)
        model.generator.manual_seed(9)
        kwargs: dict[str, Any] = {"accelerator": "cpu", "plugins": plugin, "callbacks": callbacks}
        (results[name],) = evaluate("validate", model, loaders(1), **kwargs)[1]
    rows = {row.metric: row for row in list(comparison.table)[-len(results["amp"]) - 1 :]}
    assert {name: row.fp32 for name, row in rows.items() if name in results["fp32"]} == results["fp32"]
    assert {name: row.amp for name, row in rows.items() if name in results["amp"]} == results["amp"]
    assert results["amp"] != results["fp32"]


class Edits(Everything):
    """Move weights in validation, as a momentum encoder does; read them when the epoch ends; make gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = torch.nn.Linear(6, 1).requires_grad_(False)

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        x = batch["x"].clone()
        for mine, other in zip(self.teacher.parameters(), self.net[4].parameters(), strict=True):
            mine.data.mul_(0.9).add_(other.data.mean(), alpha=0.1)
        self.log("teacher", self.teacher(x).square().mean())
        with torch.enable_grad():
            self(x).sum().backward()
        return super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.log("weights", self.net[0].weight.norm())
        self.log("teachers", self.teacher.weight.norm())


@pytest.mark.parametrize("limit_batches", [None, 1])
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.few(2)
def test_steps_that_edit_weights(average: bool, limit_batches: int | None, tmp_path: Path) -> None:
    def run(comparison: MetricComparison | None, precision: str) -> Any:
        pl.seed_everything(3, verbose=False)
        model, logger = Edits(), Recorder()
        callbacks: list[pl.Callback] = [EMAWeightAveraging(decay=0.5)] if average else []
        callbacks += [] if comparison is None else [comparison]
        plugin, folder = AmpPrecision(precision), tmp_path / str(comparison is None)
        trainer = fit(model, *callbacks, tmp_path=folder, logger=logger, plugins=plugin, inference_mode=False)
        gradients = [None if p.grad is None else p.grad.tolist() for p in model.parameters()]
        return everything_of(model, trainer, logger), gradients

    comparison, exact = MetricComparison(limit_batches=limit_batches), MetricComparison(limit_batches=limit_batches)
    assert run(comparison, "bf16") == run(None, "bf16")
    assert run(exact, "fp32") == run(None, "fp32")
    assert {row.diff for row in exact.table} == {0.0}
    assert {"teacher", "teachers", "weights"} < {row.metric for row in comparison.table}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("limit_batches", [None, 2])
@pytest.mark.parametrize("num_loaders", [1, 2])
@pytest.mark.few(3)
def test_test_is_the_same_with_and_without(num_loaders: int, limit_batches: int | None, own: bool) -> None:
    class Tests(Everything):
        """Do in tests the same as `Everything` does in validation."""

        on_test_epoch_start = Everything.on_validation_epoch_start
        on_test_batch_start = Everything.on_validation_batch_start
        test_step = Everything.validation_step
        on_test_batch_end = Everything.on_validation_batch_end
        on_test_epoch_end = Everything.on_validation_epoch_end

    def run(comparison: MetricComparison | None, precision: str) -> tuple[Any, ...]:
        pl.seed_everything(3, verbose=False)
        model: Any = Tests(num_loaders=num_loaders)
        plugin: Any = AmpPrecision("bf16" if precision == "bf16" else "fp32")
        if not own:
            plugin = bf16() if precision == "bf16" else AmpPrecision("fp32")
        callbacks = [] if comparison is None else [comparison]
        kwargs: dict[str, Any] = {"accelerator": "cpu", "plugins": plugin, "callbacks": callbacks}
        _, results = evaluate("test", model, loaders(num_loaders), **kwargs)
        state = {name: value.tolist() for name, value in model.state_dict().items()}
        return results, state, model.history, model.seen, torch.rand(1).item(), model.generator.get_state().tolist()

    comparison, exact = MetricComparison(limit_batches=limit_batches), MetricComparison(limit_batches=limit_batches)
    assert run(comparison, "bf16") == run(None, "bf16")
    assert run(exact, "fp32") == run(None, "fp32")
    assert len({row.metric for row in comparison.table}) >= 9
    assert {row.diff for row in exact.table} == {0.0}
    assert 0.0 < max(abs(row.relative_diff) for row in comparison.table if row.metric.startswith("mse")) < 0.02


@pytest.mark.needs("nccl")
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.few(1)
def test_two_processes(manual: bool, tmp_path: Path) -> None:
    run_ranks(Path(__file__), 2, tmp_path, str(int(manual)))
    for rank in (0, 1):
        report = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert report["changed"] == []
        assert report["fp32_diffs"] == [0.0]
        assert report["num_metrics"] >= 14
        assert 0.0 < report["largest_relative_mse"] < 0.02
        assert report["raised"].startswith("`MetricComparison`: mixed precision differs by more than the tolerance")
    # values reduced over the ranks must be the same on both
    reduced = [json.loads((tmp_path / f"rank{rank}.json").read_text())["reduced"] for rank in (0, 1)]
    assert reduced[0] == reduced[1]


def bf16() -> MixedPrecision:
    return MixedPrecision("bf16-mixed", "cpu")


def main(tmp_path: Path, manual: bool) -> None:
    """Run the test on each rank."""
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2, "max_epochs": 2}

    def one(name: str, comparison: MetricComparison | None, plugin: Any, model: Everything) -> tuple[Any, Any]:
        pl.seed_everything(3, verbose=False)
        logger = Recorder()
        callbacks = [] if comparison is None else [comparison]
        trainer = fit(model, *callbacks, tmp_path=tmp_path / name, logger=logger, plugins=plugin, **options)
        return everything_of(model, trainer, logger), trainer

    def module() -> Everything:
        pl.seed_everything(3, verbose=False)
        return Everything(num_loaders=2, sync_dist=True, manual=manual)

    torch.set_num_threads(1)
    comparison, exact = MetricComparison(), MetricComparison(limit_batches=1)
    without, _ = one("without", None, bf16(), module())
    with_it, trainer = one("with", comparison, bf16(), module())
    one("exact", exact, AmpPrecision("fp32"), module())
    raised = ""
    # Only rank 1's tolerance is exceeded, because its tolerance differs.
    strict = MetricComparison(tolerance=1e9 if trainer.global_rank == 0 else 0.0, on_exceed="raise")
    try:
        one("strict", strict, bf16(), module())
    except RuntimeError as error:
        raised = str(error)
    report = {
        "changed": [key for key in without if without[key] != with_it[key]],
        "fp32_diffs": sorted({row.diff for row in exact.table}),
        "num_metrics": len({row.metric for row in comparison.table}),
        "largest_relative_mse": max(abs(r.relative_diff) for r in comparison.table if r.metric.startswith("mse")),
        "reduced": [(r.metric, r.fp32, r.amp) for r in comparison.table if r.metric.startswith(("val_loss", "mse"))],
        "raised": raised,
    }
    (tmp_path / f"rank{trainer.global_rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), bool(int(sys.argv[2])))
    # gloo's threads must end before the interpreter does; otherwise it sometimes aborts ("terminate called")
    torch.distributed.destroy_process_group()
