"""Rows 3, 4, 5, 7, 9, 10, 16: any order of backward, unscale, clip and step gives the same result as in fp32.

Autocast is off and scales are powers of two, so the same result means the same bits, for the parameters and for the
gradients that hooks saw.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from support import (
    DEVICE,
    FEATURES,
    Manual,
    Poison,
    Records,
    Toy,
    WithoutAutocast,
    assert_as_fp32,
    assert_finite,
    assert_same,
    batches,
    fit,
    weights,
)
from support.promises import DIFFERS, OPTIMIZERS, PLAIN_AND_FUSED, Plugins, fused_adamw, plain_adamw, plain_sgd, promise
from torch import Tensor, nn

from lightning_amp import AmpPrecision
from lightning_amp.precision import unscale_


class Two(L.LightningModule):
    """Two optimizers over two nets; the test gives the order of the calls: one of `ORDERS`, or a function."""

    def __init__(self, order: Any, optimizer: str = "adamw", shared: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b = nn.Linear(FEATURES, 4), nn.Linear(4, 1)
        self.order, self.optimizer, self.shared = order, optimizer, shared
        self.seen: list[list[Tensor]] = []

    def losses(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.a(batch)
        return (hidden**2).mean() * 3, (self.b(hidden) - batch.sum(1, keepdim=True)).pow(2).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.index = batch_idx
        if callable(self.order):
            self.order(self, batch)
            return
        for call in ORDERS[self.order].split(", "):
            verb, which, _, every = (*call.split(), "in", "1")[:4]
            if (batch_idx + 1) % int(every) == 0:
                getattr(self, verb)(which, batch)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self.seen.append([p.grad.clone() for p in params if p.grad is not None])

    def configure_optimizers(self) -> Any:
        make = OPTIMIZERS[self.optimizer]
        both = itertools.chain(self.a.parameters(), self.b.parameters())
        return [make(self.a.parameters()), make(both if self.shared else self.b.parameters())]

    # -- the verbs of an order

    def of(self, which: str) -> Any:
        return self.optimizers()[int(which) - 1]

    def zero(self, which: str, batch: Tensor) -> None:
        self.of(which).zero_grad()

    def backward_of(self, which: str, batch: Tensor) -> None:
        losses = self.losses(batch)
        if which == "both":
            self.manual_backward(losses[0], retain_graph=True)
        self.manual_backward(losses[which != "1"])

    def step(self, which: str, batch: Tensor) -> None:
        self.of(which).step()

    def clip(self, which: str, batch: Tensor) -> None:
        self.clip_gradients(self.of(which), gradient_clip_val=0.3, gradient_clip_algorithm="norm")

    def clamp(self, which: str, batch: Tensor) -> None:
        self.clip_gradients(self.of(which), gradient_clip_val=0.1, gradient_clip_algorithm="value")

    def closure(self, which: str, batch: Tensor) -> None:
        def closure() -> Tensor:
            self.zero(which, batch)
            loss = self.losses(batch)[int(which) - 1]
            self.manual_backward(loss)
            return loss

        self.of(which).step(closure=closure)


ORDERS = {
    "one after the other": "zero 1, backward_of 1, step 1, zero 2, backward_of 2, step 2",
    "backwards first": "zero 1, zero 2, backward_of both, step 1, step 2",
    "backwards first, reversed": "zero 1, zero 2, backward_of both, step 2, step 1",
    "one twice": "zero 1, backward_of 1, step 1, zero 1, backward_of 1, step 1, zero 2, backward_of 2, step 2",
    "a step without a backward": "zero 1, zero 2, backward_of 2, step 1, step 1, step 2",
    "never zeroed": "backward_of 1, step 1, backward_of 2, step 2",
    # the second backward leaves gradients in the first net, which only the next batch zeroes
    "leftovers of a GAN": "backward_of 1, step 1, zero 1, backward_of 2, step 2, zero 2",
    "two accumulates": "zero 1, backward_of both, step 1, step 2 in 3, zero 2 in 3",
    "closures": "closure 1, closure 2",
    "clipped": "zero 1, backward_of 1, clip 1, step 1, zero 2, backward_of 2, clip 2, step 2",
    "clipped by value": "zero 1, backward_of 1, clamp 1, step 1, zero 2, backward_of 2, clamp 2, step 2",
    # clipping twice is the same as clipping once
    "clipped, then accumulated": "backward_of 2, clip 1, clip 1, step 1 in 2, zero 1 in 2, step 2 in 2, zero 2 in 2",
}
"""Find calls by name; "step 2 in 3" runs in each third batch."""


def by_torchs_recipe(m: Two, batch: Tensor) -> None:
    """Scale and unscale by the plugin's scaler, as in a loop without a Trainer; steps are the plugin's."""
    scaler = getattr(m.trainer.precision_plugin, "scaler", None)
    for optimizer, loss in zip(m.optimizers(), m.losses(batch), strict=True):
        optimizer.zero_grad()
        (loss if scaler is None else scaler.scale(loss)).backward(retain_graph=True)
    for optimizer in m.optimizers():
        if scaler is not None:
            scaler.unscale_(optimizer.optimizer)
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
        optimizer.step()


def unscale_by_scaler_then_accumulate(m: Two, batch: Tensor) -> None:
    scaler = getattr(m.trainer.precision_plugin, "scaler", None)
    one, two = m.optimizers()
    for loss in m.losses(batch):
        (loss if scaler is None else scaler.scale(loss)).backward(retain_graph=True)
        for optimizer in (one, two.optimizer, one.optimizer) if scaler is not None else ():
            scaler.unscale_(optimizer)
    one.step()
    two.step()


ALL_ORDERS = [*ORDERS, by_torchs_recipe, unscale_by_scaler_then_accumulate]
FAILS = f"{DIFFERS}|unscale_|already been called|inf checks|gradient clipping|closure|List"


def two(order: Any, optimizer: str = "adamw", shared: bool = False, kind: type[Two] = Two) -> Two:
    """Set the same weights each time."""
    torch.manual_seed(1)
    return kind(order, optimizer, shared)


@functools.cache
def in_fp32(order: Any, optimizer: str, shared: bool = False) -> tuple[dict[str, Tensor], Any]:
    """Return the weights, and the gradients that hooks saw."""
    module = two(order, optimizer, shared)
    fit(module)
    return weights(module), module.seen


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize(("optimizer", "shared", "growth_interval"), [("sgd", False, 2), ("fused adamw", True, 1000)])
@pytest.mark.parametrize("order", ALL_ORDERS)
@pytest.mark.few(19)
def test_every_order_equals_fp32(order: Any, optimizer: str, shared: bool, growth_interval: int) -> None:
    plugin = Plugins(True).scaled(growth_interval=growth_interval)
    reference, seen = in_fp32(order, optimizer, shared)
    module = two(order, optimizer, shared)
    assert_same(fit(module, plugin), reference)
    assert_same(module.seen, seen)
    assert plugin.num_skipped == 0
    if " in " in str(ORDERS.get(order)):
        grown = plugin.scaler.get_scale() > 2.0**10  # fewer batches have a step
        assert grown == (growth_interval == 2)
    else:
        assert plugin.scaler.get_scale() == 2.0 ** (10 + 8 // growth_interval)  # once per batch, not per step


def assert_two_as_fp32(plugins: Plugins, order: Any, optimizer: str = "adamw", **scaler: Any) -> None:
    """Return the weights, and the gradients that hooks saw."""
    reference, seen = in_fp32(order, optimizer)
    module = two(order, optimizer)
    assert_same(fit(module, plugins.scaled(**scaler)), reference)
    assert_same(module.seen, seen)


@pytest.mark.parametrize("order", ["backwards first", "backwards first, reversed", "never zeroed"])
@promise(5, stock=FAILS, raises=(AssertionError, RuntimeError))
def test_two_optimizers(plugins: Plugins, order: str) -> None:
    assert_two_as_fp32(plugins, order, init_scale=1.0, growth_interval=1)


@pytest.mark.parametrize("order", ["clipped", "clipped by value"])
@promise(4, stock=DIFFERS)
def test_the_documented_clipping_recipe(plugins: Plugins, order: str) -> None:
    assert_same(fit(two(order, "sgd"), plugins.scaled()), in_fp32(order, "sgd")[0])


def clip_by_scaler(m: Two, batch: Tensor, *, inner: bool) -> None:
    """The usual workaround for Lightning's #18089."""
    scaler = getattr(m.trainer.precision_plugin, "scaler", None)
    for i, optimizer in enumerate(m.optimizers()):
        optimizer.zero_grad()
        m.manual_backward(m.losses(batch)[i])
        if scaler is not None:
            scaler.unscale_(optimizer.optimizer if inner else optimizer)
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.3)
        optimizer.step()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])  # Lightning's own plugin leaves a fused optimizer alone
