"""The fit around the measurements: its steps, its batches, and the precision of its training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning import Callback
from torch import Tensor
from torch.utils.data import DataLoader
from zoo import fp32_cases as cases

from lightning_amp.tune.fp32_modules._bench import Bench
from lightning_amp.tune.fp32_modules._request import Request
from lightning_amp.tune.fp32_modules._short_fit import in_a_short_fit


def measure(
    module: Any, data: Any, steps: list[int], work: Callable[[Bench], Any], later: int = 0, **kwargs: Any
) -> Any:
    request = Request(module, data, "bf16", 0.05, {"accelerator": "cpu", **kwargs})
    return in_a_short_fit(request, steps, work, later=later)


def steps_of(bench: Bench) -> tuple[list[int], list[tuple[int, int | None]]]:
    return [point.step for point in bench.points], [(idx, loader_idx) for _, idx, loader_idx in bench.batches]


class Several(cases.Rows):
    def val_dataloader(self) -> Any:
        return [self.train_dataloader(), DataLoader(torch.ones(2, cases.SIZE), batch_size=2)]  # type: ignore[arg-type]


class Loaders(cases.Mlp):
    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)


class NoValidation(cases.Rows):
    def val_dataloader(self) -> Any:
        return []


class EmptyValidation(cases.Rows):
    def val_dataloader(self) -> Any:
        return DataLoader([])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "data", "batches"),
    [
        (cases.Mlp, cases.Rows(64), [(0, None), (1, None), (2, None)]),
        (cases.Mlp, cases.Rows(8), [(0, None), (1, None)]),  # epochs of two batches
        (Loaders, Several(), [(0, 0), (1, 0), (2, 0), (0, 1)]),
        (cases.Mlp, NoValidation(), []),
        (cases.Mlp, EmptyValidation(), []),
    ],
)
def test_steps_of_training_and_batches_of_validation(kind: Any, data: Any, batches: Any) -> None:
    assert measure(kind, lambda: data, [0, 5], steps_of) == ([0, 5], batches)


def test_later_batches_of_validation() -> None:
    def first(bench: Bench) -> Tensor:
        return bench.batches[0][0]

    rows = list(cases.Rows().val_dataloader())
    assert torch.equal(measure(cases.Mlp, cases.Rows, [0], first), rows[0])
    assert torch.equal(measure(cases.Mlp, cases.Rows, [0], first, later=2), rows[6])
    assert torch.equal(measure(cases.Mlp, cases.Rows, [0], first, later=99), rows[0])


def test_it_trains_in_fp32_and_measures_in_the_precision() -> None:
    seen: list[tuple[bool, bool]] = []

    class Notes(cases.Mlp):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            seen.append((torch.is_autocast_enabled("cpu"), self.trainer.training and self.training))
            return super().training_step(batch, batch_idx)

    measure(Notes, NoValidation, [0, 3], lambda bench: bench.distance())
    first = seen.index((True, True))
    assert first >= 6  # four steps of training and two in fp32
    assert [step for step in seen if step != (False, True)] == seen[first : first + 2] == [(True, True)] * 2


def test_limits_of_the_user_make_no_difference() -> None:
    kwargs = {"limit_train_batches": 1, "val_check_interval": 7, "max_steps": 1, "detect_anomaly": True}
    found = measure(cases.Mlp, cases.Rows, [0, 9], steps_of, **kwargs)
    assert found == ([0, 9], [(0, None), (1, None), (2, None)])


def test_callbacks_of_the_user_run() -> None:
    class Halves(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            batch.mul_(0.5)

    def batch(bench: Bench) -> Tensor:
        return bench.points[0].batch

    found = measure(cases.Mlp, cases.Rows, [0], batch, callbacks=[Halves()])
    assert torch.equal(found, next(iter(cases.Rows().train_dataloader())) / 2)


def test_a_step_that_draws_its_own_batches() -> None:
    class Draws(cases.Mlp):
        def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
            return super().training_step(next(dataloader_iter)[0], 0)

    with pytest.raises(ValueError, match="`training_step` must not take a `dataloader_iter`"):
        measure(Draws, NoValidation, [0], steps_of)
