"""Promises 3, 4, 7, 8, 11 and 12 in Fabric: clipping, unscaling, autocast, closures, half-precision losses.

As in `test_fabric.py`, each loop equals fp32 bit for bit, and fails with Fabric's own plugin.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from support import FEATURES, assert_same
from support.fabric import CASES, DEVICE, FabricPlugins, Loop, batches, optimizer_tensors, promise, without
from support.promises import DIFFERS, OPTIMIZERS, fused_adamw, fused_sgd, plain_adamw
from torch import Tensor, nn
from zoo.toy import SAM, Island

BAD: Any = {0: "gradient", 2: "loss", 5: "gradient"}
ours = pytest.mark.parametrize("plugins", [FabricPlugins()])


# -- rows 3, 4 and 8: clipping -----------------------------------------------------------------------------------------

CLIPS: dict[str, dict[str, float]] = {"norm": {"max_norm": 0.5}, "value": {"clip_val": 0.02}}
REFUSED = "not implemented for optimizers handling the unscaling"


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("optimizer", [fused_adamw, fused_sgd])
@promise(3, stock=REFUSED, raises=NotImplementedError)
def test_clipping_with_a_fused_optimizer(plugins: FabricPlugins, optimizer: Any, clip: str) -> None:
    """litgpt and lightly-train clip in this way. The norms that `clip_gradients` returns are the true ones, too."""

    def clipped(plugin: Any) -> Any:
        norms: list[Any] = []
        loop = Loop(plugin, optimizer=optimizer).run(edit=lambda loop: norms.append(loop.clip(**CLIPS[clip])))
        return loop.weights(), [norm for norm in norms if norm is not None]

    ours, reference = clipped(plugins.fp16(2.0**16, growth_interval=3)), clipped(None)
    assert_same(ours, reference)
    assert len(ours[1]) == (8 if clip == "norm" else 0)


def overflow_at_a_clip(plugin: Any, optimizer: Any, clip: str) -> list[Any]:
    """Return the norms, after a comparison with a run that never drew the bad batches."""
    bad: Any = {1: "gradient", 2: "loss", 6: "gradient"}
    norms: list[Any] = []
    loop = Loop(plugin, optimizer=optimizer, trouble=bad)
    loop.run(edit=lambda loop: norms.append(loop.clip(**CLIPS[clip])))
    reference = Loop(optimizer=optimizer).run(without(bad), edit=lambda loop: loop.clip(**CLIPS[clip]))
    assert_same(loop.weights(), reference.weights())
    assert_same(optimizer_tensors(loop.optimizer), optimizer_tensors(reference.optimizer))
    return norms


@pytest.mark.parametrize("optimizer", CASES)
@promise(3, stock=f"non-finite|{REFUSED}", raises=(RuntimeError, NotImplementedError))
def test_an_overflow_at_a_clip_by_norm_skips_the_step(plugins: FabricPlugins, optimizer: str) -> None:
    """Fabric raises by default at a norm that is not finite."""
    plugin = plugins.fp16()
    norms = overflow_at_a_clip(plugin, OPTIMIZERS[optimizer], "norm")
    assert [index for index, norm in enumerate(norms) if norm == 0] == [1, 2, 6]
    assert plugin.num_skipped == 3


@pytest.mark.parametrize("clip", [None, "norm"])
@pytest.mark.parametrize("optimizer", CASES)
@pytest.mark.parametrize("precision", ["bf16"])
@promise(8, stock="are not close|non-finite|are not equal", raises=(RuntimeError, AssertionError))
def test_one_bad_batch_without_a_scaler(plugins: FabricPlugins, precision: str, optimizer: str, clip: Any) -> None:
    bad: Any = {3: "gradient", 4: "loss"}
    plugin, make = getattr(plugins, precision)(), OPTIMIZERS[optimizer]
    edit: Any = None if clip is None else lambda loop: loop.clip(**CLIPS[clip])
    loop = Loop(plugin, optimizer=make, trouble=bad).run(edit=edit)
    assert_same(loop.weights(), Loop(optimizer=make).run(without(bad), edit=edit).weights())


def twice(loop: Loop) -> None:
    loop.clip(clip_val=0.05)
    loop.clip(max_norm=0.1)


def by_hand(loop: Loop) -> None:
    """Read and clip without Fabric."""
    loop.unscale()
    loop.unscale()
    norm = torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.3)
    for parameter in loop.model.parameters():
        parameter.grad.add_(parameter.detach() * norm * 0.01)


def unscaled_then_clipped(loop: Loop) -> None:
    loop.unscale()
    loop.clip(max_norm=0.1)


@pytest.mark.parametrize("edit", [twice, by_hand, unscaled_then_clipped])
@pytest.mark.parametrize("optimizer", CASES)
@promise(4, stock=f"already been called|{REFUSED}", raises=(RuntimeError, NotImplementedError))
def test_unscaled_once(plugins: FabricPlugins, optimizer: str, edit: Any) -> None:
    make = OPTIMIZERS[optimizer]
    loop = Loop(plugins.fp16(), optimizer=make).run(edit=edit)
    assert_same(loop.weights(), Loop(optimizer=make).run(edit=edit).weights())


@pytest.mark.parametrize("optimizer", ["fused adamw", "fused sgd"])
@promise(3, stock=DIFFERS)
def test_hooks_of_the_optimizer_see_true_gradients(plugins: FabricPlugins, optimizer: str) -> None:
    def train(plugin: Any) -> Any:
        seen: list[Tensor] = []
        loop = Loop(plugin, optimizer=OPTIMIZERS[optimizer])
        params = list(loop.model.parameters())
        loop.raw.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in params))
        return loop.run().weights(), seen

    assert_same(train(plugins.fp16()), train(None))


# -- row 7: autocast is off in the backward and in the step ------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@promise(7, stock="are not")
def test_autocast_around_the_whole_step(plugins: FabricPlugins, precision: str) -> None:
    modes: list[bool] = []

    class Spy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            modes.append(torch.is_autocast_enabled(DEVICE))
            return super().step(closure)

    def train(around: bool) -> dict[str, Tensor]:
        loop = Loop(
            getattr(plugins, precision)(), lambda: nn.Sequential(Island(), nn.Linear(FEATURES, 1)),
            lambda params: Spy(params, lr=0.05),
        )  # fmt: skip
        for batch in batches():
            loop.optimizer.zero_grad()
            with loop.fabric.autocast():
                loss = loop.loss(batch)
                with contextlib.nullcontext() if around else torch.autocast(DEVICE, enabled=False):
                    loop.fabric.backward(loss)
                    loop.optimizer.step()
        return loop.weights()

    assert_same(train(around=True), train(around=False))
    assert_same(torch.tensor(modes), torch.zeros(16, dtype=torch.bool))


# -- row 11: closures --------------------------------------------------------------------------------------------------


def lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.1, max_iter=3, tolerance_grad=0, tolerance_change=0)


def with_closures(plugin: Any, optimizer: Any, trouble: Any = None, data: Any = None, clip: bool = False) -> Any:
    loop = Loop(plugin, optimizer=optimizer, trouble=trouble)
    losses: list[Tensor] = []
    for batch in batches() if data is None else data:

        def closure(batch: Tensor = batch) -> Tensor:
            loop.optimizer.zero_grad()
            loss = loop.loss(batch)
            loop.fabric.backward(loss)
            if clip:
                loop.clip(max_norm=0.5)
            return loss

        losses.append(loop.optimizer.step(closure).detach())
        loop.index += 1
    return loop.weights(), [loss for index, loss in enumerate(losses) if index not in (trouble or {})]


CLOSURES = {"lbfgs": lbfgs, "sam": SAM, "adamw": plain_adamw, "fused adamw": fused_adamw}
NO_CLOSURES = "not compatible|Closure use is not"


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("optimizer", CLOSURES)
@promise(11, stock=NO_CLOSURES, raises=(TypeError, RuntimeError))
def test_closures(plugins: FabricPlugins, optimizer: str, clip: bool) -> None:
    """The step returns the true loss."""
    make = CLOSURES[optimizer]
    assert_same(with_closures(plugins.fp16(), make, clip=clip), with_closures(None, make, clip=clip))
