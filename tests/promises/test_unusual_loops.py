"""Loops that a reviewer of the step came up with: each must do in fp16 what it does in fp32."""

from __future__ import annotations

import copy
import io
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support import DEVICE, quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp import AmpPrecision, DynamicLossScaler, FabricAmpPrecision
from lightning_amp._compat._torch import decides_on_device
from lightning_amp.precision import unscale_
from lightning_amp.scaling import ScaledSteps
from lightning_amp.scaling._early_moves import calls_closure_late


def rows(batches: int) -> Any:
    return DataLoader(torch.randn(4 * batches, 4, generator=torch.Generator().manual_seed(0)), batch_size=4)  # pyright: ignore[reportArgumentType]


class Net(L.LightningModule):
    """Has two layers, and runs `loop` in manual optimization, or returns its loss."""

    def __init__(self, loop: Any = None, optimizers: Any = None, validation: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.norm = nn.Linear(4, 1), nn.Linear(4, 1), nn.BatchNorm1d(4)
        self.loop, self.make = loop, optimizers
        if validation is not None:
            self.validation_step: Any = lambda batch, batch_idx: validation(self, batch, batch_idx)
        self.automatic_optimization = loop is None
        self.seen: list[Any] = []

    def loss(self, x: Tensor) -> Tensor:
        return self.a(x).float().square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(batch) if self.loop is None else self.loop(self, batch, batch_idx)

    def test_step(self, batch: Tensor, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD
        return self.make(self) if self.make else [sgd(self.a.parameters(), 0.1), sgd(self.b.parameters(), 0.1)]


def one_sgd(net: Net, **kwargs: Any) -> Any:
    return torch.optim.SGD(net.a.parameters(), 0.1, **kwargs)


def fit(net: Net, precision: str, batches: int, **kwargs: Any) -> L.Trainer:
    val = kwargs.pop("val", None)
    plugin = kwargs.pop("plugin", None) or AmpPrecision(precision, scaler=1024.0 if precision == "fp16" else None)
    kwargs = {"max_epochs": 1, **kwargs}
    trainer = quiet_trainer(plugins=[plugin], **kwargs)
    trainer.fit(net, rows(batches), val)
    return trainer


def assert_as_fp32(make: Any, batches: int, atol: float = 1e-3, scaler: Any = None, **kwargs: Any) -> None:
    """Train in fp16 and in fp32, and require parameters that are equal within rounding."""
    nets = make(), make()
    fit(nets[0], "fp32", batches, **kwargs)
    fit(nets[1], "fp16", batches, plugin=scaler and AmpPrecision("fp16", scaler=scaler), **kwargs)
    for one, other in zip(*(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=atol)


# -- gradients that do not come from a scaled backward -------------------------------------------


def assigned_after_the_backward_of_another(net: Net, x: Tensor, index: int) -> None:
    one, other = net.optimizers()
    one.zero_grad()
    net.manual_backward(net.a(x).float().square().mean())
    one.step()
    other.zero_grad()
    params = list(net.b.parameters())
    for p, g in zip(params, torch.autograd.grad(net.b(x).float().square().mean(), params), strict=True):
        p.grad = g
    other.step()


def assigned_after_a_skip(net: Net, x: Tensor, index: int) -> None:
    optimizer: Any = net.optimizers()
    optimizer.zero_grad()
    if index == 0:
        net.manual_backward(net.loss(x) * torch.inf)
    else:
        for p in net.a.parameters():
            p.grad = torch.ones_like(p)
    optimizer.step()


def assigned_after_a_skip_then_a_backward(net: Net, x: Tensor, index: int) -> None:
    optimizer: Any = net.optimizers()
    optimizer.zero_grad()
    if index == 1:
        for p in net.a.parameters():
            p.grad = torch.ones_like(p)
    net.manual_backward(net.loss(x) * (1.0 if index else torch.inf))
    optimizer.step()


def assigned_after_the_backward_of_another_then_its_own(net: Net, x: Tensor, index: int) -> None:
    one, other = net.optimizers()
    one.zero_grad()
    net.manual_backward(net.loss(x))
    other.zero_grad()
    for p in net.b.parameters():
        p.grad = torch.ones_like(p)
    net.manual_backward(net.b(x).float().square().mean())
    one.step()
    other.step()


def given_by_a_copy(net: Net, x: Tensor, index: int, backward: Any = Tensor.backward) -> None:
    """As the gradients of first-order MAML, or of a local worker."""
    optimizer: Any = net.optimizers()
    worker = copy.deepcopy(net.a)
    worker.zero_grad()
    backward(worker(x).float().square().mean())
    for p, own in zip(net.a.parameters(), worker.parameters(), strict=True):
        p.grad = own.grad
    optimizer.step()


def assigned_after_an_attack(net: Net, x: Tensor, index: int, unscales: bool = True) -> None:
    """The backward to the input reaches no parameter."""
    optimizer: Any = net.optimizers()
    attacked = x.clone().requires_grad_()
    net.a.requires_grad_(False)
    net.manual_backward(net.loss(attacked))
    net.a.requires_grad_(True)
    if unscales:
        unscale_(net.trainer, optimizer)
    params = list(net.a.parameters())
    for p, g in zip(params, torch.autograd.grad(net.loss(attacked.detach() + 0.1), params), strict=True):
        p.grad = g
    optimizer.step()


def test_assigned_gradients_that_may_carry_the_scale_are_refused() -> None:
    loops = [
        lambda net, x, index: given_by_a_copy(net, x, index, net.manual_backward),
        lambda net, x, index: assigned_after_an_attack(net, x, index, unscales=False),
    ]
    for loop in loops:
        with pytest.raises(RuntimeError, match=r"Call `unscale_` before .* `loss.backward\(\)` for"):
            fit(Net(loop, one_sgd), "fp16", 2)


@pytest.mark.parametrize(
    ("loop", "optimizers"),
    [
        (given_by_a_copy, one_sgd),
        (assigned_after_an_attack, one_sgd),
        (assigned_after_the_backward_of_another, None),
        (assigned_after_the_backward_of_another_then_its_own, None),
        (assigned_after_a_skip, one_sgd),
        (assigned_after_a_skip, lambda net: one_sgd(net, fused=True)),
        (assigned_after_a_skip_then_a_backward, one_sgd),
        (assigned_after_a_skip_then_a_backward, lambda net: one_sgd(net, fused=True)),
    ],
)
def test_assigned_gradients_are_as_in_fp32(loop: Any, optimizers: Any) -> None:
    assert_as_fp32(lambda: Net(loop, optimizers), 2, atol=1e-4)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_failed_may_be_tried_again(fused: bool) -> None:
    """Row 16: the optimizer raises before it updates anything, as when there is no memory for its state."""

    def loop(net: Net, x: Tensor, index: int) -> None:
        optimizer: Any = net.optimizers()
        optimizer.zero_grad()
        net.manual_backward(net.loss(x))
        if index == 1:
            rate = optimizer.param_groups[0].pop("lr")
            with pytest.raises(KeyError):
                optimizer.step()
            optimizer.param_groups[0]["lr"] = rate
        optimizer.step()

    assert_as_fp32(lambda: Net(loop, lambda net: one_sgd(net, fused=fused)), 3)


@pytest.mark.parametrize("fused", [False, True])
def test_a_closure_that_failed_leaves_the_gradients_of_the_last_step(fused: bool) -> None:
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, fused=fused)
    steps = ScaledSteps(1024.0, [optimizer])
    steps.backward(net(torch.ones(2, 4)).sum())
    steps.step(optimizer)

    def closure() -> Any:
        raise KeyError("out of memory")

    with pytest.raises(KeyError):
        steps.step(optimizer, closure)
    steps.unscale_(optimizer)
    torch.testing.assert_close(net.weight.grad, torch.full((1, 4), 2.0))


class Fails(torch.autograd.Function):
    on = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if Fails.on:
            raise RuntimeError("out of memory")
        return g


def caught_by_hand(net: Net, x: Tensor, index: int) -> None:
    optimizer: Any = net.optimizers()
    optimizer.zero_grad()
    scaler: Any = net.trainer.scaler  # pyright: ignore[reportAttributeAccessIssue]
    loss = Fails.apply(net.a(x)).float().square().mean()
    Fails.on = index == 1
    try:
        (loss if scaler is None else scaler.scale(loss)).backward()
    except RuntimeError:
        optimizer.zero_grad()
        return
    optimizer.step()


def test_an_error_inside_a_backward_by_hand_is_over_when_it_was_caught() -> None:
    assert_as_fp32(lambda: Net(caught_by_hand, one_sgd), 5)


def test_validation_may_run_a_backward() -> None:
    def saliency(net: Net, x: Tensor, index: int) -> None:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            net.manual_backward(net.a(x).float().sum())
        assert x.grad is not None
        net.seen.append(x.grad.norm())

    nets = {precision: Net(caught_by_hand, one_sgd, saliency) for precision in ("fp32", "fp16")}
    for precision, net in nets.items():
        fit(net, precision, 1, val=rows(1), inference_mode=False)
    torch.testing.assert_close(nets["fp32"].seen, nets["fp16"].seen, rtol=1e-2, atol=1e-2)


# -- optimizers ----------------------------------------------------------------------------------


class Ignores(torch.optim.Optimizer):
    """Never calls its closure."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(0.1 * p.grad)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_an_optimizer_that_ignores_its_closure_skips(precision: str) -> None:
    def loop(net: Net, x: Tensor, index: int) -> None:
        optimizer: Any = net.optimizers()
        optimizer.zero_grad()
        net.manual_backward(net.loss(x) * (torch.inf if index == 1 else 1.0))
        optimizer.step()

    net = Net(loop, lambda net: Ignores(net.a.parameters()))
    plugin: Any = fit(net, precision, 3).precision_plugin
    assert net.a.weight.isfinite().all()
    assert (plugin.num_steps, plugin.num_skipped) == (2, 1)


class Stages(Net):
    """Gets another optimizer in its second epoch."""

    def __init__(self, how: str) -> None:
        super().__init__(optimizers=one_sgd)
        self.how = how
        self.b.requires_grad_(how != "unfrozen")

    def loss(self, x: Tensor) -> Tensor:
        return (self.a(x) + self.b(x)).float().square().mean()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            layers = {"unfrozen": [self.b, self.a], "a stage": [self.b]}.get(self.how, [self.a, self.b])
            self.b.requires_grad_(True)
            optimizers = [torch.optim.SGD(nn.ModuleList(layers).parameters(), 0.1)]
            self.automatic_optimization = self.how in ("unfrozen", "a stage")
            self.trainer.optimizers = (
                optimizers if self.automatic_optimization else self.trainer.optimizers + optimizers
            )

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return self.loss(batch)
        self.manual_backward(self.loss(batch))
        for optimizer in self.optimizers()[:: 1 if self.how == "the old one steps first" else -1]:
            optimizer.step()
        self.zero_grad()
        return None


@pytest.mark.parametrize(
    ("how", "accumulated"),
    [
        *(("unfrozen", 1), ("unfrozen", 2), ("unfrozen", 4), ("a stage", 1), ("a stage", 2), ("a stage", 4)),
        *(("the new one steps first", 1), ("the old one steps first", 1)),
    ],
)
def test_an_optimizer_that_comes_later(how: str, accumulated: int) -> None:
    scaler = DynamicLossScaler(64.0, growth_interval=3)
    assert_as_fp32(lambda: Stages(how), 4, scaler=scaler, max_epochs=2, accumulate_grad_batches=accumulated)


def test_gradients_of_parameters_that_join_an_optimizer_follow_the_scale_once() -> None:
    def decays(net: Net, x: Tensor, index: int) -> None:
        optimizer: Any = net.optimizers()
        if index == 2:
            optimizer.add_param_group({"params": [*net.b.parameters()]})
            net.zero_grad()
        for p in net.parameters():
            if p.grad is not None:  # gradients decay instead of being zeroed
                p.grad.mul_(0.5)
        net.manual_backward((net.a(x) + net.b(x)).float().square().mean())
        optimizer.step()

    assert_as_fp32(lambda: Net(decays, one_sgd), 8, scaler=DynamicLossScaler(64.0, growth_interval=2))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_threads_may_call_the_module(precision: str) -> None:
    """Autocast is on in one thread, and off in the other; both call each layer several times at once."""

    def acts(net: Net, x: Tensor, index: int) -> None:
        with ThreadPoolExecutor(1) as pool, torch.no_grad():
            acting = pool.submit(lambda: [net.a(x) for _ in range(300)])
            while not acting.done():
                net.a(x)
            assert {out.dtype for out in acting.result()} == {torch.float32}
        net.manual_backward(net.loss(x))

    net = Net(acts, one_sgd)
    fit(net, precision, 3)
    assert {p.dtype for p in net.parameters()} == {torch.float32}


def test_another_thread_may_step_during_a_backward() -> None:
    """It trains another model, without this package."""
    net, other = nn.Linear(4, 1), nn.Linear(4, 1)
    steps = ScaledSteps(1024.0, [torch.optim.SGD(net.parameters(), 0.1)])
    other(torch.ones(2, 4)).sum().backward()
    before, plain = other.bias.item(), torch.optim.SGD(other.parameters(), 0.1)

    def train(_: Tensor) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(plain.step).result()

    output = net(torch.ones(2, 4))
    output.register_hook(train)
    steps.backward(output.sum())
    assert other.bias.item() == pytest.approx(before - 0.2)


def test_a_subclass_of_a_fused_optimizer_sees_true_gradients() -> None:
    seen: list[float] = []

    class Clips(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            with torch.enable_grad():
                loss = closure()
            seen.append(float(nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)))
            super().step()
            return loss

    for precision in ("fp32", "fp16"):
        fit(Net(None, lambda net: Clips(net.a.parameters(), fused=True)), precision, 1)
    assert seen[1] == pytest.approx(seen[0], rel=1e-2)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, type("Named", (torch.optim.AdamW,), {})])
def test_a_subclass_without_a_step_of_its_own_decides_on_the_device(kind: Any) -> None:
    for _ in range(2):  # torch wraps the step of a class for its first optimizer
        assert decides_on_device(kind(nn.Linear(2, 2).parameters(), fused=True))
    assert not decides_on_device(kind(nn.Linear(2, 2).parameters(), fused=False))


def test_an_optimizer_that_checks_for_graphs_first_is_not_copied() -> None:
    class Checks(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            self._cuda_graph_capture_health_check()  # type: ignore[attr-defined]
            loss = closure()
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad)
            return loss

    assert not calls_closure_late(Checks(nn.Linear(2, 2).parameters(), {}))


# -- accounts ------------------------------------------------------------------------------------


def test_a_test_of_a_checkpoint_changes_no_account(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net, plugin = Net(None, one_sgd), AmpPrecision("fp16", scaler=DynamicLossScaler(growth_interval=2))
    trainer = fit(net, "fp16", 2, plugin=plugin)
    trainer.save_checkpoint(tmp_path / "early.ckpt")
    trainer.fit_loop.max_epochs = 3  # type: ignore[attr-defined]
    trainer.fit(net, rows(2))
    before = (plugin.num_steps, plugin.num_skipped, plugin.scaler.get_scale())  # type: ignore[union-attr]
    trainer.test(net, rows(1), ckpt_path=tmp_path / "early.ckpt", verbose=False)
    assert (plugin.num_steps, plugin.num_skipped, plugin.scaler.get_scale()) == before  # type: ignore[union-attr]
    caplog.clear()
    other = quiet_trainer(plugins=[AmpPrecision("fp32")])
    other.test(Net(None, one_sgd), rows(1), ckpt_path=tmp_path / "early.ckpt", verbose=False)
    assert "training goes on" not in caplog.text


def test_validation_inside_of_a_window_sees_finite_statistics() -> None:
    class Overflows(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            x = batch * torch.inf if batch_idx == 4 else batch
            return self.a(self.norm(x)).float().square().mean()

    def statistics(net: Net, x: Tensor, index: int) -> None:
        net.seen.append(net.a(net.norm(x)).float().square().mean())

    net = Overflows(None, one_sgd, statistics)
    fit(net, "fp16", 12, val=rows(1), accumulate_grad_batches=4, val_check_interval=2, num_sanity_val_steps=0)
    assert torch.stack(net.seen).isfinite().all()


def test_parameters_without_an_optimizer_do_not_delay_the_scale() -> None:
    """A head is trained in Fabric; the layer below keeps `requires_grad`."""
    amp, records = FabricAmpPrecision("fp16"), []
    fabric = L.Fabric(accelerator=DEVICE, devices=1, plugins=[amp])
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net[1].parameters(), 0.001))
    amp.records.subscribe(records.extend)
    for i in range(8):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 4, device=fabric.device)).float().square().mean()
        fabric.backward(loss * (1e36 if i in (3, 4) else 1.0))
        optimizer.step()
    amp.flush()
    assert [record.next_scale for record in records[1:-1]] == [record.scale for record in records[2:]]


@pytest.mark.needs("parameters that stay")
def test_an_exception_leaves_true_gradients() -> None:
    def loop(precision: str) -> Tensor:
        class Stops(Net):
            def training_step(self, batch: Tensor, batch_idx: int) -> Any:
                if batch_idx == 1:
                    raise KeyError("boom")
                return self.loss(batch)

        net = Stops(None, one_sgd)
        with suppress(KeyError), redirect_stderr(io.StringIO()):
            fit(net, precision, 4, accumulate_grad_batches=4)
        assert net.a.weight.grad is not None
        return copy.deepcopy(net.a.weight.grad)

    torch.testing.assert_close(loop("fp16"), loop("fp32"), rtol=1e-2, atol=1e-3)


def test_several_losses_keep_their_container() -> None:
    losses = (torch.ones(()), torch.ones(()))
    for scaler in (DynamicLossScaler(), torch.amp.GradScaler("cpu")):
        assert isinstance(scaler.scale(losses), tuple)
