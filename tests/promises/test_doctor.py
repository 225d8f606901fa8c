"""What `doctor` says is true: of data loading, padding for fp8, steps that overflow, and `"auto"`."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from typing import Any

import lightning as L
import pytest
import torch
from support import Toy, batches, quiet_trainer
from support.fp8 import emulated, needs_torchao
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_amp import AmpPrecision, doctor
from lightning_amp.advice import _machine, _race, _watch

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but")


def found(make_module: Any, make_data: Any = None, **arguments: Any) -> dict[str, Any]:
    """Return the findings by code."""
    report = doctor(make_module, make_data, device="cpu", **arguments)
    return {finding.code: finding for finding in report.findings}


# -- loading is compared with the whole step ---------------------------------------------------------------------------

DISK = multiprocessing.Lock()


class FromOneDisk(Dataset[Tensor]):
    """Reads one row at a time, however many workers there are: workers only load while the step computes."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Tensor:
        with DISK:
            time.sleep(self.seconds)
        return torch.ones(8)


class Computes(Toy):
    """A step that takes 20 ms and uses no core."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)


class Loaded(L.LightningDataModule):
    def __init__(self, seconds: float, **settings: Any) -> None:
        super().__init__()
        self.seconds, self.settings = seconds, settings

    def train_dataloader(self) -> Any:
        return DataLoader(FromOneDisk(self.seconds), batch_size=4, **self.settings)


@pytest.fixture
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time a few steps, where no outcome depends on time."""
    monkeypatch.setattr(_watch, "_TIMED_S", (0.0, 5.0))
    monkeypatch.setattr(_race, "_ROUNDS", (1, 1, 1))
    monkeypatch.setattr(_machine, "_PRODUCT_S", 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("row_s", [0.005, 0.002])
def test_workers_help_where_the_step_can_hide_the_loading(row_s: float) -> None:
    finding = found(Computes, lambda: Loaded(row_s), precision="bf16")["data-bound"]
    assert "num_workers=" in finding.action
    assert "do not help" not in finding.action


# -- padding for fp8 ---------------------------------------------------------------------------------------------------


class Odd(L.LightningModule):
    """A layer of 1000 features, no multiple of 16: it stays in bf16 beside two that run in fp8."""

    def __init__(self, features: int = 1000) -> None:
        super().__init__()
        sizes = (256, features, 256, 256, 16)
        self.net = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(512, 256), batch_size=64)  # pyright: ignore[reportArgumentType]


@needs_torchao
@pytest.mark.usefixtures("few_rounds")
@pytest.mark.parametrize("features", [1000, pytest.param(1016, marks=pytest.mark.slow)])
def test_a_gain_of_padding_for_fp8_is_not_taken_from_bf16(features: int) -> None:
    precision = {"precision": "fp8", "fp8_recipe": emulated()}
    finding = found(lambda: Odd(features), precision=precision)["sizes-not-aligned"]
    assert "multiples of 16" in finding.message
    assert "measured" not in finding.message
    assert "gains nothing" not in finding.action
    assert finding.severity == "note"


# -- a step that overflows ---------------------------------------------------------------------------------------------


class WithRows(Toy):
    def train_dataloader(self) -> Any:
        return batches(8)


class Boxes(WithRows):
    """The product of two sides overflows fp16, whatever the loss scale."""

    def __init__(self) -> None:
        super().__init__(net=nn.Linear(8, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        sides = self.net(batch).sigmoid() * 1024
        return (sides[:, 0] * sides[:, 1]).float().log().square().mean()


class NoLogarithm(Boxes):
    """The loss is NaN in every precision."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (-self.net(batch).float().square() - 1).log().mean()


class Sometimes(Boxes):
    """Every fourth loss is NaN."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch).float().square().mean() * (float("nan") if batch_idx % 4 == 3 else 1.0)


@pytest.mark.usefixtures("few_rounds")
@pytest.mark.parametrize(
    ("module", "precision"),
    [
        (Boxes, "fp16"),
        (NoLogarithm, "bf16"),
        (NoLogarithm, "fp32"),
        (Sometimes, "bf16"),
        (WithRows, {"precision": "fp16", "scaler": 2.0**60}),  # a static scale that is too large
    ],
)
@pytest.mark.few(3)
def test_a_step_that_overflows_is_a_finding(module: Any, precision: Any) -> None:
    finding = found(module, precision=precision)["overflow"]
    assert finding.severity == "error"
    assert "OverflowLocator" in finding.action


# -- "auto" ------------------------------------------------------------------------------------------------------------


class Images(WithRows):
    def __init__(self) -> None:
        super().__init__(
            net=nn.Sequential(nn.Unflatten(1, (1, 2, 4)), nn.Conv2d(1, 2, 1), nn.Flatten(), nn.Linear(16, 1))
        )


@pytest.mark.cpu
@pytest.mark.usefixtures("few_rounds")
@pytest.mark.parametrize("machine", ["bf16-fast", "bf16-slow", "none"])
def test_what_it_says_of_auto_is_what_auto_does(machine: str, on_machine: Any) -> None:
    on_machine(machine)
    plugin = AmpPrecision("auto")
    quiet_trainer(accelerator="cpu", max_steps=1, plugins=[plugin]).fit(Images())
    assert plugin.last_step is not None
    picked = plugin.last_step.precision
    report = doctor(Images, device="cpu")
    assert report.precision == picked
    assert f"`auto` picks {picked}" in str(report)
    assert f"`auto` picks {picked}" in str(doctor(device="cpu"))
