"""Rows 4 and 36: a loop may call the methods of the plugin's scaler, which do what the plugin does."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from support import (
    DEVICE,
    FEATURES,
    Poison,
    Toy,
    WithoutAutocast,
    assert_same,
    batches,
    fit,
    weights,
)
from support.promises import OPTIMIZERS, plain_adamw, plain_sgd
from torch import Tensor, nn

from lightning_amp import AmpPrecision, DynamicLossScaler
from lightning_amp.precision import unscale_


class OwnScaler(torch.amp.GradScaler):
    """A user's own scaler, of which the plugin uses the policy only."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        raise AssertionError("the plugin unscales")

    def update(self, new_scale: float | Tensor | None = None) -> None:
        super().update(new_scale)


SCALERS: dict[str, Callable[[], Any]] = {
    "dynamic": lambda: DynamicLossScaler(2.0**10, growth_interval=2),
    "torch's": lambda: torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2),
    "a subclass of torch's": lambda: OwnScaler("cpu", init_scale=2.0**10, growth_interval=2),
    "static": lambda: 2.0**10,
}
WAYS: dict[str, Callable[[L.Trainer], Any]] = {
    "trainer": lambda trainer: trainer.scaler,
    "plugin": lambda trainer: getattr(trainer.precision_plugin, "scaler", None),
    "strategy": lambda trainer: getattr(trainer.strategy.precision_plugin, "scaler", None),
}


def scaled(scaler: Any = 2.0**10) -> AmpPrecision:
    return WithoutAutocast("fp16", scaler=scaler)


class Manual(Toy):
    """Runs `step`, which gets the scaler if it is to call it by hand, else `None`."""

    def __init__(self, step: Any, optimizer: Any = plain_sgd, by_hand: bool = True, way: str = "plugin") -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False
        self.step, self.by_hand, self.way = step, by_hand, way
        self.norms: list[Tensor] = []
        self.scales: list[float] = []

    def clip(self) -> None:
        self.norms.append(nn.utils.clip_grad_norm_(self.parameters(), 0.2).detach())

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.index = batch_idx
        self.optimizers().zero_grad()
        self.step(self, batch, WAYS[self.way](self.trainer) if self.by_hand else None)
        plugin = self.trainer.precision_plugin
        if isinstance(plugin, AmpPrecision):
            self.scales.append(plugin.scaler.get_scale())  # pyright: ignore[reportOptionalMemberAccess]

    def backward_of(self, loss: Tensor, scaler: Any) -> None:
        self.manual_backward(loss) if scaler is None else scaler.scale(loss).backward()


def with_and_without(make: Callable[[bool], Toy], scaler: Callable[[], Any] = lambda: 2.0**10) -> list[L.Trainer]:
    """Fit a module that calls the scaler by hand, and one that does not."""
    return [fit(functools.partial(make, by_hand), scaled(scaler())) for by_hand in (True, False)]


# -- `unscale_` ----------------------------------------------------------------------------------


def unscales(of: Callable[[Any], Any]) -> Callable[[Any, Tensor, Any], None]:
    def step(module: Any, batch: Tensor, scaler: Any) -> None:
        module.manual_backward(module.loss(batch))
        if module.index == 3 and isinstance(module.trainer.precision_plugin, AmpPrecision):
            module.net[0].weight.grad[0] = torch.inf
        if scaler is None:
            unscale_(module.trainer, module.optimizers())
        else:
            scaler.unscale_(of(module.optimizers()))
            scaler.unscale_(of(module.optimizers()))  # as often as one likes
        module.clip()
        module.optimizers().step()

    return step


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize(
    ("scaler", "way"), [*((scaler, "plugin") for scaler in SCALERS), *(("dynamic", w) for w in WAYS)]
)
@pytest.mark.parametrize("of", [lambda o: o, lambda o: o.optimizer], ids=["lightning's", "inner"])
def test_unscale_is_that_of_the_plugin(scaler: str, way: str, of: Callable[[Any], Any]) -> None:
    runs = with_and_without(lambda by_hand: Manual(unscales(of), by_hand=by_hand, way=way), SCALERS[scaler])
    (a, b), (one, other) = runs, [run.precision_plugin for run in runs]
    assert_same(a, b)
    assert_same(a.lightning_module.norms, b.lightning_module.norms)
    assert a.lightning_module.scales == b.lightning_module.scales
    assert (one.num_steps, one.num_skipped, one.last_step) == (other.num_steps, other.num_skipped, other.last_step)
    assert (one.num_steps, one.num_skipped) == (7, 1)
    assert scaler == "static" or len(set(a.lightning_module.scales)) > 1


