"""Outputs of modules in mixed precision are compared with their outputs in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanSquaredError

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
    net, x = Net(), torch.randn(8, 4)
    outputs = OutputComparison(inputs=True)
    with outputs.recording(net):
        net(x)
    with outputs.comparing(net), torch.autocast("cpu", torch.bfloat16):
        net(x)
    assert [call.name for call, _ in outputs.calls] == ["a", "a", "b", ""]
    assert [call.kind for call, _ in outputs.calls] == ["Linear", "Linear", "Linear", "Net"]
    assert all(call.sums is not None and call.sums.shape == (1, 6) for call, _ in outputs.calls)
    first, second = outputs.calls[0][0], outputs.calls[1][0]
    assert first.input_sums is not None
    assert float(fidelity(first.input_sums[0, :3])[0]) == torch.inf
    assert second.input_sums is not None
    assert 30 < float(fidelity(second.input_sums[0, :3])[0]) < 70
    assert "forward" not in vars(net.a)
    assert [call.name for call in outputs.reference] == ["a", "a", "b", ""]
    outputs.forget()
    assert (outputs.calls, outputs.reference) == ([], [])


def test_without_inputs_no_copies_are_kept() -> None:
    net, x = Net(), torch.randn(8, 4)
    outputs = OutputComparison()
    with outputs.recording(net):
        net(x)
    with outputs.comparing(net):
        net(x)
    assert all(not one.outputs and not one.inputs for pair in outputs.calls for one in pair)
    assert all(call.sums is not None and float(call.sums[0, 2]) == 0 for call, _ in outputs.calls)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated")
def test_compiled_modules_are_left_alone() -> None:
    net = Net()
    net.a = torch.jit.script(net.a)  # type: ignore[assignment]
    net.b.compile(backend="eager")
    outputs = OutputComparison()
    with outputs.recording(net):
        pass
    assert outputs.unseen == ["a", "b"]


def test_naming_knows_who_runs() -> None:
    net, outputs, seen = Net(), OutputComparison(), list[list[str]]()
    net.b.register_forward_pre_hook(lambda *_: seen.append(list(outputs.running)))
    net.b.register_forward_hook(lambda *_: seen.append(list(outputs.running)))
    with outputs.naming(net):
        net(torch.randn(2, 4))
    assert seen == [[""], [""]]  # a hook is around the forward
    assert outputs.running == []


def test_an_exception_leaves_nothing() -> None:
    net, outputs = Net(), OutputComparison()
    with pytest.raises(RuntimeError), outputs.recording(net):
        net(torch.randn(2, 5))
    assert "forward" not in vars(net.a)
    assert outputs.running == []
