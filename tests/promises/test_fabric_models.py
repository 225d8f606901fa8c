"""Promises 13 to 24 in Fabric, where they are about the model: parameters, forwards, inputs and outputs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support import FEATURES, CountReads, assert_same, with_batch_norm
from support.fabric import (
    DEVICE,
    Exact,
    FabricPlugins,
    Infinite,
    Loop,
    batches,
    make_fabric,
    net,
    promise,
    slow,
    without,
)
from support.promises import DIFFERS, fused_adamw, plain_adamw, plain_sgd
from torch import Tensor, nn
from torch._functorch import config
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp import DynamicLossScaler, FabricAmpPrecision
from lightning_amp.scaling import DerivativeScale

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


@both_ways
def test_frozen_half_parameters_are_fine() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(FEATURES, FEATURES).half().requires_grad_(False)
            self.net = net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.frozen(x))

    plugin = FabricPlugins().fp16()
    Loop(plugin, Frozen).run()
    assert plugin.num_steps == 8


# -- row 14: odd parameters --------------------------------------------------------------------------------------------


class Odd(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.net = kind, net()
        dtype = torch.complex64 if kind == "complex" else torch.float64
        if kind == "sparse":
            self.extra: Any = nn.Embedding(10, FEATURES, sparse=True)
        else:
            self.extra = nn.ParameterList([nn.Parameter(torch.ones(FEATURES, dtype=dtype))])

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "sparse":
            extra = self.extra(torch.tensor([1, 1, 3], device=x.device)).sum()
        else:
            extra = (x * self.extra[0]).abs().sum().float()
        return self.net(x) + 0.01 * extra


def without_momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


@pytest.mark.parametrize("kind", ["complex", pytest.param("sparse", marks=pytest.mark.needs("sparse")), "float64"])
@promise(14, stock="ComplexFloat|never", raises=(RuntimeError, NotImplementedError))
def test_odd_parameters(plugins: FabricPlugins, kind: str) -> None:
    if not plugins.ours and kind != "complex":
        raise RuntimeError("never reached: Fabric keeps this one")
    make: Callable[[], nn.Module] = lambda: Exact(Odd(kind))  # noqa: E731
    bad: Any = {2: "gradient"}
    loop = Loop(plugins.fp16(), make, without_momentum, bad).run()
    assert_same(loop.weights(), Loop(None, make, without_momentum).run(without(bad)).weights())
    assert loop.plugin.num_skipped == 1


# -- row 15: gradient penalties ----------------------------------------------------------------------------------------


class Penalty(nn.Module):
    """Compute the penalty in the forward. Fabric refuses `torch.autograd.grad` on the outputs of a model."""

    def __init__(self, helper: Any) -> None:
        super().__init__()
        self.net, self.helper = net(), helper

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        score = self.net(x).float().mean() * 1e-7
        with torch.autocast(x.device.type, enabled=False):
            (gradient,) = self.helper(score, x, create_graph=True)
        return (gradient.float().norm() * 1e8 - 1) ** 2, gradient.detach().float()


@pytest.mark.parametrize("init_scale", [1.0, 2.0**10, 2.0**24])
@promise(15, stock="are not close")
def test_gradient_penalty(plugins: FabricPlugins, init_scale: float) -> None:
    """The gradient of the input is about 1e-9; float16's smallest number is 6e-8."""

    def penalty(plugin: Any) -> tuple[Tensor, dict[str, Tensor]]:
        plain = plugin is None or not plugins.ours
        helper: Any = torch.autograd.grad if plain else partial(DerivativeScale().grad, plugin.scaler)
        loop = Loop(plugin, lambda: Penalty(helper), plain_sgd)
        loss, gradient = loop.model(loop.fabric.to_device(batches()[0]))
        loop.fabric.backward(loss)
        loop.unscale()
        return gradient, {n: p.grad.clone() for n, p in loop.model.named_parameters() if p.grad is not None}

    ours, reference = penalty(plugins.fp16(init_scale)), penalty(None)
    torch.testing.assert_close(ours[0], reference[0], rtol=0.05, atol=1e-10)
    if init_scale == 1.0:  # the factor 1e8 of the penalty makes larger scales overflow, so that the step is skipped
        torch.testing.assert_close(ours[1], reference[1], rtol=0.1, atol=0.05)