class Automatic(Toy):
    """Unscales by hand in one hook."""

    def __init__(self, where: str, by_hand: bool = True, optimizer: Any = plain_sgd) -> None:
        super().__init__(optimizer)
        self.where, self.by_hand = where, by_hand
        self.norms: list[Tensor] = []

    def unscale(self, where: str, optimizer: Any) -> None:
        if where != self.where:
            return
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is not None and self.by_hand:
            scaler.unscale_(optimizer)
        else:
            unscale_(self.trainer, optimizer)
        self.norms.append(nn.utils.clip_grad_norm_(self.parameters(), 0.2).detach())

    def on_after_backward(self) -> None:
        self.unscale("after the backward", self.optimizers())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.unscale("before the step", optimizer)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.unscale("clipping", optimizer)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self.where != "the step":
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            return
        optimizer_closure()
        self.unscale("the step", optimizer)
        optimizer.step()


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("optimizer", ["sgd", "fused adamw"])
@pytest.mark.parametrize("where", ["after the backward", "before the step", "clipping", "the step"])
def test_unscale_in_the_hooks_of_automatic_optimization(where: str, optimizer: str) -> None:
    make = OPTIMIZERS[optimizer]
    reference = fit(lambda: Automatic(where, optimizer=make))
    for run in with_and_without(lambda by_hand: Automatic(where, by_hand, make)):
        assert_same(run, reference)
        assert_same(run.lightning_module.norms, reference.lightning_module.norms)
        assert run.precision_plugin.num_steps == len(run.lightning_module.norms) == 8


# -- the whole recipe ----------------------------------------------------------------------------


def recipe(module: Any, batch: Tensor, scaler: Any) -> None:
    module.backward_of(module.loss(batch), scaler)
    optimizer = module.optimizers()
    if scaler is None:
        unscale_(module.trainer, optimizer)
        module.clip()
        optimizer.step()
    else:
        scaler.unscale_(optimizer.optimizer)
        module.clip()
        scaler.step(optimizer.optimizer)
        scaler.update()


def without_unscaling(module: Any, batch: Tensor, scaler: Any) -> None:
    module.backward_of(module.loss(batch), scaler)
    module.optimizers().step() if scaler is None else scaler.step(module.optimizers())


def half_of_it(module: Any, batch: Tensor, scaler: Any) -> None:
    module.backward_of(module.loss(batch), scaler)
    module.optimizers().step()


def update_alone(module: Any, batch: Tensor, scaler: Any) -> None:
    module.manual_backward(module.loss(batch))
    module.optimizers().step()
    if scaler is not None:
        scaler.update()


def accumulates(module: Any, batch: Tensor, scaler: Any) -> None:
    """Before the user's backward adds to them, all earlier gradients are brought to its scale."""
    module.backward_of(module.loss(batch), scaler)
    unscale_(module.trainer, module.optimizers())
    module.backward_of(module.loss(batch * 2), scaler)
    module.manual_backward(module.loss(batch * 3))
    module.backward_of(module.loss(batch * 4), scaler)
    module.optimizers().step()


def several_losses(module: Any, batch: Tensor, scaler: Any) -> None:
    losses = [module.loss(batch), module.loss(batch * 2)]
    if scaler is None:
        module.manual_backward(losses[0] + losses[1])
    else:
        one, (two,) = scaler.scale(loss for loss in (losses[0], [losses[1]]))
        (one + two).backward()
    module.optimizers().step()


RECIPES = [recipe, without_unscaling, half_of_it, update_alone, accumulates, several_losses]


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize(
    ("scaler", "optimizer"),
    [*((scaler, "sgd") for scaler in SCALERS), ("dynamic", "fused adamw"), ("torch's", "adamw")],
)
@pytest.mark.parametrize("step", RECIPES)
def test_torchs_recipe_equals_fp32(step: Any, optimizer: str, scaler: str) -> None:
    make, plugin = functools.partial(Manual, step, OPTIMIZERS[optimizer]), scaled(SCALERS[scaler]())
    trainer, reference = fit(make, plugin), fit(make)
    assert_same(trainer, reference)
    assert_same(trainer.lightning_module.norms, reference.lightning_module.norms)
    assert trainer.global_step == reference.global_step == plugin.num_steps == 8
    assert plugin.scaler.get_scale() == 2.0 ** (10 if scaler == "static" else 14)  # pyright: ignore


@pytest.mark.parametrize("step", [recipe, without_unscaling, half_of_it])
def test_with_autocast_it_equals_the_plugins_own(step: Any) -> None:
    make = lambda by_hand: fit(lambda: Manual(step, by_hand=by_hand), AmpPrecision("fp16", scaler=1024.0))  # noqa: E731
    assert_same(make(True), make(False))


