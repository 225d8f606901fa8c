"""Row 42: if `unscale_` found non-finite gradients, the step is skipped, whatever happens to them afterwards.

The edits here leave healthy gradients alone. So a run with them equals a run without, skipped step included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from support import (
    CountReads,
    Manual,
    Toy,
    assert_as_fp32,
    assert_same,
    fit,
    flags_on_a_device,
)
from support.promises import Plugins, fused_adamw, plain_sgd
from torch import Tensor, nn

from lightning_amp import AmpPrecision
from lightning_amp.precision import unscale_

OPTIMIZERS = {"sgd": plain_sgd, "fused adamw": fused_adamw}
BAD = 2
LARGE = 1e3


def nothing(module: nn.Module) -> None: ...


def clip(module: nn.Module) -> None:
    nn.utils.clip_grad_value_(module.parameters(), LARGE)


def replace(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.nan_to_num_(0.0, 0.0, 0.0)


CALLS: dict[str, Callable[[L.LightningModule, Any], None]] = {
    "function": lambda module, optimizer: unscale_(module.trainer, optimizer),
    "plugin": lambda module, optimizer: module.trainer.precision_plugin.unscale_(optimizer),
    "scaler": lambda module, optimizer: module.trainer.precision_plugin.scaler.unscale_(optimizer),
}
EDITS = {"clipped": clip, "mended": replace}


def plugin_for(precision: str) -> Any:
    return getattr(Plugins(True), precision)()


def overflow(module: nn.Module) -> None:
    next(module.parameters()).grad.view(-1)[0] = torch.inf  # pyright: ignore[reportOptionalMemberAccess]


class Unscales(Manual):
    """Unscale by hand and edit; the gradients of one batch are not finite."""

    def __init__(
        self, then: Callable[[nn.Module], None] = nothing, call: str = "function", optimizer: Any = plain_sgd
    ) -> None:
        super().__init__(optimizer)
        self.then, self.call = then, CALLS[call]

    def edit(self, optimizer: Any, batch_idx: int) -> None:
        if batch_idx == BAD:
            overflow(self)
        self.call(self, optimizer)
        self.then(self)


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.filterwarnings("ignore:lightning_amp. precision 'bf16'")
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["scaled", "bf16"])
def test_in_manual_optimization(precision: str, optimizer: str, edit: str) -> None:
    plugin = plugin_for(precision)
    edited = fit(lambda: Unscales(EDITS[edit], optimizer=OPTIMIZERS[optimizer]), plugin)
    assert (plugin.num_steps, plugin.num_skipped) == (7, 1)
    assert_same(edited, fit(lambda: Unscales(optimizer=OPTIMIZERS[optimizer]), plugin_for(precision)))


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("call", CALLS)
def test_whichever_call(call: str, edit: str) -> None:
    plugin = plugin_for("scaled")
    fit(lambda: Unscales(EDITS[edit], call), plugin)
    assert (plugin.num_skipped, plugin.scaler.get_scale()) == (1, 2.0**9)


# -- automatic optimization --------------------------------------------------------------------------------------------


class InHook(Toy):
    """Clip by hand in a hook, after `unscale_` where the hook comes before Lightning's own clipping."""

    def __init__(self, hook: str, edit: Callable[[nn.Module], None], optimizer: Any = plain_sgd) -> None:
        super().__init__(optimizer)
        self.hook, self.edit, self.batch = hook, edit, -1

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batch = batch_idx

    def on_after_backward(self) -> None:
        if self.batch == BAD:
            overflow(self)
        self._edit("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._edit("on_before_optimizer_step")

    def _edit(self, hook: str) -> None:
        if hook == self.hook:
            unscale_(self.trainer, self.optimizers())
            self.edit(self)


class InOwnClipping(InHook):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.edit(self)


class WithoutLooking(InOwnClipping):
    on_before_optimizer_step = Toy.on_before_optimizer_step


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["scaled", "fp32"])
@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step"])
@pytest.mark.few(10)
def test_in_a_hook(hook: str, precision: str, optimizer: str, accumulate: int) -> None:
    """With accumulation, another backward comes between `unscale_` of the bad batch and the step."""
    plugin = plugin_for(precision)
    kwargs: dict[str, Any] = {"accumulate_grad_batches": accumulate}
    edited = fit(lambda: InHook(hook, clip, OPTIMIZERS[optimizer]), plugin, **kwargs)
    assert (plugin.num_steps, plugin.num_skipped) == (8 // accumulate - 1, 1)
    assert_same(edited, fit(lambda: InHook(hook, nothing, OPTIMIZERS[optimizer]), plugin_for(precision), **kwargs))


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("kind", [InOwnClipping, WithoutLooking])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["scaled", "fp32"])
def test_in_ones_own_clipping(precision: str, optimizer: str, kind: type[InHook]) -> None:
    """`configure_gradient_clipping` calls `clip_grad_value_`; the plugin itself has unscaled."""
    plugin = plugin_for(precision)
    fit(lambda: kind("", clip, OPTIMIZERS[optimizer]), plugin)
    assert (plugin.num_steps, plugin.num_skipped) == (7, 1)


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("precision", ["scaled", "fp32"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_clip_gradients_by_value_by_hand(optimizer: str, precision: str) -> None:
    class Clips(Unscales):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            for part in batch.chunk(2):  # clipped twice, with another backward in between
                self.manual_backward(self.loss(part))
                if batch_idx == BAD and part is not batch:
                    overflow(self)
                self.clip_gradients(optimizer, 0.1, "value")
            optimizer.step()

    plugin = plugin_for(precision)
    fit(lambda: Clips(optimizer=OPTIMIZERS[optimizer]), plugin)
    assert plugin.num_skipped == 1


# -- until the step ----------------------------------------------------------------------------------------------------


class TwoBackwards(Unscales):
    """Another backward comes between `unscale_` and the step; `drop` is called before it."""

    def __init__(self, optimizer: Any, drop: Callable[[Any], None] = lambda optimizer: None) -> None:
        super().__init__(clip, optimizer=optimizer)
        self.drop = drop

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.again = batch
        super().training_step(batch, batch_idx)

    def edit(self, optimizer: Any, batch_idx: int) -> None:
        super().edit(optimizer, batch_idx)
        self.drop(optimizer)
        self.manual_backward(self.loss(self.again))


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("precision", ["scaled", "fp32"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gradients_that_were_dropped_do_end_it(optimizer: str, precision: str, to_none: bool) -> None:
    plugin = plugin_for(precision)
    assert_as_fp32(lambda: TwoBackwards(OPTIMIZERS[optimizer], lambda o: o.zero_grad(set_to_none=to_none)), plugin)
    assert plugin.num_skipped == 0


@pytest.mark.parametrize("make", [TwoBackwards, lambda optimizer: Unscales(clip, optimizer=optimizer)])
def test_a_fused_optimizer_is_not_waited_for(make: Callable[[Any], Any]) -> None:
    with flags_on_a_device(), CountReads() as reads:
        fit(lambda: make(OPTIMIZERS["fused adamw"]), plugin_for("scaled"))
    with flags_on_a_device(), CountReads() as reads_without:
        fit(lambda: Toy(OPTIMIZERS["fused adamw"]), plugin_for("scaled"))
    assert reads.count <= reads_without.count


class LeavesOut(Toy):
    """The user drops a batch whose gradients are not finite, after a plain `backward()`."""

    def __init__(self, to_none: bool) -> None:
        super().__init__(plain_sgd)
        self.automatic_optimization, self.to_none, self.taken = False, to_none, list[int]()

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad(set_to_none=self.to_none)
        (self.loss(batch) * (torch.inf if batch_idx == 2 else 1.0)).backward()
        unscale_(self.trainer, optimizer)
        if torch.isfinite(torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)):
            optimizer.step()
            self.taken.append(batch_idx)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_batch_that_the_user_leaves_out_costs_no_other_step(precision: Any, to_none: bool) -> None:
    trainer = fit(lambda: LeavesOut(to_none), AmpPrecision(precision))
    plugin, module = trainer.precision_plugin, trainer.lightning_module
    assert module.taken == [0, 1, 3, 4, 5, 6, 7]
    assert (plugin.num_steps, plugin.num_skipped) == (7, 0)
    assert not any(parameter._backward_hooks for parameter in module.parameters())