@pytest.mark.parametrize("inner", [True, False])
@promise(4, stock=FAILS, raises=(AssertionError, RuntimeError))
def test_clipping_after_the_scalers_own_unscale(plugins: Plugins, inner: bool, optimizer: str) -> None:
    assert_two_as_fp32(plugins, partial(clip_by_scaler, inner=inner), optimizer)


def user_looks(m: Two, batch: Tensor) -> None:
    one, two = m.optimizers()
    plugin = m.trainer.precision_plugin
    one.zero_grad()
    two.zero_grad()
    m.manual_backward(m.losses(batch)[1])
    for optimizer in (one, two, one):
        if isinstance(plugin, AmpPrecision):
            plugin.unscale_(optimizer)
    m.seen.append([p.grad.clone() for p in m.parameters()])
    torch.nn.utils.clip_grad_norm_(m.a.parameters(), 0.2)
    one.step()
    two.step()


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("optimizer", PLAIN_AND_FUSED)
def test_unscale(optimizer: str) -> None:
    assert_two_as_fp32(Plugins(True), user_looks, optimizer)


class WithoutHook(Two):
    on_before_optimizer_step = L.LightningModule.on_before_optimizer_step


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("order", ALL_ORDERS)
@pytest.mark.few(10)
def test_every_order_folded(order: Any) -> None:
    """Without hooks, fused optimizers unscale in their own kernel. Without clipping the bits stay the same."""
    assert_as_fp32(lambda: two(order, "fused adamw", kind=WithoutHook), Plugins(True).scaled(growth_interval=2))


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("order", ORDERS)  # except optimizers whose backward calls no hook
@pytest.mark.parametrize("optimizer", PLAIN_AND_FUSED)
@pytest.mark.few(10)
def test_every_order_survives_an_overflow(order: str, optimizer: str) -> None:
    plugin = Plugins(True).scaled()
    assert_finite(fit(WithoutHook(order, optimizer), plugin, callbacks=[Poison(gradient=[2])]))
    assert plugin.num_skipped >= 1


