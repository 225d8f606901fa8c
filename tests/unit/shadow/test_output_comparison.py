"""Outputs of modules in mixed precision are compared with their outputs in fp32."""

from __future__ import annotations

import pytest
import torch
from support import quiet_trainer
from torch import Tensor, nn
from torchmetrics import MeanSquaredError

from lightning_amp.findings import worst_db
from lightning_amp.numerics import fidelity, output_sums
from lightning_amp.shadow._output_comparison import OutputComparison


def decibels(reference: Tensor, values: Tensor) -> tuple[float, float]:
    sums = output_sums(reference, values)
    return float(fidelity(sums[:3])[0]), float(fidelity(sums[3:])[0])


def test_a_constant_hides_what_is_lost() -> None:
    x = torch.randn(256, 4)
    plain, varying = decibels(x + 1000, (x + 1000).bfloat16())
    assert plain > 45
    assert varying < 3
    plain, varying = decibels(x, x.bfloat16())
    assert abs(plain - varying) < 1
    assert decibels(x[:1], x[:1].bfloat16())[0] == decibels(x[:1], x[:1].bfloat16())[1]


def test_masks_are_alike() -> None:
    x = torch.randn(8, 8)
    mask = torch.ones(8, 8).triu(1).bool()
    fp32, half = torch.finfo(torch.float32).min, torch.finfo(torch.float16).min
    assert decibels(x.masked_fill(mask, fp32), x.masked_fill(mask, half)) == (torch.inf, torch.inf)
    assert decibels(x.masked_fill(mask, -torch.inf), x.masked_fill(mask, -torch.inf)) == (torch.inf, torch.inf)
    nan = x.clone()
    nan[0, 0] = torch.nan
    assert decibels(nan, nan) == (torch.inf, torch.inf)
    assert decibels(x, nan)[0] != decibels(x, nan)[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
        self.metric = MeanSquaredError()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(self.a(x)).relu_())


def test_calls_are_paired_by_name_and_number() -> None:
    net, x, trainer = Net(), torch.randn(8, 4), quiet_trainer()
    outputs = OutputComparison(inputs=True)
    for _ in range(2):
        with outputs.recording(net):
            net(x)
        with outputs.comparing(net), torch.autocast("cpu", torch.bfloat16):
            net(x)
    found = outputs.sums_of_all_ranks(trainer)
    assert [(name, one.kind, one.num_calls) for name, one in found.items()] == [
        ("a", "Linear", 4), ("b", "Linear", 2), ("", "Net", 2),
    ]  # fmt: skip
    assert worst_db(found[""].inputs) == torch.inf
    assert 30 < worst_db(found["a"].inputs) < 70
    assert 30 < worst_db(found["b"].outputs) < 70
    assert "forward" not in vars(net.a)


def test_an_index_that_differs_is_not_close() -> None:
    outputs, table = OutputComparison(inputs=True), nn.Embedding(2000, 4)
    net = nn.Sequential(table)
    with outputs.recording(net):
        net(torch.tensor([1001]))
    with outputs.comparing(net):
        net(torch.tensor([1000]))
    assert worst_db(outputs.sums_of_all_ranks(quiet_trainer())["0"].inputs) == -torch.inf


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script. is deprecated", "ignore:The .grad attribute of a Tensor"
)  # torch 2.15
def test_compiled_modules_are_left_alone() -> None:
    net, outputs = Net(), OutputComparison()
    net.a = torch.jit.script(net.a)  # type: ignore[assignment]
    net.b.compile(backend="eager")
    for watching in (outputs.recording, outputs.comparing):
        with watching(net):
            net(torch.ones(2, 4))
    assert list(outputs.sums_of_all_ranks(quiet_trainer())) == [""]


def test_an_exception_leaves_nothing() -> None:
    net, outputs = Net(), OutputComparison()
    with pytest.raises(RuntimeError), outputs.recording(net):
        net(torch.randn(2, 5))
    assert "forward" not in vars(net.a)
