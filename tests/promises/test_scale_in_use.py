"""Rows 50 to 53, 56, 57, 62 to 64 and 69: what the loss scale does in runs that go wrong now and then."""

from __future__ import annotations

import gc
import inspect
import logging
import weakref
from typing import Any

import lightning as L
import pytest
import torch
from support import Toy, WithoutAutocast, assert_same, fit, quiet_trainer
from torch import Tensor, nn

from lightning_amp import AmpPrecision, DynamicLossScaler, FabricAmpPrecision, ScaleMonitor
from lightning_amp.precision import scaled_grad
from lightning_amp.scaling import ScaledSteps


class Steps(L.LightningModule):
    """A linear layer whose `training_step` is the function that it is given."""

    def __init__(self, step: Any, out: int = 2) -> None:
        super().__init__()
        self.step, self.net = step, nn.Linear(8, out)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.step(self, batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-2)


def loader(rows: int, columns: int, num_batches: int) -> Any:
    return torch.utils.data.DataLoader([torch.randn(rows, columns) for _ in range(num_batches)], batch_size=None)


def run(step: Any, num_batches: int, **kwargs: Any) -> AmpPrecision:
    plugin = AmpPrecision("fp16", **kwargs)
    torch.manual_seed(0)
    quiet_trainer(plugins=[plugin], max_epochs=1).fit(Steps(step), loader(16, 8, num_batches))
    return plugin


# -- 50: the settings of torch's own scaler, our policy ----------------------------------------------------------------


def test_the_settings_of_torchs_scaler_are_taken() -> None:
    given = torch.amp.GradScaler("cpu", init_scale=8.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3)
    scaler = AmpPrecision("fp16", scaler=given).scaler
    assert isinstance(scaler, DynamicLossScaler)
    assert (scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor()) == (8.0, 4.0, 0.25)
    assert scaler.get_growth_interval() == 3


# -- 51: stuck only if the scale cannot or need not fall ---------------------------------------------------------------


def area(module: Any, batch: Tensor, batch_idx: int) -> Tensor:
    size = module.net(batch).sigmoid() * 1024
    return (size[:, 0] * size[:, 1]).float().log().square().mean()


def by_turns(module: Any, batch: Tensor, batch_idx: int) -> Tensor:
    """Four losses of five are NaN; the gradients of the fifth need a scale of 2**2."""
    z = module.net(batch)
    if batch_idx % 5:
        return z.float().mean() * torch.nan
    return (z * 1e4).float().mean() * 32


def test_overflows_by_turns_are_not_stuck() -> None:
    plugin = run(by_turns, 100)
    assert plugin.num_steps > 0
    assert plugin.num_skipped > 64


def test_a_run_that_is_stuck_says_what_was_not_tried() -> None:
    with pytest.raises(
        FloatingPointError, match=r"64 optimizer steps in a row.*AmpPrecision\('bf16'\).*ckpt_path"
    ) as error:
        run(area, 130)
    assert "no other precision" not in str(error.value)


# -- 52: a derivative of a derivative ----------------------------------------------------------------------------------


@pytest.mark.parametrize("derivative", ["ours", "torch's"])
def test_second_derivatives_train(derivative: str) -> None:
    """A PINN for `u'' = -9 sin 3x`; `scaled_grad` applies at least as many steps as `torch.autograd.grad`."""

    class Pinn(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

        def d(self, outputs: Tensor, inputs: Tensor) -> Tensor:
            if derivative == "ours":
                return scaled_grad(self.trainer, outputs, inputs, create_graph=True)[0]
            return torch.autograd.grad(outputs, inputs, create_graph=True)[0]

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            x = batch.requires_grad_()
            second = self.d(self.d(self.net(300 * x).sum(), x).sum(), x).float()
            return ((second + 9 * torch.sin(3 * x)) / 9).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 3e-3)

    torch.manual_seed(0)
    plugin, data = AmpPrecision("fp16"), torch.linspace(0, 1, 256)[:, None].split(64)
    quiet_trainer(plugins=[plugin], max_epochs=30).fit(Pinn(), torch.utils.data.DataLoader(list(data), batch_size=None))
    assert plugin.num_steps >= 95


