"""`"auto"` on a CPU: it goes by the instructions of the CPU, logs one line, and chooses once for the run."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import Toy, batches, quiet_trainer
from torch import Tensor, nn

from lightning_amp import AmpPrecision
from lightning_amp.casting import Choice

PICKED = {"bf16-fast": "bf16", "bf16-slow": "fp32", "fp16-native": "bf16", "amd": "bf16", "arm": "bf16", "none": "fp32"}
OnMachine = Callable[[str], None]

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore:You defined a `validation_step` but")]


class Seen(Toy):
    """Record the dtype in which each kind of step computes."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(net=nn.Sequential(*layers, nn.Linear(8, 1)))
        self.dtypes: dict[str, torch.dtype] = {}

    def note(self, step: str, batch: Tensor) -> Tensor:
        self.dtypes[step] = self.net(batch).dtype
        return self.loss(batch)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.note("fit", batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.note("validate", batch)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.note("test", batch)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.note("predict", batch)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [message for message in caplog.messages if message.startswith("lightning_amp:")]
    caplog.clear()
    return found


@pytest.mark.parametrize("run", ["fit", "validate", "test", "predict"])
def test_each_kind_of_run_computes_in_it_and_says_why(run: str, machine: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    plugin, module = AmpPrecision(eval_precision="auto"), Seen()
    getattr(quiet_trainer(plugins=[plugin]), run)(module, batches(2))
    choice = Choice.of(PICKED[machine])
    assert plugin.dtype == choice.dtype
    assert module.dtypes[run] == choice.dtype
    (line,) = lines(caplog)
    assert line.startswith(
        f"lightning_amp: precision 'auto' is '{choice.name}' here ({Choice.pick(torch.device('cpu'))[1]})"
    )


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda plugin: pickle.loads(pickle.dumps(plugin))])
def test_a_copy_picks_for_itself(copied: Callable[[Any], Any], on_machine: OnMachine) -> None:
    on_machine("bf16-slow")
    plugin = AmpPrecision()
    for _ in range(2):  # before and after it was attached
        module = Seen()
        quiet_trainer(plugins=[copied(plugin)]).fit(module, batches(1))
        assert module.dtypes == {"fit": torch.float32}
        quiet_trainer(plugins=[plugin]).fit(Seen(), batches(1))


def test_a_compiled_module_computes_in_it(on_machine: OnMachine) -> None:
    for name in ("bf16-fast", "bf16-slow"):
        on_machine(name)
        module = Seen()
        module.net.compile(backend="aot_eager")
        quiet_trainer(plugins=[AmpPrecision()]).fit(module, batches(2))
        assert module.dtypes["fit"] == Choice.of(PICKED[name]).dtype