# -- row 18: a reused weight -------------------------------------------------------------------------------------------


class CountCasts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") == torch.bfloat16:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


class ManyUses(nn.Module):
    """One layer applied to each of many small inputs, so that its gradient has as many terms."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.net(x * (1 + k / 512)).float().tanh().mean() for k in range(512)]).mean()


@pytest.mark.needs("reused casts")
@promise(18, stock="are not close")
def test_gradients_of_all_uses_are_summed_in_fp32(plugins: FabricPlugins) -> None:
    loop = Loop(plugins.bf16(), ManyUses, plain_sgd)
    batch = loop.fabric.to_device(batches()[0])
    with torch.autocast(DEVICE, dtype=torch.bfloat16, cache_enabled=False):
        loss = loop.model.module(batch)
    reference = torch.autograd.grad(loss, loop.model.module.net.weight)[0]
    loop.fabric.backward(loop.model(batch))
    gradient = loop.model.module.net.weight.grad
    torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-3 * float(reference.abs().max()))


@pytest.mark.cpu
def test_one_half_copy_of_a_weight_per_step() -> None:
    """From the second step on: in the first, the package learns which weights are used again."""
    loop = Loop(FabricAmpPrecision("bf16"), ManyUses, plain_sgd)
    casts = CountCasts()
    for _ in range(2):
        with (casts := CountCasts()):
            loop.fabric.backward(loop.model(loop.fabric.to_device(batches()[0])))
        loop.optimizer.step()
    assert casts.shapes.count((FEATURES, FEATURES)) == 1


class Edited(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        before = self.net(x)
        with torch.no_grad():
            self.net.weight.mul_(0.5)
        return self.net(x) + 0 * before


@both_ways
def test_a_weight_is_never_stale() -> None:
    """An edit inside a forward, a step, and a restored copy of the weights all reach the next use."""
    loop = Loop(FabricAmpPrecision("bf16"), Edited, plain_sgd)
    batch = loop.fabric.to_device(batches()[0])
    for _ in range(3):
        outputs = loop.model(batch)
        inner = loop.model.module.net
        fresh = nn.functional.linear(batch.bfloat16(), inner.weight.bfloat16(), inner.bias.bfloat16()).float()
        assert_same(outputs.detach(), fresh.detach())
        loop.fabric.backward(outputs.sum())
        loop.optimizer.step()
        loop.optimizer.zero_grad()


# -- row 19: torch.compile ---------------------------------------------------------------------------------------------


class Island(nn.Module):
    """A region that its author keeps in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return torch.tanh(x.float() @ self.weight)


@slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
@pytest.mark.skipif(not hasattr(config, "backward_pass_autocast"), reason="torch 2.8")
@pytest.mark.parametrize("when", ["before setup", "after setup"])
@promise(19, stock=DIFFERS)
def test_compiled_backward_equals_eager(plugins: FabricPlugins, when: str) -> None:
    def gradient(compiled: bool) -> Tensor:
        torch._dynamo.reset()
        torch.manual_seed(0)
        fabric = make_fabric(plugins.bf16())
        inner: Any = nn.Sequential(Island(), nn.Linear(FEATURES, 1))
        module = torch.compile(inner, backend="aot_eager") if compiled and when == "before setup" else inner
        model, _ = fabric.setup(module, plain_sgd(inner.parameters()))
        run = torch.compile(model, backend="aot_eager") if compiled and when == "after setup" else model
        fabric.backward(run(fabric.to_device(batches()[0])).pow(2).mean())
        return inner[0].weight.grad.clone()

    assert_same(gradient(True), gradient(False), rtol=0, atol=1e-7)