# -- 56, 57: what the log says -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_steps_that_changed_nothing_are_said_once(precision: str, caplog: pytest.LogCaptureFixture) -> None:
    class Nan(Toy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return self.loss(batch) * (torch.nan if batch_idx % 4 == 1 else 1.0)

    caplog.set_level(logging.INFO)
    fit(Nan, AmpPrecision(precision))
    assert caplog.text.count("2 optimizer steps of ") == 1
    assert "Attach `OverflowLocator()`" in caplog.text


def test_skips_that_settle_the_scale_are_not_news(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    plugin = AmpPrecision("fp16", scaler=DynamicLossScaler(2.0**24))
    fit(Toy, plugin)
    assert plugin.num_skipped > 0
    assert "changed nothing" not in caplog.text


# -- 62: reading changes nothing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", ["num_steps", "num_skipped", "last_step"])
def test_counters_may_be_read_in_inference_mode(read: str) -> None:
    layer = nn.Linear(2, 1)
    steps = ScaledSteps(DynamicLossScaler(4.0), [torch.optim.SGD(layer.parameters(), 0.1)])
    fabric, plugin = FabricAmpPrecision("fp16"), AmpPrecision("fp16")
    with torch.inference_mode():
        for each in (steps, fabric, plugin):
            getattr(each, read)
    steps.backward(layer(torch.ones(1, 2)).sum())
    assert plugin.scaler is not None
    (plugin.scaler.scale(layer(torch.ones(1, 2)).sum())).backward()


# -- 63: nothing to do leaves no record --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("nothing", [[0], [0, 3], [7]])
def test_a_window_without_a_loss_leaves_no_record(nothing: list[int]) -> None:
    class Nothing(Toy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return None if batch_idx in nothing else self.loss(batch)

    monitor = ScaleMonitor(log_every_n_steps=1)
    plugin = WithoutAutocast("fp16", scaler=DynamicLossScaler(1024.0))
    trainer = fit(Nothing, plugin, callbacks=[monitor])
    assert plugin.num_steps == monitor.history.num_attempted == 8 - len(nothing)
    assert {record.scale for record in monitor.history} == {1024.0}
    assert_same(trainer, fit(Nothing))


# -- 64: no copy of the parameters -------------------------------------------------------------------------------------


class Plain(torch.optim.Optimizer):
    """An optimizer that is not torch's, as Lion is."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.during = sum(t.numel() for t in gc.get_objects() if isinstance(t, Tensor) and t.numel() == 90_000)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.1)
        return loss


class Perturbs(Plain):
    """Moves the weights before it calls its closure, and puts them back."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"]]
        torch._foreach_add_(params, 0.25)
        with torch.enable_grad():
            loss = closure()
        torch._foreach_sub_(params, 0.25)
        torch._foreach_sub_(params, [0.1 * p.grad for p in params])
        return loss


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_first_step_of_a_foreign_optimizer_copies_no_parameters(precision: str) -> None:
    class Wide(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(300, 300, bias=False)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(batch).float().square().mean()

        def configure_optimizers(self) -> Any:
            return Plain(self.parameters())

    gc.collect()
    trainer = quiet_trainer(
        plugins=[AmpPrecision(precision, scaler=64.0 if precision == "fp16" else None)], max_epochs=1
    )
    trainer.fit(Wide(), loader(2, 300, 1))
    assert trainer.optimizers[0].during == 2 * 90_000  # the weight and its gradient


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("fused", [False, True])
def test_weights_that_a_hook_moves_before_a_skipped_step_are_restored(precision: str, fused: bool) -> None:
    """Torch calls the hook after a step only if there was one."""
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), 0.0, fused=fused)
    optimizer.register_step_pre_hook(lambda *_: move(1.0))
    optimizer.register_step_post_hook(lambda *_: move(-1.0))

    def move(by: float) -> None:
        with torch.no_grad():
            layer.weight.add_(by)

    steps = ScaledSteps(8.0 if precision == "fp16" else None, [optimizer])
    before = layer.weight.detach().clone()
    for factor in (1.0, float("nan"), 1.0):
        optimizer.zero_grad()
        steps.step(optimizer, lambda factor=factor: steps.backward((layer(torch.ones(2)) * factor).sum()))
    assert steps.num_skipped == 1
    torch.testing.assert_close(layer.weight.detach(), before)


