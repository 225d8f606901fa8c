"""Row 40: the gradients at the time of a step decide whether it is taken; the loss only explains a skip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import (
    Manual,
    Poison,
    Records,
    Toy,
    assert_as_fp32,
    assert_finite,
    assert_same,
    fit,
    with_batch_norm,
)
from support.promises import DIFFERS, OPTIMIZERS, PLAIN_AND_FUSED, Plugins, plain_sgd, promise
from torch import Tensor, nn

from lightning_amp import AmpPrecision


def replace(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.nan_to_num_(0.0, 0.0, 0.0)


def zero(module: nn.Module) -> None:
    if any(p.grad is not None and not p.grad.isfinite().all() for p in module.parameters()):
        for parameter in module.parameters():
            parameter.grad.data.zero_()  # pyright: ignore[reportOptionalMemberAccess]


class Bad(Toy):
    """The loss of one batch is not finite, its gradients are as in `kind`; `mend` repairs them in `hook`."""

    def __init__(
        self,
        hook: str = "",
        mend: Callable[[nn.Module], None] = replace,
        kind: str = "nan",
        optimizer: Any = plain_sgd,
        net: nn.Module | None = None,
    ) -> None:
        super().__init__(optimizer, net)
        self.hook, self.mend, self.kind = hook, mend, kind

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        bad = batch_idx == 2
        loss = self.loss(batch * torch.nan if bad and self.kind == "batch" else batch)
        if bad and self.kind == "detached":
            return loss + torch.inf
        return loss * torch.nan if bad else loss

    def mend_in(self, hook: str) -> None:
        if hook == self.hook:
            self.mend(self)

    def on_after_backward(self) -> None:
        self.mend_in("on_after_backward")

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.mend_in("configure_gradient_clipping")


class Looks(Bad):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.mend_in("on_before_optimizer_step")


@pytest.mark.parametrize("mend", [replace, zero])
# not with a fused optimizer: Lightning's hooks see its scaled gradients
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@promise(40, stock=DIFFERS)
def test_mended_before_the_step(plugins: Plugins, optimizer: str, mend: Callable[[nn.Module], None]) -> None:
    assert_as_fp32(lambda: Looks("on_before_optimizer_step", mend, optimizer=OPTIMIZERS[optimizer]), plugins.scaled())


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("precision", ["scaled", "fp32"])
@pytest.mark.parametrize("optimizer", PLAIN_AND_FUSED)
@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"])
@pytest.mark.few(8)
def test_mended_in_any_hook(hook: str, optimizer: str, precision: str) -> None:
    plugin = getattr(Plugins(True), precision)()
    assert_as_fp32(lambda: Looks(hook, optimizer=OPTIMIZERS[optimizer]), plugin, gradient_clip_val=0.5)
    assert (plugin.num_steps, plugin.num_skipped) == (8, 0)
    if precision == "scaled":
        assert plugin.scaler.get_scale() == 2.0**10  # the loss does not tell


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("precision", ["scaled", "fp32"])
@pytest.mark.parametrize("optimizer", PLAIN_AND_FUSED)
def test_finite_gradients_of_an_infinite_loss(optimizer: str, precision: str, clip: float | None) -> None:
    """A term that is not differentiated was added to the loss."""
    plugin = getattr(Plugins(True), precision)()
    clips = {} if clip is None else {"configure_gradient_clipping": Toy.configure_gradient_clipping}
    kind = type("Clips", (Bad,), clips)
    folded = clip is not None and optimizer.startswith("fused")
    assert_as_fp32(
        lambda: kind(kind="detached", optimizer=OPTIMIZERS[optimizer]), plugin, gradient_clip_val=clip,
        tolerance={"rtol": 1e-5, "atol": 1e-6} if folded else {},
    )  # fmt: skip
    assert plugin.num_skipped == 0


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("optimizer", PLAIN_AND_FUSED)
def test_the_loss_says_why(optimizer: str) -> None:
    records, plugin = Records(), Plugins(True).scaled()
    fit(lambda: Bad(optimizer=OPTIMIZERS[optimizer]), plugin, callbacks=[Poison(gradient=[4]), records])
    assert records.reasons == ["none", "none", "loss", "none", "gradient", "none", "none", "none"]
    assert [r.next_scale for r in records.all] == [1024.0] * 4 + [512.0] * 4


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("optimizer", PLAIN_AND_FUSED)
def test_a_mended_overflow_is_a_step_and_lowers_the_scale(optimizer: str) -> None:
    """The scale falls; otherwise every step would overflow and need mending."""
    records, plugin = Records(), Plugins(True).scaled()

    class Mends(Toy):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            replace(self)

    make = lambda: Mends(OPTIMIZERS[optimizer])  # noqa: E731
    trainer = fit(make, plugin, callbacks=[Poison(gradient=[3]), records])
    assert_same(trainer, fit(make, callbacks=[Poison(gradient=[3])]))
    assert plugin.num_skipped == 0
    assert [r.next_scale for r in records.all] == [1024.0] * 3 + [512.0] * 5


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("precision", ["scaled", "fp32"])
@pytest.mark.parametrize("optimizer", PLAIN_AND_FUSED)
def test_broken_in_a_hook(optimizer: str, precision: str) -> None:
    """The reverse: a hook that makes gradients NaN causes a skip."""

    def spoil(module: nn.Module) -> None:
        if module.trainer.fit_loop.epoch_loop.batch_idx == 3:  # pyright: ignore
            next(module.parameters()).grad.fill_(torch.nan)  # pyright: ignore[reportOptionalMemberAccess]

    plugin = getattr(Plugins(True), precision)()
    trainer = fit(lambda: Looks("on_before_optimizer_step", spoil, "detached", OPTIMIZERS[optimizer]), plugin)
    assert plugin.num_skipped == 1
    assert_finite(trainer)


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("precision", ["scaled", "fp32"])
@pytest.mark.parametrize("optimizer", PLAIN_AND_FUSED)
def test_clipping_by_value_mends_nothing(optimizer: str, precision: str, own: bool) -> None:
    """A clamped overflow tells nothing about the true gradient, not even its sign."""

    class Own(Toy):
        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    plugin = getattr(Plugins(True), precision)()
    kwargs: dict[str, Any] = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}
    kind = Own if own else Toy
    fit(lambda: kind(OPTIMIZERS[optimizer]), plugin, callbacks=[Poison(gradient=[3])], **kwargs)
    assert plugin.num_skipped == 1


class ByHand(Manual):
    def __init__(self, optimizer: Any, clip: str | None) -> None:
        super().__init__(optimizer)
        self.clip = clip

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        bad = self.trainer.fit_loop.epoch_loop.batch_idx == 2
        super().manual_backward(loss * (torch.nan if bad else 1.0), *args, **kwargs)

    def edit(self, optimizer: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            next(self.parameters()).grad.fill_(torch.inf)
        replace(self)  # before `unscale_`; afterwards would be too late
        plugin = self.trainer.precision_plugin
        if isinstance(plugin, AmpPrecision):
            plugin.unscale_(optimizer)
        if self.clip is not None:
            self.clip_gradients(optimizer, 0.1, self.clip)


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("clip", [None, "norm", "value"])
@pytest.mark.parametrize("precision", ["scaled", "fp32"])
@pytest.mark.parametrize("optimizer", PLAIN_AND_FUSED)
@pytest.mark.few(8)
def test_mended_by_hand(optimizer: str, precision: str, clip: str | None) -> None:
    plugin = getattr(Plugins(True), precision)()
    assert_as_fp32(lambda: ByHand(OPTIMIZERS[optimizer], clip), plugin)
    assert plugin.num_skipped == 0


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("precision", ["scaled", "fp32"])
@pytest.mark.parametrize("optimizer", PLAIN_AND_FUSED)
def test_statistics_of_a_mended_batch_are_finite(optimizer: str, precision: str) -> None:
    """The step is taken, but NaN in a running mean would stay for ever."""

    def make(kind: str) -> Looks:
        return Looks("on_before_optimizer_step", replace, kind, OPTIMIZERS[optimizer], with_batch_norm())

    plugin = getattr(Plugins(True), precision)()
    trainer = fit(lambda: make("batch"), plugin)
    assert plugin.num_skipped == 0
    assert_finite(trainer)
    # where only the loss is bad, the statistics include the batch, as in fp32
    assert_as_fp32(lambda: make("nan"), getattr(Plugins(True), precision)())