class Overflows(Manual):
    def backward_of(self, loss: Tensor, scaler: Any) -> None:
        super().backward_of(loss, scaler)
        if self.index == 2:
            self.net[0].weight.grad[0] = torch.inf  # pyright: ignore


@pytest.mark.parametrize("scaler", ["dynamic", "torch's"])
@pytest.mark.parametrize("step", [recipe, without_unscaling])
def test_a_step_by_hand_is_skipped_as_any_other(step: Any, scaler: str) -> None:
    runs = with_and_without(lambda by_hand: Overflows(step, plain_adamw, by_hand), SCALERS[scaler])
    assert_same(*runs)
    one, other = (run.precision_plugin for run in runs)
    assert (one.num_skipped, one.scaler.get_scale()) == (other.num_skipped, other.scaler.get_scale()) == (1, 2.0**12)


def only_if_finite(module: Any, batch: Tensor, scaler: Any) -> None:
    """Leave out the step, not only its effect, if the norm is not finite."""
    module.backward_of(module.loss(batch), scaler)
    optimizer = module.optimizers() if scaler is None else module.optimizers().optimizer
    unscale_(module.trainer, optimizer) if scaler is None else scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(module.parameters(), 0.2)
    if scaler is None:
        optimizer.step()
        return
    if norm.isfinite():
        scaler.step(optimizer)
    scaler.update()


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("scaler", ["dynamic", "torch's"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_that_the_loop_leaves_out_lowers_the_scale(optimizer: str, scaler: str) -> None:
    """With Lightning's own plugin it does, too: `update` reads what `unscale_` found."""
    runs = with_and_without(lambda by_hand: Overflows(only_if_finite, OPTIMIZERS[optimizer], by_hand), SCALERS[scaler])
    assert_same(*runs)
    one, other = (run.precision_plugin for run in runs)
    assert (one.num_steps, one.num_skipped) == (other.num_steps, other.num_skipped) == (7, 1)
    assert one.scaler.get_scale() == other.scaler.get_scale()
    stock = MixedPrecision("16-mixed", DEVICE, SCALERS["torch's"]())
    stock.forward_context = contextlib.nullcontext  # type: ignore[method-assign]
    module = fit(lambda: Overflows(only_if_finite, OPTIMIZERS[optimizer]), stock).lightning_module
    assert stock.scaler is not None
    assert stock.scaler.get_scale() == one.scaler.get_scale()
    assert_same(weights(module), weights(runs[0].lightning_module))


@pytest.mark.usefixtures("where_flags_live")
def test_the_scale_tells_of_a_skip_after_update() -> None:
    """This is the usual way to step a schedule only if the optimizer did."""
    skipped: list[bool] = []

    def step(module: Any, batch: Tensor, scaler: Any) -> None:
        before = scaler.get_scale()
        recipe(module, batch, scaler)
        skipped.append(scaler.get_scale() < before)

    fit(lambda: Overflows(step), scaled(DynamicLossScaler()))
    assert skipped == [False, False, True, False, False, False, False, False]


def test_a_loss_that_is_not_finite_keeps_the_scale() -> None:
    """The plugin knows the loss of a backward by hand too."""
    plugin = scaled(DynamicLossScaler())
    fit(lambda: Manual(recipe), plugin, callbacks=[Poison(loss=[7])])
    assert plugin.last_step is not None
    assert plugin.last_step.reason == "loss"
    assert plugin.scaler.get_scale() == 2.0**16  # pyright: ignore[reportOptionalMemberAccess]


# -- what cannot be right ------------------------------------------------------------------------


def scales_twice(module: Any, batch: Tensor, scaler: Any) -> None:
    module.manual_backward(scaler.scale(module.loss(batch)) / 2)
    module.optimizers().step()


class ScalesTwice(Toy):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.trainer.precision_plugin.scaler.scale(self.loss(batch))  # pyright: ignore


@pytest.mark.parametrize(
    ("make", "fix"),
    [
        (lambda: Manual(scales_twice), r"Call `self.manual_backward\(loss\)`.*without `scaler"),
        (ScalesTwice, "return `loss` from `training_step`"),
    ],
    ids=["manual", "automatic"],
)
def test_a_loss_that_is_scaled_twice_is_an_error(make: Any, fix: str) -> None:
    module = make()
    before = weights(module)
    with pytest.raises(RuntimeError, match=f"loss scale twice.*{fix}"):
        fit(module, scaled())
    assert_same(module, before)


def test_a_plugin_whose_step_calls_the_scaler_is_told() -> None:
    class AsLightnings(WithoutAutocast):
        def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
            closure()
            assert self.scaler is not None
            return self.scaler.step(optimizer)

    with pytest.raises(RuntimeError, match=r"inside of a step of `SGD`.*call `super\(\).optimizer_step"):
        fit(Toy, AsLightnings("fp16", scaler=1024.0))


# -- what goes on as it was ----------------------------------------------------------------------


def penalty(module: Any, batch: Tensor, scaler: Any) -> None:
    """Follow torch's recipe for a gradient penalty: the user divides `torch.autograd.grad` of a scaled loss."""
    batch = batch.clone().requires_grad_()
    loss = module.loss(batch)
    factor = 1.0 if scaler is None else scaler.get_scale()
    outputs = loss if scaler is None else scaler.scale(loss)
    inputs = [batch, *module.net.parameters()] if module.index % 2 else batch
    gradients = torch.autograd.grad(outputs, inputs, create_graph=True)
    module.manual_backward(loss + 0.01 * sum((g / factor).square().sum() for g in gradients))
    module.optimizers().step()


@pytest.mark.parametrize("scaler", SCALERS)
def test_torchs_gradient_penalty(scaler: str) -> None:
    plugin = scaled(SCALERS[scaler]())
    assert_same(fit(lambda: Manual(penalty), plugin), fit(lambda: Manual(penalty)))
    assert plugin.num_steps == 8


def test_differentiating_a_scaled_loss_leaves_gradients_alone() -> None:
    seen: list[Tensor] = []

    def step(module: Any, batch: Tensor, scaler: Any) -> None:
        module.manual_backward(module.loss(batch))
        unscale_(module.trainer, module.optimizers())
        if scaler is not None:
            torch.autograd.grad(scaler.scale(module.loss(batch)), module.net[0].weight)
        seen.append(module.net[0].weight.grad.clone())
        module.optimizers().step()

    fit(lambda: Manual(step), scaled())
    by_hand, seen = seen, []
    fit(lambda: Manual(step))
    assert_same(by_hand, seen)


def sets_the_scale(module: Any, batch: Tensor, scaler: Any) -> None:
    module.manual_backward(module.loss(batch))
    if scaler is not None:
        scaler.update(2.0 ** (4 * (module.index % 3)))  # between a backward and its step
    module.optimizers().step()


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scaler", ["dynamic", "torch's"])
def test_a_scale_that_is_set_by_hand(scaler: str, optimizer: str) -> None:
    """Earlier gradients keep their scale, although torch's `update` overwrites it in place."""
    make = OPTIMIZERS[optimizer]
    trainer = fit(lambda: Manual(sets_the_scale, make), scaled(SCALERS[scaler]()))
    assert_same(trainer, fit(lambda: Manual(sets_the_scale, make)))
    plugin = trainer.precision_plugin
    assert plugin.last_step.scale == 1.0
    assert plugin.last_step.next_scale == plugin.scaler.get_scale()


def test_steps_before_do_not_move_a_scale_that_is_set() -> None:
    def step(module: Any, batch: Tensor, scaler: Any) -> None:
        module.manual_backward(module.loss(batch))
        module.optimizers().step()
        scaler.update(32.0)

    plugin = scaled(DynamicLossScaler(growth_interval=1))
    fit(lambda: Manual(step), plugin)
    assert plugin.scaler.get_scale() == 32.0  # pyright: ignore[reportOptionalMemberAccess]
    assert plugin.last_step is not None
    assert plugin.last_step.next_scale == 32.0


class Unknown(Manual):
    """Has an optimizer that Lightning does not know, of its own weights or of weights outside of it."""

    def __init__(self, by_hand: bool, inside: bool) -> None:
        super().__init__(lambda *_: None, by_hand=by_hand)
        self.outside = [nn.Linear(FEATURES, 1).to(DEVICE)]
        mine = self.net.parameters() if inside else self.outside[0].parameters()
        self.mine = [torch.optim.SGD(mine, lr=0.05)]
        self.inside = inside

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.mine[0]
        optimizer.zero_grad()
        loss = self.loss(batch) if self.inside else self.outside[0](batch).square().mean()
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.parametrize("inside", [True, False])
def test_an_optimizer_that_lightning_does_not_know(inside: bool) -> None:
    plugin = scaled(DynamicLossScaler(2.0**10, growth_interval=3))
    trainer, reference = fit(lambda: Unknown(True, inside), plugin), fit(lambda: Unknown(False, inside))
    assert_same(trainer, reference)
    assert_same(trainer.lightning_module.outside[0], reference.lightning_module.outside[0])
    assert plugin.num_steps == 8


class Twice(Manual):
    """Steps two optimizers by hand, and moves the scale once for both."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__(lambda *_: None, by_hand=by_hand)
        self.other = nn.Linear(FEATURES, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        for optimizer, loss in zip(
            self.optimizers(), (self.loss(batch), self.other(batch).square().mean()), strict=True
        ):
            optimizer.zero_grad()
            self.backward_of(loss, scaler)
            optimizer.step() if scaler is None else scaler.step(optimizer.optimizer)
        if scaler is not None:
            scaler.update()

    def configure_optimizers(self) -> Any:
        return plain_adamw(self.net.parameters()), plain_sgd(self.other.parameters())


def test_two_optimizers() -> None:
    plugin = scaled(DynamicLossScaler(2.0**10, growth_interval=4))
    trainer = fit(lambda: Twice(True), plugin)
    assert_same(trainer, fit(lambda: Twice(False)))
    assert trainer.global_step == plugin.num_steps == 16
    assert plugin.scaler.get_scale() == 2.0**12  # pyright: ignore[reportOptionalMemberAccess]


# -- the scaler is the user's --------------------------------------------------------------------


class Look(L.Callback):
    """Copies the scaler in the middle of a fit, and may end the fit."""

    def __init__(self, crash: bool = False) -> None:
        self.crash = crash
        self.copies: list[Any] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        scaler = trainer.precision_plugin.scaler  # pyright: ignore
        assert {"scale", "unscale_", "step", "update"} <= vars(scaler).keys()
        self.copies += [copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))]
        if self.crash:
            raise KeyError("crash")


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("scaler", ["dynamic", "torch's"])
def test_the_scaler_is_as_it_was(scaler: str, crash: bool) -> None:
    own = SCALERS[scaler]()
    before = set(vars(own))
    look = Look(crash)
    try:
        fit(Toy, scaled(own), batches(2), callbacks=[look])
    except KeyError:
        assert crash
    assert set(vars(own)) == before
    for other in (own, *look.copies):
        loop_in_torch(other)


def loop_in_torch(scaler: torch.amp.GradScaler) -> None:
    """Train without a Trainer, by torch's own rules."""
    weight = nn.Parameter(torch.ones(2, device=DEVICE))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        torch.amp.GradScaler.unscale_(scaler, optimizer)
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, 1.0]
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.5, 0.5]