@pytest.mark.cpu  # a backward on a device runs in another thread, which has a switch of its own
@pytest.mark.skipif(not hasattr(config, "backward_pass_autocast"), reason="torch 2.8")
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


# -- row 2: statistics of several modules ------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("optimizer", [plain_adamw, fused_adamw])
def test_a_skip_of_one_optimizer_leaves_the_other_graph_alone(optimizer: Any) -> None:
    """In a GAN, the backward of the generator's loss comes after the discriminator's step, which may be skipped.

    A restored buffer in between must not break the backward of a graph that has read it.
    """

    def train(plugin: Any) -> Any:
        torch.manual_seed(0)
        fabric = make_fabric(plugin)
        one, two = Exact(with_batch_norm()), Exact(nn.Linear(1, 1))
        generator, first = fabric.setup(one, optimizer(one.parameters()))
        critic, second = fabric.setup(two, optimizer(two.parameters()))
        for index, batch in enumerate(map(fabric.to_device, batches())):
            fake = generator(batch)
            if plugin is not None or index != 3:
                second.zero_grad()
                loss = critic(fake.detach()).pow(2).mean()
                fabric.backward(Infinite.apply(loss) if index == 3 else loss)
                second.step()
            first.zero_grad()
            fabric.backward((critic(fake) - 1).pow(2).mean())
            first.step()
        return [p.detach() for module in (one, two) for p in module.parameters()]

    plugin = FabricPlugins().fp16()
    assert_same(train(plugin), train(None))
    assert plugin.num_skipped == 1


@both_ways
@pytest.mark.parametrize("optimizer", [plain_adamw, fused_adamw])
def test_statistics_of_a_teacher(optimizer: Any) -> None:
    """A teacher with BatchNorm in train mode sees the bad batch first, under `no_grad`, as in DINO and Mean Teacher."""

    def train(plugin: Any, data: Any, bad: int | None = None) -> Any:
        torch.manual_seed(0)
        fabric = make_fabric(plugin)
        student, module = Exact(with_batch_norm()), Exact(with_batch_norm()).requires_grad_(False)
        model, opt = fabric.setup(student, optimizer(student.parameters()))
        teacher = fabric.setup_module(module)
        for index, clean in enumerate(map(fabric.to_device, data)):
            batch = clean * torch.inf if index == bad else clean
            with torch.no_grad():
                target = teacher(batch)
            opt.zero_grad()
            fabric.backward((model(batch) - target).pow(2).mean())
            opt.step()
        if plugin is not None:
            plugin.flush()
        return dict(student.state_dict()), dict(module.state_dict())

    assert_same(train(FabricPlugins().fp16(), batches(), 3), train(None, without([3])))


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


@both_ways
def test_copies(tmp_path: Any) -> None:
    """The plugin can be copied and pickled, also between a backward and a step."""
    plugin = FabricAmpPrecision("fp16", scaler=DynamicLossScaler(64.0), fp32_modules=["*0"])
    loop = Loop(plugin, net)
    loop.backward(batches()[0])
    other = copy.deepcopy(plugin)
    assert (other.precision, other.scaler.get_scale(), other.num_steps) == ("16-mixed", 64.0, 0)
    torch.save(plugin, tmp_path / "plugin.pt")
    loop.optimizer.step()
    fresh = Loop(other, net).run()
    assert_same(
        fresh.weights(), Loop(FabricAmpPrecision("fp16", scaler=64.0, fp32_modules=["*0"]), net).run().weights()
    )


@both_ways
def test_warnings_are_not_raised_by_a_normal_loop() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Loop(FabricAmpPrecision("fp16"), net, fused_adamw).run(edit=lambda loop: loop.clip(max_norm=1.0))


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
