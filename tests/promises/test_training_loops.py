"""Rows 6, 11 to 14, 18, 19, 21, 31: closures, odd parameters, stuck scales, compile, anomaly detection."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from support import (
    DEVICE,
    FEATURES,
    Manual,
    Poison,
    Toy,
    WithoutAutocast,
    assert_as_fp32,
    assert_finite,
    assert_same,
    batches,
    fit,
    scaled_fp32,
    weights,
)
from support.devices import Casts
from support.promises import (
    DIFFERS,
    OPTIMIZERS,
    PLAIN_AND_FUSED,
    Plugins,
    fused_adamw,
    plain_sgd,
    promise,
)
from torch import Tensor, nn
from zoo.toy import SAM, Island, TakesNoClosure

from lightning_amp import AmpPrecision

# -- row 11: optimizers that call their closure more than once ------------------------------------


def lbfgs(line_search: str | None) -> Any:
    return lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=4, line_search_fn=line_search)


CLOSURES = {"sam": SAM, "lbfgs": lbfgs(None), "lbfgs, line search": lbfgs("strong_wolfe")}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", CLOSURES)
@promise(11, stock="LBFGS optimizer are not compatible|NoneType|closure", raises=(Exception,))
def test_closure_optimizers(plugins: Plugins, optimizer: str, accumulate: int) -> None:
    assert_as_fp32(lambda: Toy(CLOSURES[optimizer]), plugins.scaled(), accumulate_grad_batches=accumulate)


class ManualClosure(Manual):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("optimizer", CLOSURES)
def test_closure_optimizers_by_hand(optimizer: str) -> None:
    assert_as_fp32(lambda: ManualClosure(CLOSURES[optimizer]), Plugins(True).scaled())


class OverflowInCall(L.Callback):
    """Write inf into the gradients of the n-th closure call of the run."""

    def __init__(self, call: int) -> None:
        self.call, self.calls = call, 0

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.calls == self.call:
            next(pl_module.parameters()).grad.fill_(float("inf"))
        self.calls += 1


@pytest.mark.parametrize("module", [Toy, ManualClosure])
@pytest.mark.parametrize(("optimizer", "call"), [("sam", 1), ("sam", 3), ("lbfgs", 2), ("lbfgs, line search", 1)])
def test_an_overflow_in_a_later_call_leaves_no_trace(module: type[Toy], optimizer: str, call: int) -> None:
    seen: list[Any] = []

    class Look(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
            seen.append((weights(pl_module), trainer.optimizers[0].state_dict()))

        def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
            plugin = trainer.precision_plugin
            if plugin.last_step.skipped:
                assert_same(weights(pl_module), seen[-1][0])
                seen.append("skipped")

    plugin = Plugins(True).scaled()
    trainer = fit(lambda: module(CLOSURES[optimizer]), plugin, callbacks=[OverflowInCall(call), Look()])
    assert plugin.num_skipped == 1
    assert "skipped" in seen
    assert_finite(trainer)


@pytest.mark.parametrize("module", [Toy, Manual])
@promise(11, stock=None)
def test_an_optimizer_that_takes_no_closure(plugins: Plugins, module: type[Toy]) -> None:
    """Lightning keeps this optimizer in fp16, because it has run the closure before it steps."""
    plugin, reference = plugins.scaled(), plugins.scaled()
    trainer = fit(lambda: module(TakesNoClosure), plugin, callbacks=[Poison(gradient=[3])])
    assert_same(trainer, fit(lambda: module(plain_sgd_without_momentum), reference, callbacks=[Poison(gradient=[3])]))
    assert plugin.scaler.get_scale() == reference.scaler.get_scale() == 2.0**9


@pytest.mark.parametrize("module", [Toy, Manual])
@promise(11, stock="unexpected keyword argument 'closure'", raises=TypeError)
def test_an_optimizer_that_takes_no_closure_in_bf16(plugins: Plugins, module: type[Toy]) -> None:
    trainer = fit(lambda: module(TakesNoClosure), plugins.bf16())
    assert_same(trainer, fit(lambda: module(plain_sgd_without_momentum), plugins.bf16()))


def plain_sgd_without_momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


# -- row 6: the scaler cannot destroy a model -----------------------------------------------------


@promise(6, stock="not finite")
def test_a_scale_that_fell_to_zero(plugins: Plugins) -> None:
    """The next healthy batch gives finite gradients times an infinite inverse scale."""
    plugin = plugins.scaled(2.0**-10, backoff_factor=2.0**-140) if not plugins.ours else WithoutAutocast(
        "fp16", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**-10, backoff_factor=2.0**-140)
    )  # fmt: skip
    assert_finite(fit(lambda: Toy(plain_sgd), plugin, batches(3), callbacks=[Poison(gradient=[0])]))


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("optimizer", PLAIN_AND_FUSED)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_gradients_that_leave_the_range_when_divided(optimizer: str, clip: float | None) -> None:
    """The scaled gradients are finite and the scale is below one, so the true gradients are not finite."""
    plugin = Plugins(True).scaled(2.0**-14)
    fit_twice = [Poison(gradient=[0, 1, 2], value=1e36)]
    trainer = fit(lambda: Toy(OPTIMIZERS[optimizer]), plugin, batches(4), callbacks=fit_twice, gradient_clip_val=clip)
    assert_finite(trainer)
    assert plugin.num_skipped == 3


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("kind", ["adamw", "fused adamw"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_large_but_finite_gradients_are_finite(clip: float | None, kind: str) -> None:
    """Their squares are not finite, so the 2-norm tells nothing about them."""
    plugin, runs = AmpPrecision("fp32"), []
    for used in (plugin, None):
        poison = Poison(gradient=[1, 2], value=1e25)
        runs.append(fit(lambda: Toy(OPTIMIZERS[kind]), used, batches(4), callbacks=[poison], gradient_clip_val=clip))
    assert plugin.num_skipped == 0
    torch.testing.assert_close(*map(weights, runs))


@promise(6, stock=DIFFERS)
def test_bad_batches_never_lower_the_scale(plugins: Plugins) -> None:
    plugin = plugins.scaled()
    fit(Toy, plugin, batches(20), callbacks=[Poison(loss=[2, 7, 11])])
    torch.testing.assert_close(plugin.scaler.get_scale(), 2.0**10)


# -- row 12: half-precision losses ----------------------------------------------------------------


class HalfLoss(Toy):
    def loss(self, batch: Tensor) -> Tensor:
        return self.net(batch).mean()


@promise(12, stock="Booleans mismatch|are not equal")
def test_a_half_precision_loss(plugins: Plugins) -> None:
    plugin = plugins.fp16(2.0**16, growth_interval=2)
    with pytest.warns(UserWarning, match="The loss is float16") if plugins.ours else pytest.MonkeyPatch.context():
        fit(HalfLoss, plugin)
    # Lightning's plugin counts nothing; a scale below the one after eight clean steps shows the skips
    torch.testing.assert_close(plugin.num_skipped == 0 if plugins.ours else plugin.scaler.get_scale() == 2.0**20, True)


# -- row 14: odd parameters -----------------------------------------------------------------------


class Odd(Toy):
    def __init__(self, kind: str) -> None:
        super().__init__(plain_sgd)
        self.kind = kind
        if kind == "sparse":
            self.extra: nn.Module = nn.Embedding(10, FEATURES, sparse=True)
        else:
            self.extra = nn.Module()
            dtype = torch.complex64 if kind == "complex" else torch.float64
            self.extra.weight = nn.Parameter(torch.ones(FEATURES, dtype=dtype))

    def loss(self, batch: Tensor) -> Tensor:
        if self.kind == "sparse":
            extra = self.extra(torch.tensor([1, 1, 3])).sum()
        else:
            extra = (batch * self.extra.weight).abs().sum().float()
        return super().loss(batch) + 0.01 * extra

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@pytest.mark.parametrize("kind", ["complex", pytest.param("sparse", marks=pytest.mark.needs("sparse")), "float64"])
@promise(14, stock="ComplexFloat|never", raises=(RuntimeError, NotImplementedError))
def test_odd_parameters(plugins: Plugins, kind: str) -> None:
    if not plugins.ours and kind != "complex":
        raise RuntimeError("never reached: Lightning keeps this one")
    assert_as_fp32(lambda: Odd(kind), plugins.scaled())
    plugin = plugins.scaled()
    fit(lambda: Odd(kind), plugin, callbacks=[Poison(gradient=[2])])
    assert plugin.num_skipped == 1


class Float64(Toy):
    def loss(self, batch: Tensor) -> Tensor:
        batch = batch.double()
        return nn.functional.mse_loss(self.net(batch), batch.sum(1, keepdim=True))


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("plugin", [scaled_fp32, functools.partial(AmpPrecision, "fp32")], ids=["fp16", "fp32"])
@pytest.mark.parametrize("optimizer", [plain_sgd, fused_adamw])
def test_float64_by_default(plugin: Any, optimizer: Any) -> None:
    data = batches()
    torch.set_default_dtype(torch.float64)
    try:
        assert_as_fp32(lambda: Float64(optimizer), plugin(), data)
        trainer = fit(lambda: Float64(optimizer), plugin(), data, callbacks=[Poison([2])])
    finally:
        torch.set_default_dtype(torch.float32)
    assert trainer.precision_plugin.num_skipped == 1  # pyright: ignore[reportAttributeAccessIssue]


# -- row 18: a reused weight ----------------------------------------------------------------------


class TwentyTimes(Toy):
    def __init__(self) -> None:
        super().__init__(plain_sgd, nn.Linear(FEATURES, FEATURES))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        with Casts() as casts:
            x = batch
            for _ in range(20):
                x = self.net(x)
        self.casts = casts.shapes.count((FEATURES, FEATURES))
        return x.float().pow(2).mean()


@pytest.mark.cpu
@promise(18, stock=DIFFERS, next_stock=None)
def test_one_half_copy_of_a_weight_per_step(plugins: Plugins) -> None:
    trainer = fit(TwentyTimes, plugins.bf16())
    torch.testing.assert_close(trainer.lightning_module.casts, 1)


class ManyUses(Toy):
    """One layer applied to each of many small inputs, so that its gradient has as many terms."""

    def __init__(self) -> None:
        super().__init__(plain_sgd, nn.Linear(FEATURES, FEATURES))

    def uses(self, batch: Tensor) -> Tensor:
        return torch.stack([self.net(batch * (1 + k / 512)).float().tanh().mean() for k in range(512)]).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.uses(batch)

    def on_after_backward(self) -> None:
        self.gradient = self.net.weight.grad.clone()

    def gradient_with_a_cast_per_use(self, batch: Tensor) -> Tensor:
        with torch.autocast(batch.device.type, dtype=torch.bfloat16, cache_enabled=False):
            loss = self.uses(batch)
        return torch.autograd.grad(loss, self.net.weight)[0]


@promise(18, stock=None, next_stock=DIFFERS)
def test_the_gradients_of_all_uses_are_summed_in_fp32(plugins: Plugins) -> None:
    """Lightning 2.6 casts the weight for each use; its next release sums the uses' gradients in half precision."""
    L.seed_everything(0, verbose=False)
    module, data = ManyUses(), batches(1)
    reference = module.to(DEVICE).gradient_with_a_cast_per_use(next(iter(data)).to(DEVICE))
    fit(lambda: module, plugins.bf16(), data)
    torch.testing.assert_close(module.gradient, reference, rtol=0, atol=1e-3 * float(reference.abs().max()))