# -- autocast in manual optimization (row 7) -----------------------------------------------------


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_bad_loss_is_forgotten_with_its_gradients(precision: str) -> None:
    """The second optimizer's loss is NaN in batch 1; this does not affect the first one's next step."""

    class Bad(Two):
        def losses(self, batch: Tensor) -> tuple[Tensor, Tensor]:
            first, second = super().losses(batch)
            return first, second * (torch.nan if self.index == 1 else 1.0)

    records = Records()
    plugin = AmpPrecision(precision, scaler=1024.0 if precision == "fp16" else None)
    fit(lambda: Bad("one after the other"), plugin, limit_train_batches=4, callbacks=[records])
    assert records.reasons == ["none", "none", "none", "loss", "none", "none", "none", "none"]


class Modes(Toy):
    def __init__(self, manual: bool) -> None:
        super().__init__(plain_adamw)
        self.automatic_optimization = not manual
        self.modes: dict[str, bool] = {}

    def note(self, name: str) -> None:
        self.modes[name] = torch.is_autocast_enabled(DEVICE)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.note("forward")
        loss = self.loss(batch)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.note("forward again")
        return None

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.note("backward")
        super().backward(loss, *args, **kwargs)

    def on_before_backward(self, loss: Tensor) -> None:
        self.note("on_before_backward")

    def on_after_backward(self) -> None:
        self.note("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note("on_before_optimizer_step")

    def configure_optimizers(self) -> Any:
        module = self

        class Spy(torch.optim.AdamW):
            def step(self, closure: Any = None) -> Any:
                out = super().step(closure)
                module.note("step")
                return out

        return Spy(self.parameters(), lr=0.01)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@promise(7, stock="assert")
def test_autocast_is_off_outside_the_forward(plugins: Plugins, precision: str) -> None:
    trainer = fit(lambda: Modes(manual=True), getattr(plugins, precision)())
    modes = trainer.lightning_module.modes
    assert {name for name, on in modes.items() if on} == {"forward", "forward again"}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@promise(7, stock=None)
def test_manual_equals_automatic(plugins: Plugins, precision: str) -> None:
    make = getattr(plugins, precision)
    assert_same(fit(lambda: Modes(manual=True), make()), fit(lambda: Modes(manual=False), make()))


def test_no_stale_weights() -> None:
    """A forward after a step in the same training step must use the new weights, not a cached half-precision copy."""

    class UsesWeightsTwice(Manual):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            for _ in range(2):
                super().training_step(batch, batch_idx)
                with torch.no_grad():
                    fresh = nn.functional.linear(batch.bfloat16(), self.net.weight.bfloat16(), self.net.bias.bfloat16())
                    torch.testing.assert_close(self.net(batch), fresh, rtol=0, atol=0)

    fit(lambda: UsesWeightsTwice(plain_sgd, nn.Linear(FEATURES, 1)), AmpPrecision("bf16"))


# -- batches that give nothing (rows 9, 10), exceptions (row 16) --------------------------------


class Nothing(Toy):
    def __init__(self, kind: str, optimizer: Any = plain_adamw) -> None:
        super().__init__(optimizer)
        self.kind = kind
        self.unused = nn.Parameter(torch.ones(1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx != 2:
            return super().training_step(batch, batch_idx)
        return None if self.kind == "none" else torch.zeros((), requires_grad=True)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("optimizer", PLAIN_AND_FUSED)
@pytest.mark.parametrize("kind", ["none", "zero"])
@promise(9, stock="inf checks were recorded|never", raises=AssertionError)
def test_a_batch_without_gradients(plugins: Plugins, kind: str, optimizer: str) -> None:
    if not plugins.ours and (kind == "none" or optimizer.startswith("fused")):
        raise AssertionError("never reached: Lightning keeps this one")
    plugin = plugins.scaled(growth_interval=7)
    assert_as_fp32(lambda: Nothing(kind, OPTIMIZERS[optimizer]), plugin)
    assert plugin.scaler.get_scale() == 2.0**11  # seven batches with gradients; the empty one did not count


class LastIsNone(Toy):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return None if batch_idx % 2 else super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norm = next(self.parameters()).grad.norm()


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("optimizer", PLAIN_AND_FUSED)
@promise(10, stock=DIFFERS)
def test_none_at_the_end_of_a_window(plugins: Plugins, optimizer: str) -> None:
    make = partial(LastIsNone, OPTIMIZERS[optimizer])
    trainer, reference = assert_as_fp32(make, plugins.scaled(), accumulate_grad_batches=2)
    assert_same(trainer.lightning_module.norm, reference.lightning_module.norm)


class ClosureFirst(Toy):
    """An `optimizer_step` that runs the closure itself, reads the gradients, and steps without a closure."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer_closure()
        optimizer.step()


class StepsEverySecondBatch(Toy):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


@pytest.mark.parametrize("optimizer", PLAIN_AND_FUSED)
@promise(10, stock=DIFFERS)
def test_optimizer_step_that_runs_the_closure_first(plugins: Plugins, optimizer: str) -> None:
    assert_as_fp32(lambda: ClosureFirst(OPTIMIZERS[optimizer]), plugins.scaled())


@pytest.mark.parametrize("optimizer", PLAIN_AND_FUSED)
@promise(10, stock=None)
def test_optimizer_step_that_steps_every_second_batch(plugins: Plugins, optimizer: str) -> None:
    assert_as_fp32(lambda: StepsEverySecondBatch(OPTIMIZERS[optimizer]), plugins.scaled())


class CatchesOutOfMemory(Manual):
    """The user catches an error between unscale and step, and continues."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        with contextlib.suppress(MemoryError):
            super().training_step(batch, batch_idx)

    def edit(self, optimizer: Any, batch_idx: int) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.fit_loop.epoch_loop.batch_idx == 3:
            raise MemoryError


@pytest.mark.parametrize("optimizer", PLAIN_AND_FUSED)
@promise(16, stock=f"{DIFFERS}|already been called|does not allow", raises=(AssertionError, RuntimeError))
def test_an_exception_in_the_middle(plugins: Plugins, optimizer: str) -> None:
    plugin = plugins.scaled()
    assert_as_fp32(lambda: CatchesOutOfMemory(OPTIMIZERS[optimizer]), plugin)
    copy.deepcopy(plugin)


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("optimizer", PLAIN_AND_FUSED)
@pytest.mark.parametrize("plugin", [WithoutAutocast, lambda: AmpPrecision("fp32")], ids=["scaled", "fp32"])
def test_an_exception_after_an_overflow_skips_nothing_else(plugin: Callable[[], Any], optimizer: str) -> None:
    made = plugin()
    fit(lambda: CatchesOutOfMemory(OPTIMIZERS[optimizer]), made, callbacks=[Poison(gradient=[3])])
    assert made.num_skipped == 0
    assert made.num_steps == 7  # the eighth raised before its step was decided


# -- clipping in automatic optimization (row 3) ---------------------------------------------------


class SeesNorms(Toy):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms = [*getattr(self, "norms", []), next(self.parameters()).grad.norm()]


class OwnClipping(Toy):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        for p in self.parameters():
            p.grad.clamp_(-0.05, 0.05)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("kind", [Toy, SeesNorms, OwnClipping])
@promise(3, stock=f"{DIFFERS}|does not allow for gradient clipping", raises=(AssertionError, RuntimeError))
def test_clipping_with_fused_optimizers(plugins: Plugins, kind: type[Toy], algorithm: str) -> None:
    folded = kind is Toy and algorithm == "norm"
    trainer, reference = assert_as_fp32(
        lambda: kind(fused_adamw), plugins.scaled(), gradient_clip_val=0.2, gradient_clip_algorithm=algorithm,
        tolerance={"rtol": 1e-5, "atol": 1e-6} if folded else {},
    )  # fmt: skip
    if kind is SeesNorms:
        assert_same(trainer.lightning_module.norms, reference.lightning_module.norms)


@promise(3, stock="does not allow for gradient clipping", raises=RuntimeError, next_stock=None)
def test_clipping_with_fused_optimizers_in_bf16(plugins: Plugins) -> None:
    """Without a scaler there is nothing to unscale. Lightning 2.6 refuses all the same; its next release clips."""
    trainer = fit(lambda: Toy(fused_adamw), plugins.bf16(), gradient_clip_val=0.2)
    unfused = fit(lambda: Toy(plain_adamw), plugins.bf16(), gradient_clip_val=0.2)
    assert_same(trainer, unfused, rtol=1e-3, atol=1e-4)


class TwoGraphs(L.LightningModule):
    """A GAN by hand: the generator's forward comes before the discriminator's step, its backward after it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 1))
        self.discriminator = nn.Linear(1, 1)
        self.hooked: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        fake = self.generator(batch)
        loss = self.discriminator(fake.detach()).float().square().mean()
        first.zero_grad()
        self.manual_backward(loss * torch.inf if batch_idx == 1 else loss)
        first.step()
        second.zero_grad()
        self.manual_backward((self.discriminator(fake).float() - 1).square().mean())
        second.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        second = torch.optim.Adam(self.generator.parameters(), fused=True)
        largest = lambda: float(max(p.grad.abs().max() for p in self.generator.parameters()))  # noqa: E731
        second.register_step_pre_hook(lambda *_: self.hooked.append(largest()))
        return [torch.optim.Adam(self.discriminator.parameters()), second]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_skip_of_one_optimizer_leaves_the_graph_of_the_other_alone(precision: str) -> None:
    """The skip restores the statistics of BatchNorm, which the generator's backward must not take for an edit."""
    plugin = AmpPrecision(precision, scaler=1024.0 if precision == "fp16" else None)
    module = TwoGraphs()
    fit(lambda: module, plugin)
    assert (plugin.num_skipped, plugin.num_steps) == (1, 2 * len(batches()) - 1)
    assert max(module.hooked) < 10, "a hook of a fused optimizer sees true gradients"


class TwoParts(Manual):
    def __init__(self) -> None:
        super().__init__()
        self.beside = nn.Linear(8, 1)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net, self.beside)]


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("steps_beside", [False, True])
def test_weights_that_are_changed_by_hand_with_scaled_gradients_are_noticed(
    unscales: bool, steps_beside: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class ByHand(TwoParts):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            by_hand, beside = self.optimizers()
            self.zero_grad()
            self.manual_backward(self.loss(batch) + self.beside(batch).float().square().mean())
            if unscales:
                unscale_(self.trainer, by_hand)
            with torch.no_grad():
                for parameter in self.net.parameters():
                    parameter.sub_(1e-6 * parameter.grad)
            if steps_beside:
                beside.step()  # otherwise its gradients stay scaled

    with caplog.at_level("INFO"):
        fit(ByHand, AmpPrecision("fp16"))
    assert ("an optimizer never stepped. The gradients of" in caplog.text) is not (unscales and steps_beside)
    caplog.clear()
    fit(ByHand, AmpPrecision("bf16"))
    assert "never stepped" not in caplog.text


def test_an_optimizer_that_had_no_gradients_is_not_noticed(caplog: pytest.LogCaptureFixture) -> None:
    class OneOfTwo(TwoParts):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))
            self.optimizers()[0].step()

    with caplog.at_level("INFO"):
        fit(OneOfTwo, AmpPrecision("fp16"))
    assert "never stepped" not in caplog.text
