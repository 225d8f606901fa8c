"""The modules that run, their tree, and their ratings."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics.classification import BinaryAccuracy

from lightning_amp.numerics import fidelity_sums
from lightning_amp.tune.fp32_modules._modules import Watch, make_tree, names_of, suspicion


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.never = nn.Linear(4, 4), nn.Linear(2, 2)

    def encode(self, x: Tensor) -> Tensor:
        return self.inp(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.attention = nn.MultiheadAttention(4, 1, batch_first=True)
        self.low = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.ReLU())
        self.metric = BinaryAccuracy()
        self.again = self.blocks[0]

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder.encode(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        x = self.again(x)
        x = x + self.attention(x[None], x[None], x[None])[0][0]
        self.metric(x[:, 0].sigmoid(), (x[:, 0] > 0).long())
        with torch.autocast("cpu"):
            return self.low(x).float()


def test_the_tree_of_what_runs() -> None:
    net, watch = Net(), Watch()
    with watch.on(net):
        net(torch.randn(3, 4)).sum().backward()
    assert all("forward" not in vars(module) for module in net.modules())
    assert watch.called[:3] == ["encoder.inp", "blocks.0.0", "blocks.0.1"]  # in the order in which calls end, each once
    assert len(watch.called) == len(set(watch.called))
    tree = {name: list(inside) for name, inside in make_tree(net, watch.called).items()}
    assert tree[""] == ["encoder.inp", "blocks.0", "blocks.1", "attention", "low.1"]
    assert tree["blocks.1"] == ["blocks.1.0", "blocks.1.1"]
    assert tree["attention"] == []  # uses the weight of `out_proj` without calling it
    left_out = make_tree(net, watch.called, frozenset({"blocks.0"}))
    assert list(left_out[""]) == ["encoder.inp", "blocks.1", "attention", "low.1"]


def test_the_names_are_those_that_rules_match() -> None:
    net = Net()
    assert names_of(net)["blocks.0"] is net.again
    assert "again" not in names_of(net)
    assert not any(name.startswith("metric") for name in names_of(net))
    compiled = nn.Sequential(torch.compile(nn.Sequential(nn.Linear(1, 1)), backend="eager"))
    assert list(names_of(compiled)) == ["0", "0.0"]


def test_outputs_are_compared_with_those_in_fp32() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    x, reference = torch.randn(5, 4), Watch()
    with reference.on(net):
        net(x)
    watch = Watch(reference)
    with watch.on(net), torch.autocast("cpu", dtype=torch.bfloat16):
        net(x)
    expected = fidelity_sums(net[0](x), net[0](x).bfloat16())
    assert 0 < float(watch.sums["0"][2]) < 10 * float(expected[2])
    assert set(watch.sums) == {"0", "1", "2"}
    reference.forget()
    assert reference.outputs == {}


def test_suspicion() -> None:
    true = torch.ones(4)
    outputs = {
        "a": fidelity_sums(true, true * 1.001),
        "a.x": fidelity_sums(true, true * math.inf),
        "b": fidelity_sums(true, true * math.nan),
        "c": fidelity_sums(true, true),
    }
    gradients = {"c.weight": fidelity_sums(true, true * 1.5), "c.y.bias": fidelity_sums(true, true)}
    tree = {"": ["a", "b", "c", "d"], "a": ["a.x"], "a.x": [], "b": [], "c": ["c.y"], "c.y": [], "d": []}
    rated = suspicion(tree, ["a.x", "a", "b", "c.y", "c"], outputs, gradients)
    assert sorted(rated, key=lambda name: -rated[name])[:3] == ["a.x", "b", "a"]
    assert rated["d"] == rated["c.y"] == -math.inf


def test_a_culprit_is_where_a_bad_output_and_a_bad_gradient_meet() -> None:
    """A module before it has a bad gradient, a module after it a bad output."""
    true = torch.ones(4)
    good, bad = fidelity_sums(true, true * 1.001), fidelity_sums(true, true * 3)
    outputs = {"before": good, "culprit": bad, "after": bad}
    gradients = {"before.weight": bad, "culprit.weight": bad, "after.weight": good}
    tree = {"": ["before", "culprit", "after"], "before": [], "culprit": [], "after": []}
    rated = suspicion(tree, ["before", "culprit", "after"], outputs, gradients)
    assert max(rated, key=lambda name: rated[name]) == "culprit"