# -- row 65: an edited weight ---------------------------------------------------------------------

EDITS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "one row": lambda weight, average: weight.data[5].mul_(2),
    "one row, through NumPy": lambda weight, average: weight.data.numpy()[5].__imul__(2),
    "copy_ of an average": lambda weight, average: weight.data.copy_(average),
    "a weight norm by hand": lambda weight, average: torch._foreach_div_(
        [weight.data], [weight.data.norm(dim=1)[:, None]]
    ),
}


class EditedThroughData(Toy):
    """Edits the weight between two uses of a layer in a step; autograd's version counter does not move."""

    def __init__(self, edit: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__(plain_sgd, nn.Linear(FEATURES, 256))
        self.edit = edit
        self.uses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        average = self.net.weight.detach() + 0.5
        self.uses = [self.net(batch), self.net(batch)]
        self.edit(self.net.weight, average)
        self.uses += [self.net(batch), nn.functional.linear(batch, self.net.weight, self.net.bias)]
        return torch.stack(self.uses).float().square().mean()


@pytest.mark.parametrize("how", [pytest.param(how, marks=[pytest.mark.cpu] if "NumPy" in how else []) for how in EDITS])
@promise(65, stock=None, next_stock=DIFFERS)
def test_an_edit_through_data_between_two_uses_is_seen(plugins: Plugins, how: str) -> None:
    module = fit(lambda: EditedThroughData(EDITS[how]), plugins.bf16(), batches(4)).lightning_module
    _, before, after, expected = module.uses
    assert_same(after, expected)
    assert not torch.equal(after, before)


# -- row 19: torch.compile ------------------------------------------------------------------------


class Compiled(Toy):
    def __init__(self, compiled: bool) -> None:
        super().__init__(plain_sgd, nn.Sequential(Island(), nn.Linear(FEATURES, 1)))
        self.compiled = compiled

    def on_fit_start(self) -> None:
        torch._dynamo.reset()
        if self.compiled:
            self.net.compile(backend="aot_eager")


@promise(19, stock=DIFFERS)
def test_compiled_backward_equals_eager(plugins: Plugins) -> None:
    compiled = fit(lambda: Compiled(True), plugins.bf16(), batches(2))
    eager = fit(lambda: Compiled(False), plugins.bf16(), batches(2))
    assert_same(weights(compiled)["net.0.weight"], weights(eager)["net.0.weight"], rtol=0, atol=1e-7)


# -- row 31: anomaly detection --------------------------------------------------------------------


class OverflowsInBackward(Toy):
    """The scaled gradient of a float16 activation overflows, and makes NaN in earlier layers."""

    def loss(self, batch: Tensor) -> Tensor:
        hidden = self.net[0](batch)
        return (torch.softmax(hidden * 50, 1).float().pow(2) * 300).sum()


class RealAnomaly(Toy):
    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + torch.sqrt((self.net(batch).float() * 0).sum())


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.filterwarnings("ignore:.*detect_anomaly")
@promise(31, stock="returned nan values", raises=RuntimeError)
def test_an_overflow_is_not_an_anomaly(plugins: Plugins) -> None:
    plugin = plugins.fp16(2.0**22)
    fit(OverflowsInBackward, plugin, detect_anomaly=True)
    assert plugin.num_skipped > 0


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_a_real_anomaly_is_one() -> None:
    with pytest.raises(RuntimeError, match="returned nan values"):
        fit(RealAnomaly, Plugins(True).fp16(), detect_anomaly=True)