class NotTorchs:
    """What Lightning calls `Optimizable`, without the attributes of torch's `Optimizer`."""

    def __init__(self, params: Any) -> None:
        inner = torch.optim.SGD(params, 0.1)
        self.step, self.zero_grad = inner.step, inner.zero_grad
        self.state_dict, self.load_state_dict = inner.state_dict, inner.load_state_dict
        self.defaults, self.param_groups, self.state = {}, inner.param_groups, inner.state


def test_an_optimizer_needs_no_attributes_of_torchs() -> None:
    kinds: list[Any] = [NotTorchs, lambda params: torch.optim.SGD(params, 0.1)]
    ours, torchs = (fit(lambda kind=kind: Toy(kind), AmpPrecision("fp16", scaler=8.0)) for kind in kinds)
    assert_same(ours.lightning_module.state_dict(), torchs.lightning_module.state_dict())


def test_a_parameter_that_stands_twice_in_a_group_is_refused() -> None:
    layer = nn.Linear(2, 1)
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = torch.optim.SGD([*layer.parameters(), layer.weight], 0.1)
    loss = layer(torch.ones(2)).sum()
    ScaledSteps(None, [optimizer]).backward(loss)
    with pytest.raises(ValueError, match="Pass each parameter once"):
        ScaledSteps(8.0, [optimizer]).backward(loss)


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("scaler", [None, 8.0])
@pytest.mark.parametrize("bad", [0, 1])
def test_an_optimizer_that_moves_before_its_closure_is_protected(bad: int, scaler: float | None) -> None:
    layer = nn.Linear(2, 1)
    optimizer = Perturbs(layer.parameters())
    steps = ScaledSteps(scaler, [optimizer])
    before: list[Tensor] = []
    for i in range(bad + 1):
        before = [p.detach().clone() for p in layer.parameters()]

        def closure(i: int = i) -> Tensor:
            optimizer.zero_grad()
            loss = layer(torch.ones(1, 2)).sum() * (torch.inf if i == bad else 1.0)
            steps.backward(loss)
            return loss

        steps.step(optimizer, closure)
    assert steps.num_skipped == 1
    assert_same([p.detach() for p in layer.parameters()], before)


# -- 69: optimizers made anew, defaults of a LightningCLI, float64 norms -----------------------------------------------


def test_optimizers_made_anew_move_the_scale_and_are_not_kept() -> None:
    layer = nn.Linear(2, 1)
    steps = ScaledSteps(DynamicLossScaler(4.0, growth_interval=1))
    made: list[weakref.ref[Any]] = []  # all but the last one are gone
    for _ in range(6):
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        made.append(weakref.ref(optimizer))
        steps.backward(layer(torch.ones(1, 2)).sum())
        steps.step(optimizer)
        optimizer.zero_grad()
    steps.flush()
    assert steps.scaler is not None
    assert steps.scaler.get_scale() == 4.0 * 2**6
    gc.collect()
    assert [each() for each in made[:-1]] == [None] * 5


def test_defaults_that_a_cli_passes_do_not_override_a_checkpoint() -> None:
    """A LightningCLI passes all arguments, given and default ones alike."""
    saved = DynamicLossScaler(growth_interval=100, hysteresis=2)
    saved.scale(torch.ones(()))
    defaults = {name: p.default for name, p in inspect.signature(DynamicLossScaler).parameters.items()}
    scaler = DynamicLossScaler(**{**defaults, "hysteresis": 3})
    scaler.load_state_dict(saved.state_dict())
    assert (scaler.get_growth_interval(), scaler.hysteresis) == (100, 3)


@pytest.mark.parametrize("optimizer", ["plain", "fused"])
def test_the_norm_of_float64_gradients_is_float64(optimizer: str) -> None:
    class Double(Toy):
        def __init__(self) -> None:
            super().__init__(lambda params: torch.optim.SGD(params, lr=0.05, fused=optimizer == "fused"))
            self.double()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return (self.net(batch.double()) * 1e3).square().mean()

    plugin = WithoutAutocast("fp16", scaler=1024.0)
    ours = fit(Double, plugin, gradient_clip_val=0.1)
    torch.testing.assert_close(
        dict(ours.lightning_module.state_dict()),
        dict(fit(Double, gradient_clip_val=0.1).lightning_module.state_dict()),
        rtol=1e-14,
        atol=1e-15,
    )
