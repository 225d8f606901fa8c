"""Record the events of one optimizer step in order, and show that none of them waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from support import CountReads, Toy, batches, fit, flags_on_a_device
from support.promises import OPTIMIZERS, PLAIN_AND_FUSED, Plugins, fused_adamw, fused_sgd, plain_adamw
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp import AmpPrecision, DynamicLossScaler
from lightning_amp.scaling import OptimizerSteps


class Events(L.Callback):
    """An event that a user can see, with the factor that the gradients carry at that moment."""

    def __init__(self, factor: Callable[[Any], str]) -> None:
        self.events: list[str] = []
        self.factor = factor

    def note(self, name: str, module: Any) -> None:
        self.events.append(f"{name} ({self.factor(module)})")

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.events.append("zero_grad")

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        true = torch.equal(loss.detach() * module.window, module.last_loss)
        self.events.append(f"on_before_backward ({'true' if true else 'scaled'} loss)")

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.note("on_after_backward", module)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.note("on_before_optimizer_step", module)

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        scale = trainer.precision_plugin.scaler.get_scale()
        self.events.append(f"batch end (next scale {scale:g})")


class Traced(Toy):
    """A module with a known true gradient: the loss is the sum of the parameters."""

    def __init__(self, optimizer: Any = plain_adamw, window: int = 1) -> None:
        super().__init__(optimizer)
        self.window = window

    def loss(self, batch: Tensor) -> Tensor:
        self.last_loss = torch.stack([p.sum() for p in self.parameters()]).sum()
        self.events.events.append("training_step")
        return self.last_loss

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.events.note("clip", self)

    def configure_optimizers(self) -> Any:
        module, base = self, type(self.make_optimizer(self.parameters()))

        class Spy(base):
            def step(self, closure: Any = None) -> Any:
                out = super().step(closure)
                module.events.note("stepped", module)
                return out

        optimizer = self.make_optimizer(self.parameters())
        optimizer.__class__ = Spy
        return optimizer


def factor(module: Any) -> str:
    grad = next(module.parameters()).grad
    if grad is None:
        return "no gradients"
    if not grad.isfinite().all():
        return "inf"
    return f"x{grad.flatten()[0].item():g}"


def events_of(module: Any, count: int = 2, **kwargs: Any) -> list[str]:
    plugin = Plugins(True).scaled(8.0, growth_interval=1)
    module.events = Events(factor)
    callbacks = [*kwargs.pop("callbacks", []), module.events]
    fit(module, plugin, batches(count), callbacks=callbacks, **kwargs)
    return module.events.events


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("optimizer", PLAIN_AND_FUSED)
def test_automatic(optimizer: str) -> None:
    step = [
        "training_step",
        "zero_grad",
        "on_before_backward (true loss)",
        "on_after_backward (x{scale})",
        "on_before_optimizer_step (x1)",
        "clip (x1)",
        "stepped (x1)",
        "batch end (next scale {next})",
    ]
    expected = [e.format(scale=s, next=2 * s) for s in (8, 16) for e in step]
    assert events_of(Traced(OPTIMIZERS[optimizer])) == expected


@pytest.mark.usefixtures("where_flags_live")
def test_accumulation() -> None:
    micro = ["training_step", "zero_grad", "on_before_backward (true loss)", "on_after_backward (x4)",
             "batch end (next scale 8)"]  # fmt: skip
    last = ["training_step", "on_before_backward (true loss)", "on_after_backward (x8)",
            "on_before_optimizer_step (x1)", "clip (x1)", "stepped (x1)", "batch end (next scale 16)"]  # fmt: skip
    assert events_of(Traced(window=2), accumulate_grad_batches=2) == micro + last


class Kernels(TorchDispatchMode):
    """Record the two kernels of loss scaling and the backward of the loss among the events that hooks record."""

    NAMES: ClassVar[dict[str, str]] = {
        "_amp_foreach_non_finite_check_and_unscale_": "unscale",
        "_amp_update_scale_": "update the scale",
    }

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in self.NAMES:
            again = "unscale" in self.events
            self.events.append("check again" if again and self.NAMES[name] == "unscale" else self.NAMES[name])
        if name == "mul" and self.events[-1:] == ["on_before_backward (true loss)"]:
            self.events.append("scale the loss")
        return function(*args, **(kwargs or {}))


class WithKernels(Traced):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.events.events.append("backward")
        super().backward(loss, *args, **kwargs)


def test_the_list_of_events_is_what_happens() -> None:
    """The order is that of `docs/design.md`; a check is part of unscaling, and writing a record leaves no event."""
    module = WithKernels(plain_adamw)
    module.events = Events(factor)
    with Kernels(module.events.events):
        fit(module, Plugins(True).scaled(8.0, growth_interval=1), batches(1), callbacks=[module.events])
    called = {"stepped": "step or skip", "zero_grad": "", "batch end": ""}
    names = [event.split(" (")[0] for event in module.events.events]
    happened = [name for name in (called.get(name, name) for name in names) if name]
    assert happened == [
        "training_step", "on_before_backward", "scale the loss", "backward", "on_after_backward", "unscale",
        "on_before_optimizer_step", "check again", "clip", "check again",  # this module clips by itself
        "step or skip", "update the scale",
    ]  # fmt: skip


class Overflow(L.Callback):
    def on_after_backward(self, trainer: Any, module: Any) -> None:
        next(module.parameters()).grad.fill_(float("inf"))


@pytest.mark.usefixtures("where_flags_live")
def test_a_skip_goes_through_the_same_hooks() -> None:
    assert events_of(Traced(), 1, callbacks=[Overflow()]) == [
        "training_step", "zero_grad", "on_before_backward (true loss)", "on_after_backward (inf)",
        "on_before_optimizer_step (inf)", "clip (inf)", "batch end (next scale 4)",
    ]  # fmt: skip


class Manual(Traced):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=1e9, gradient_clip_algorithm="norm")
        self.events.note("clipped", self)
        optimizer.step()


@pytest.mark.usefixtures("where_flags_live")
def test_manual() -> None:
    step = ["training_step", "on_before_backward (true loss)", "on_after_backward (x{s})", "clipped (x1)",
            "on_before_optimizer_step (x1)", "stepped (x1)", "batch end (next scale {n})"]  # fmt: skip
    assert events_of(Manual()) == [e.format(s=s, n=2 * s) for s in (8, 16) for e in step]


class ManualTwo(Traced):
    def __init__(self, reverse: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.reverse = reverse

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        for optimizer in reversed(optimizers) if self.reverse else optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[0].parameters(), lr=0.1), torch.optim.SGD(self.net[2].parameters(), lr=0.1)]


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("reverse", [False, True])
def test_two_optimizers(reverse: bool) -> None:
    """Each optimizer is unscaled just before its own step, and the scale moves once."""
    hooks = ["on_before_optimizer_step (x8)", "on_before_optimizer_step (x1)"] if reverse else [
        "on_before_optimizer_step (x1)"] * 2  # fmt: skip
    assert events_of(ManualTwo(reverse), 1) == [
        "training_step", "on_before_backward (true loss)", "on_after_backward (x8)", *hooks,
        "batch end (next scale 16)",
    ]  # fmt: skip


class Override(Traced):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        self.events.events.append("optimizer_step override")
        optimizer.step(closure=optimizer_closure)


def test_overridden_optimizer_step() -> None:
    assert events_of(Override(), 1)[:2] == ["optimizer_step override", "training_step"]
    assert events_of(Override(), 1)[1:] == events_of(Traced(), 1)


# -- nothing waits for the device -----------------------------------------------------------------


def reads_per_step(plugin: AmpPrecision | None, module: Toy, **kwargs: Any) -> list[int]:
    """Count `.item()` calls during each optimizer step, without the one that reads the loss."""
    counts: list[int] = []
    original = OptimizerSteps.step

    def step(self: Any, *args: Any, **kw: Any) -> Any:
        with CountReads() as reads:
            out = original(self, *args, **kw)
        counts.append(reads.count)
        return out

    with pytest.MonkeyPatch.context() as patch, flags_on_a_device():
        patch.setattr(OptimizerSteps, "step", step)
        fit(module, plugin, batches(6), **kwargs)
    return counts


PLUGINS: dict[str, Callable[[], AmpPrecision]] = {
    "bf16": lambda: AmpPrecision("bf16"),
    "fp16": lambda: AmpPrecision("fp16", scaler=DynamicLossScaler(1024.0)),
    "fp32": lambda: AmpPrecision("fp32"),
    "fp16, torch's scaler": lambda: AmpPrecision("fp16", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0)),
}


class Looks(Toy):
    def on_before_optimizer_step(self, optimizer: Any) -> None: ...


@pytest.mark.parametrize("module", [Toy, Looks])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_fused_optimizers_never_wait(plugin: str, clip: float | None, module: type[Toy]) -> None:
    assert reads_per_step(PLUGINS[plugin](), module(fused_adamw), gradient_clip_val=clip) == [0] * 6


@pytest.mark.parametrize("plugin", PLUGINS)
def test_an_unfused_optimizer_costs_one_read(plugin: str) -> None:
    plain = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    assert reads_per_step(PLUGINS[plugin](), Toy(plain)) == [1] * 6


def test_fused_sgd_waits_only_until_its_momentum_exists() -> None:
    assert reads_per_step(PLUGINS["fp16"](), Toy(fused_sgd)) == [1, 0, 0, 0, 0, 0]


def test_a_schedule_reads_the_flag_one_step_late() -> None:
    module = Toy(fused_adamw, None, lambda o: ExponentialLR(o, 0.5))
    assert reads_per_step(PLUGINS["fp16"](), module) == [0, 1, 1, 1, 1, 1]
