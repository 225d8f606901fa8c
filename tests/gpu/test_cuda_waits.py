"""Count how often the host waits in an optimizer step. `python -m tests.benchmarks.waits` prints the whole grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pretended
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from support import ForbidSync, Poison, Recorder, Toy, batches, fit, set_sync_mode
from support.promises import fused_adamw
from support.waits import ACCELERATOR, CALLBACKS, VARIANTS, Case, per_batch, square
from torch.optim.lr_scheduler import ExponentialLR

from benchmarks.headline._waits import SyncWarnings
from lightning_amp import AmpPrecision
from lightning_amp.scaling import OptimizerSteps

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and not pretended.KIND, reason="needs a device that the host can wait for"
)


@pytest.fixture(autouse=True)
def restore_sync_mode() -> Iterator[None]:
    yield
    if torch.cuda.is_available() or pretended.KIND:
        set_sync_mode("default")


def different(cases: list[Case]) -> list[str]:
    found = ((case, case.waits(case.plugin())) for case in cases)
    return [f"{case}: {waits}, expected {case.expected}" for case, waits in found if waits != case.expected]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: f"{'fused ' if v[1] else ''}{v[0]}")
def test_a_fused_step_never_waits_and_another_once(variant: tuple[str, bool]) -> None:
    assert different(square(variant)) == []


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("callback", [name for name in CALLBACKS if name != "none"])
def test_callbacks_wait_no_more_than_they_say(callback: str, fused: bool) -> None:
    assert different(square(("AdamW", fused), callback)) == []


def test_without_skips_no_step_waits() -> None:
    case = Case("AdamW", False, "automatic", "norm", "bf16")
    counter = per_batch([])
    plugin = AmpPrecision("bf16", skip_nonfinite=False)
    fit(case.module(), plugin, batches(6), accelerator=ACCELERATOR, callbacks=counter.callbacks, limit_val_batches=0)
    assert counter.waits[1:] == [0] * 5


@pytest.mark.parametrize("watched", [False, True])
def test_a_schedule_per_step_reads_the_flag_of_a_fused_step_once(watched: bool) -> None:
    module = Toy(fused_adamw, None, lambda optimizer: ExponentialLR(optimizer, 0.9))
    counter = per_batch([LearningRateMonitor()] if watched else [])
    fit(
        module, AmpPrecision("bf16"), batches(6), accelerator=ACCELERATOR, logger=Recorder(), log_every_n_steps=1000,
        callbacks=[Poison(gradient=[4]), *counter.callbacks],
    )  # fmt: skip
    assert counter.waits[1:] == [1] * 5


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_plain_order_never_waits(precision: Any) -> None:
    class Looks(Toy):
        def on_before_optimizer_step(self, optimizer: Any) -> None: ...

    plugin = Case("AdamW", True, "automatic", "norm", precision).plugin()
    fit(
        Looks(fused_adamw), plugin, batches(6), accelerator=ACCELERATOR, callbacks=[ForbidSync()], gradient_clip_val=0.5
    )


def copied(device: torch.device) -> None:
    torch.ones(3).to(device)


PLANTED: list[Callable[[torch.device], Any]] = [lambda device: torch.ones((), device=device).item(), copied]


def planted(monkeypatch: pytest.MonkeyPatch, error: Callable[[torch.device], Any]) -> None:
    """Replace what the package does at the end of each batch by this function."""
    end_round = OptimizerSteps.end_round

    def with_error(steps: OptimizerSteps) -> None:
        error(torch.device(ACCELERATOR))
        end_round(steps)

    monkeypatch.setattr(OptimizerSteps, "end_round", with_error)


@pytest.mark.parametrize("error", PLANTED)
def test_one_wait_more_is_seen(error: Callable[[torch.device], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, error)
    case = Case("AdamW", True, "automatic", "norm", "fp16")
    assert case.waits(case.plugin()) == (1.0, 1.0)
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        fit(case.module(), case.plugin(), batches(4), accelerator=ACCELERATOR, callbacks=[ForbidSync()])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only CUDA warns")
def test_warnings_count_what_the_device_counts() -> None:
    scalar, counter = torch.ones((), device="cuda"), SyncWarnings()
    counter.start()
    for _ in range(3):
        scalar.item()
    scalar.add_(1)
    assert counter.stop() == 3
    assert counter.stop() is None