def test_without_a_call_nothing_is_added_to_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin's own backward multiplies by the scaler's own `scale`, which adds no hook."""
    hooked: list[Tensor] = []
    register_hook = Tensor.register_hook

    def noted(tensor: Tensor, hook: Any) -> Any:
        if not tensor.is_leaf:  # parameters are watched in any case
            hooked.append(tensor)
        return register_hook(tensor, hook)

    monkeypatch.setattr(Tensor, "register_hook", noted)
    fit(Toy, scaled(DynamicLossScaler()))
    assert hooked == []
    fit(lambda: Manual(half_of_it), scaled(DynamicLossScaler()))
    assert len(hooked) == 8


class Normalised(Overflows):
    """Has running statistics. A skipped step restores them for both batches of a window."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__(without_unscaling, by_hand=by_hand)
        self.net.insert(1, nn.BatchNorm1d(16))  # pyright: ignore

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.index = batch_idx
        scaler = WAYS["plugin"](self.trainer) if self.by_hand else None
        self.backward_of(self.loss(batch), scaler)
        if batch_idx % 2:
            optimizer = self.optimizers()
            optimizer.step() if scaler is None else scaler.step(optimizer)
            optimizer.zero_grad()


def test_a_skipped_step_by_hand_leaves_no_trace_in_statistics() -> None:
    runs = with_and_without(Normalised)
    assert_same(*runs)
    assert [int(run.lightning_module.net[1].num_batches_tracked) for run in runs] == [6, 6]


def test_a_scale_below_one_that_is_set_by_hand_is_known() -> None:
    """The scaled gradient is finite and the true one is not."""

    def step(module: Any, batch: Tensor, scaler: Any) -> None:
        scaler.update(2.0**-10)
        bias = module.net[0].bias
        module.manual_backward(((bias - bias.detach()) * 2e19 * 2e19).sum())
        assert bias.grad.isfinite().all()
        module.optimizers().step()

    trainer = fit(lambda: Manual(step), scaled(DynamicLossScaler()), batches(1))
    assert trainer.precision_plugin.num_skipped == 1
    assert all(value.isfinite().all() for value in weights(trainer).values())
