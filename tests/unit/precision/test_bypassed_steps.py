"""Row 36: a step that bypasses the plugin would apply gradients times the loss scale, and raises at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import DEVICE, FEATURES, Toy, WithoutAutocast, assert_same, batches, fit, scaled_fp32
from support.promises import OPTIMIZERS, PLAIN_AND_FUSED, Plugins, plain_adamw, plain_sgd, promise
from torch import Tensor, nn

from lightning_amp import AmpPrecision
from lightning_amp.precision import unscale_

NOT_RAISED = pytest.fail.Exception


class Manual(Toy):
    """Steps its optimizer by `step`; `optimizer` makes it."""

    def __init__(self, step: Callable[[Any], None], optimizer: Any = plain_sgd) -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False
        self.step = step
        self.to(DEVICE)  # on some devices that makes new parameters
        self.own = [optimizer(self.net.parameters())]  # a list, as any plain attribute: Lightning does not see it

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.optimizers().zero_grad()
        self.own[0].zero_grad()
        self.batch = batch
        self.manual_backward(self.loss(batch))
        self.step(self)


def inner(module: Any) -> None:
    module.optimizers().optimizer.step()


def raw(module: Any) -> None:
    module.optimizers(use_pl_optimizer=False).step()


def own(module: Any) -> None:
    module.own[0].step()


def unscaled(module: Any) -> None:
    module.trainer.precision_plugin.unscale_(module.optimizers())
    module.optimizers().optimizer.step()


def unscaled_own(module: Any) -> None:
    unscale_(module.trainer, module.own[0])
    module.own[0].step()


def with_a_closure(module: Any) -> None:
    optimizer = module.optimizers().optimizer
    optimizer.zero_grad()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = module.loss(module.batch)
        module.manual_backward(loss)
        return loss

    optimizer.step(closure)


@pytest.mark.parametrize("optimizer", PLAIN_AND_FUSED)
@pytest.mark.parametrize("step", [inner, raw, own, with_a_closure])
@promise(36, stock="DID NOT RAISE", raises=NOT_RAISED)
def test_past_the_plugin(plugins: Plugins, step: Callable[[Any], None], optimizer: str) -> None:
    module = Manual(step, OPTIMIZERS[optimizer])
    says = "Return it from `configure_optimizers`" if step is own else r"Call `step\(\)` of what `self.optimizers\(\)`"
    with pytest.raises(RuntimeError, match=f"past the precision plugin.*loss scale.*1024.*{says}"):
        fit(module, plugins.scaled())
    assert module.trainer.global_step == 0 if step is not with_a_closure else True


@pytest.mark.parametrize("step", [unscaled, unscaled_own])
def test_unscaled_by_hand(step: Callable[[Any], None]) -> None:
    """The gradients are unscaled, but the step could not be skipped if they had overflowed."""
    with pytest.raises(RuntimeError, match="past the precision plugin.*nor skip it"):
        fit(lambda: Manual(step), scaled_fp32(init_scale=1024.0))


class InBackward(Toy):
    """Has an optimizer of its own for each parameter, which steps as soon as its gradient is there."""

    def __init__(self, automatic: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = automatic

    def configure_optimizers(self) -> None:
        self.mine = [torch.optim.SGD([p], lr=0.05) for p in self.parameters()]
        for i, parameter in enumerate(self.parameters()):
            parameter.register_post_accumulate_grad_hook(lambda p, i=i: self.in_backward(i))

    def in_backward(self, i: int) -> None:
        self.mine[i].step()
        self.mine[i].zero_grad()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss if self.automatic_optimization else self.manual_backward(loss)


@pytest.mark.filterwarnings("ignore:.*returned `None`, this fit will run with no optimizer")
@pytest.mark.parametrize("automatic", [False, True])
@promise(36, stock="DID NOT RAISE|No inf checks", raises=(NOT_RAISED, AssertionError))
def test_inside_the_backward(plugins: Plugins, automatic: bool) -> None:
    with pytest.raises(RuntimeError, match="past the precision plugin.*inside the backward.*'bf16'"):
        fit(lambda: InBackward(automatic), plugins.scaled())


# -- what is legal stays silent ------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*returned `None`, this fit will run with no optimizer")
@pytest.mark.parametrize("plugin", ["fp32", "bf16", "none"])
@pytest.mark.parametrize("make", [lambda: Manual(inner), lambda: Manual(own), InBackward])
def test_without_loss_scaling_it_is_as_in_fp32(make: Any, plugin: str) -> None:
    plugins = {"fp32": lambda: AmpPrecision("fp32"), "bf16": lambda: WithoutAutocast("bf16"), "none": lambda: None}
    assert_same(fit(make, plugins[plugin]()), fit(make))


class OwnLoss(Toy):
    """Has a second optimizer with its own backward, as centre losses and probes have."""

    def __init__(self, automatic: bool) -> None:
        super().__init__(plain_adamw)
        self.automatic_optimization = automatic
        self.probe = nn.Linear(FEATURES, 1)
        self.to(DEVICE)
        self.outside = [nn.Linear(FEATURES, 1, device=DEVICE)]
        self.own = [torch.optim.SGD([*self.probe.parameters(), *self.outside[0].parameters()], lr=0.1)]

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.automatic_optimization:
            self.step_probe(batch)
            return self.loss(batch)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.step_probe(batch)
        optimizer.step()
        return None

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.step_probe(batch)

    def step_probe(self, batch: Tensor) -> None:
        self.own[0].zero_grad()
        (self.probe(batch) + self.outside[0](batch)).pow(2).mean().backward()
        self.own[0].step()

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.net.parameters())


@pytest.mark.parametrize("automatic", [False, True])
def test_an_optimizer_with_a_backward_of_its_own(automatic: bool) -> None:
    trainer, reference = fit(lambda: OwnLoss(automatic), scaled_fp32()), fit(lambda: OwnLoss(automatic))
    assert_same(trainer, reference)
    assert_same(trainer.lightning_module.outside[0], reference.lightning_module.outside[0])


class OwnPart(OwnLoss):
    """Makes the probe a part of the scaled loss."""

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + self.probe(batch).pow(2).mean()

    def step_probe(self, batch: Tensor) -> None:
        self.own[0].step()
        self.own[0].zero_grad()


@pytest.mark.parametrize("automatic", [False, True])
def test_an_optimizer_whose_gradients_come_with_the_scaled_loss(automatic: bool) -> None:
    with pytest.raises(RuntimeError, match="past the precision plugin.*Return it from `configure_optimizers`"):
        fit(lambda: OwnPart(automatic), scaled_fp32(), batches(2))


# -- a backward that the plugin does not see ---------------------------------------------------------------------------


class TwoLosses(Toy):
    """Has two networks and two optimizers; `backward` chooses the backward of the second loss."""

    def __init__(self, backward: str = "plain") -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(FEATURES, 1)
        self.how = backward

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward(self.loss(batch))
        first.step()
        if self.how == "looked at":
            self.other(batch).float().square().mean().backward()  # a saliency map, say
        second.zero_grad()
        loss = (self.other(batch).float() - 1).square().mean()
        if self.how == "plain":
            loss.backward()
        else:
            self.manual_backward(loss)
        second.step()

    def configure_optimizers(self) -> Any:
        return plain_sgd(self.net.parameters()), plain_sgd(self.other.parameters())


def test_a_backward_past_the_plugin_is_an_error_in_the_first_batch() -> None:
    """Without the error the plugin would divide the second optimizer's gradients by a scale that they lack."""
    with pytest.raises(RuntimeError, match=r"do not come from `self.manual_backward\(loss\)`"):
        fit(TwoLosses, scaled_fp32(), batches(1))
    assert_same(fit(lambda: TwoLosses("as it says"), scaled_fp32()), fit(lambda: TwoLosses("as it says")))


