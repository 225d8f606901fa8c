"""Promises 13 to 24 in Fabric, where they are about the model: parameters, forwards, inputs and outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import FEATURES, CountReads, assert_same
from support.fabric import (
    DEVICE,
    FabricPlugins,
    Loop,
    batches,
    make_fabric,
    net,
    promise,
)
from support.promises import fused_adamw, plain_sgd
from torch import Tensor, nn
from torch._functorch import config

from lightning_amp import FabricAmpPrecision

both_ways = pytest.mark.usefixtures("where_flags_live")


# -- row 13: half-precision parameters ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@promise(13, stock="Attempting to unscale|DID NOT RAISE|Regex", raises=BaseException)
def test_half_precision_parameters_are_refused(plugins: FabricPlugins, precision: str, dtype: torch.dtype) -> None:
    """The error comes at the first forward, and names the parameters and the cure."""
    loop = Loop(getattr(plugins, precision)(), lambda: net().to(dtype))
    with pytest.raises((TypeError, ValueError), match=r"0\.weight.*float\(\)"):
        loop.model(batches()[0].to(DEVICE))


# -- row 19: torch.compile ---------------------------------------------------------------------------------------------


@pytest.mark.cpu  # a backward on a device runs in another thread, which has a switch of its own
def test_the_switch_for_compiled_backwards_is_on_in_forwards_and_backwards_only() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(config.backward_pass_autocast)
            if self.fails:
                raise KeyError("planted")
            x.register_hook(lambda _: seen.append(config.backward_pass_autocast))
            return x

    before, seen = config.backward_pass_autocast, list[Any]()
    fabric, reads = make_fabric(FabricPlugins().bf16()), Reads()
    module = nn.Sequential(nn.Linear(FEATURES, 1), reads)
    model, _ = fabric.setup(module, plain_sgd(module.parameters()))
    reads.fails = False
    fabric.backward(model(fabric.to_device(batches()[0])).sum())
    assert seen == ["off", "off"] != [before, before]
    reads.fails = True
    with pytest.raises(KeyError, match="planted"):
        model(fabric.to_device(batches()[0]))
    assert config.backward_pass_autocast == before


# -- inputs, outputs, regions in fp32 ----------------------------------------------------------------------------------


class Phases(nn.Module):
    """Positions as inputs: bfloat16 has only 256 integers that are distinct up to 256."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)

    def forward(self, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.net(positions[:, None]), {"angle": positions * 1.0, "index": positions.long()}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@promise("inputs", stock="are not")
def test_inputs_are_not_rounded(plugins: FabricPlugins, precision: str) -> None:
    loop = Loop(getattr(plugins, precision)(), Phases)
    positions = torch.arange(4096.0, device=DEVICE) + 0.125
    _, found = loop.model(positions)
    assert_same(found["angle"], positions)
    assert_same(found["index"], positions.long())


@both_ways
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_dtypes_of_inputs_and_outputs(precision: str) -> None:
    """Inputs stay as they are, float64 ones too. Half-precision outputs become float32."""
    seen: dict[str, torch.dtype] = {}

    class Sees(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(FEATURES, 1)

        def forward(self, x: Tensor, *, ids: Tensor, nested: Any) -> Any:
            out = self.net(x)
            seen.update({"x": x.dtype, "ids": ids.dtype, "nested": nested["a"][0].dtype, "out": out.dtype})
            return {"out": out, "ids": ids, "list": [out]}

    plugin = FabricAmpPrecision(precision)
    loop = Loop(plugin, Sees)
    batch = loop.fabric.to_device(batches()[0])
    result = loop.model(batch, ids=torch.arange(3, device=DEVICE), nested={"a": [batch.double()]})
    half = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    assert seen == {"x": torch.float32, "ids": torch.int64, "nested": torch.float64, "out": half}
    assert (result["out"].dtype, result["ids"].dtype, result["list"][0].dtype) == (
        torch.float32, torch.int64, torch.float32,
    )  # fmt: skip
    assert all(p.dtype == torch.float32 for p in loop.model.parameters())


@both_ways
@pytest.mark.parametrize("rules", [["1"], [nn.Tanh], ["*"]])
def test_fp32_modules(rules: Any) -> None:
    seen: dict[str, torch.dtype] = {}
    loop = Loop(FabricPlugins().fp16(settings={"fp32_modules": rules}), net)
    for name, module in loop.model.module.named_children():
        module.register_forward_hook(lambda _, args, out, name=name: seen.update({name: out.dtype}))
    loop.run()
    everything = rules == ["*"]
    assert seen["1"] == torch.float32
    assert seen["0"] == (torch.float32 if everything else torch.float16)
    if everything:
        assert_same(loop.weights(), Loop(None, net).run().weights())


@both_ways
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_training_is_as_in_fp32_within_rounding(precision: str) -> None:
    """litgpt's loop: fused AdamW, clipping by norm, accumulation; the model in half precision."""
    plugin = getattr(FabricPlugins(), precision)()
    options: dict[str, Any] = {"edit": lambda loop: loop.clip(max_norm=1.0), "accumulate": 2}
    loop = Loop(plugin, net, fused_adamw).run(batches(40), **options)
    reference = Loop(None, net, fused_adamw).run(batches(40), **options)
    assert_same(loop.weights(), reference.weights(), rtol=0.05, atol=0.02)
    with pytest.raises(AssertionError):
        assert_same(loop.weights(), reference.weights())  # half precision takes part


@both_ways
def test_evaluation_between_steps() -> None:
    """A forward without a backward, in eval mode or under `no_grad`, changes nothing."""

    def train(evaluate: bool) -> Any:
        loop = Loop(FabricPlugins().fp16(), lambda: nn.Sequential(nn.BatchNorm1d(FEATURES), net()), fused_adamw)

        def look(loop: Loop) -> None:
            loop.model.eval()
            with torch.no_grad():
                assert loop.model(loop.fabric.to_device(batches()[0])).dtype == torch.float32
            with torch.inference_mode():
                loop.model(loop.fabric.to_device(batches()[1]))
            loop.model.train()

        loop.trouble = {2: "gradient"}
        return loop.run(after=look if evaluate else None).weights()

    assert_same(train(True), train(False))


def test_a_guarded_schedule_of_a_fused_optimizer_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_amp.scaling._scalars.in_host_memory", lambda scalar: False)
    plugin = FabricPlugins().fp16()
    loop = Loop(plugin, net, fused_adamw)
    schedule = torch.optim.lr_scheduler.ExponentialLR(loop.raw, 0.9)
    loop.run(batches(3))
    on_device = [loop.fabric.to_device(batch) for batch in batches(6)]
    with CountReads() as reads:
        for batch in on_device:
            loop.optimizer.zero_grad()
            loop.backward(batch)
            loop.optimizer.step()
    assert reads.count == 0
    with CountReads() as reads:
        loop.run(on_device[:1], after=lambda loop: plugin.on_applied(schedule.step))
    assert reads.count > 0, "the host reads the flag at the flush"