@pytest.mark.parametrize("how", ["as it says", "looked at"])
def test_a_backward_whose_gradients_are_dropped_is_nobodys_business(how: str) -> None:
    assert_same(fit(lambda: TwoLosses(how), scaled_fp32()), fit(lambda: TwoLosses(how)))


# -- an inner loop -----------------------------------------------------------------------------------------------------


class InnerLoop(Toy):
    """Adapts weights with its own optimizer, as first-order MAML does, and assigns the gradients.

    Args:
        when: The inner step comes before the outer backward, between backward and step, or after the step.
        assigns: Whether the inner step gets the derivative; else it gets the gradients of the outer backward.
        clips: Whether the derivative is clipped.

    """

    def __init__(self, when: str, assigns: str = "derivative", clips: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.when, self.assigns, self.clips = when, assigns, clips

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        outer = self.optimizers()
        self.adapt("before", batch)
        outer.zero_grad()
        self.manual_backward(self.loss(batch))
        kept = [parameter.grad for parameter in self.parameters()]
        self.adapt("between", batch)
        for parameter, gradient in zip(self.parameters(), kept, strict=True):
            parameter.grad = gradient
        outer.step()
        self.adapt("after", batch)

    def adapt(self, when: str, batch: Tensor) -> None:
        if when != self.when:
            return
        parameters = list(self.parameters())
        inner = torch.optim.SGD(parameters, lr=0.05)
        gradients = torch.autograd.grad(self.loss(batch), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if self.assigns == "derivative":
                parameter.grad = gradient.detach().clamp(-0.1, 0.1) if self.clips else gradient.detach()
        inner.step()


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_an_inner_optimizer_on_assigned_derivatives(when: str, clips: bool) -> None:
    make = lambda: InnerLoop(when, clips=clips)  # noqa: E731
    assert_same(fit(make, scaled_fp32(init_scale=1024.0)), fit(make))


def test_an_inner_optimizer_on_what_the_scaled_backward_left() -> None:
    with pytest.raises(RuntimeError, match=r"by the loss scale \(1024\)"):
        fit(lambda: InnerLoop("between", "nothing"), scaled_fp32(init_scale=1024.0))
