"""A loop of one's own with `ScaledSteps`: the same bits as plain fp32, with scales that are powers of two."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import DEVICE, FEATURES, assert_same
from support.accelerate_state import own_accelerate
from support.fabric import CASES, Infinite, batches, net, optimizer_tensors, slow, without
from support.promises import OPTIMIZERS, fused_adamw, plain_adamw, plain_sgd
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

from lightning_amp.scaling import DynamicLossScaler, ScaledSteps

both_ways = pytest.mark.usefixtures("where_flags_live")
BAD: Any = {0: "gradient", 2: "loss", 5: "gradient"}
SCALERS: dict[str, Callable[[], Any]] = {
    "ours": lambda: DynamicLossScaler(2.0**10, growth_interval=2, device=DEVICE),
    "torch's": lambda: torch.amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=2),
    "none": lambda: None,
}
SCALER_CASES = ["ours", pytest.param("torch's", marks=slow), "none"]


class Loop:
    """Torch's recipe with four lines changed; with `scaler=False` plain fp32."""

    def __init__(self, scaler: Any, optimizer: Any, trouble: Any = None, **kwargs: Any) -> None:
        torch.manual_seed(0)
        self.model = net().to(DEVICE)
        self.optimizer = optimizer(self.model.parameters())
        self.trouble = trouble or {}
        self.steps = None if scaler is False else ScaledSteps(scaler, [self.optimizer], **kwargs)
        self.index = 0

    def loss(self, batch: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(self.model(batch.to(DEVICE)).float(), batch.to(DEVICE).sum(1, keepdim=True))
        trouble = self.trouble.get(self.index)
        return Infinite.apply(loss) if trouble == "gradient" else loss * (torch.nan if trouble == "loss" else 1.0)

    def backward(self, loss: Tensor) -> None:
        loss.backward() if self.steps is None else self.steps.backward(loss)

    def step(self, **kwargs: Any) -> Any:
        return self.optimizer.step(**kwargs) if self.steps is None else self.steps.step(self.optimizer, **kwargs)

    def run(self, data: Any = None, clip: float | None = None, after: Any = None, accumulate: int = 1) -> Loop:
        for batch in batches() if data is None else data:
            self.backward(self.loss(batch) / accumulate)
            if (self.index + 1) % accumulate == 0:
                if clip is not None:
                    if self.steps is not None:
                        self.steps.unscale_(self.optimizer)
                    torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
                self.step()
                self.optimizer.zero_grad()
                if after is not None:
                    after()
            self.index += 1
        if self.steps is not None:
            self.steps.flush()
        return self

    def values(self) -> Any:
        return dict(self.model.state_dict()), optimizer_tensors(self.optimizer)


@both_ways
@pytest.mark.parametrize(("accumulate", "bad"), [(1, {}), pytest.param(2, {}, marks=slow), (1, BAD)])
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("optimizer", CASES)
@pytest.mark.parametrize("scaler", SCALER_CASES)
def test_equals_fp32_without_the_bad_batches(
    scaler: str, optimizer: str, clip: float | None, accumulate: int, bad: Any
) -> None:
    loop = Loop(SCALERS[scaler](), OPTIMIZERS[optimizer], bad).run(clip=clip, accumulate=accumulate)
    reference = Loop(False, OPTIMIZERS[optimizer]).run(without(bad), clip=clip, accumulate=accumulate)
    assert_same(loop.values(), reference.values())
    assert (loop.steps.num_steps, loop.steps.num_skipped) == (8 // accumulate - len(bad), len(bad))


@both_ways
@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("optimizer", [plain_adamw, fused_adamw])
def test_an_optimizer_that_steps_late(listed: bool, optimizer: Any) -> None:
    """Its gradients accumulate while the scale changes. `ScaledSteps` must know of it, to rescale them."""

    def train(scaler: Any) -> Any:
        torch.manual_seed(0)
        one, two = nn.Linear(FEATURES, 4).to(DEVICE), nn.Linear(4, 1).to(DEVICE)
        optimizers = [optimizer(one.parameters()), optimizer(two.parameters())]
        steps = None if scaler is None else ScaledSteps(scaler, *([optimizers] if listed else []))
        for batch in batches():
            optimizers[0].zero_grad()
            loss = (two(one(batch.to(DEVICE))) - 1).pow(2).mean()
            loss.backward() if steps is None else steps.backward(loss)
            optimizers[0].step() if steps is None else steps.step(optimizers[0])
        optimizers[1].step() if steps is None else steps.step(optimizers[1])
        return [p.detach() for m in (one, two) for p in m.parameters()]

    scaler = DynamicLossScaler(2.0, growth_interval=3, device=DEVICE)
    if listed:
        assert_same(train(scaler), train(None))
    else:
        with pytest.raises(RuntimeError, match=r"`AdamW`.*loss scale changed.*`ScaledSteps\(scaler, \[\.\.\.\]\)`"):
            train(scaler)


@both_ways
def test_a_state_that_is_loaded_between_two_optimizers() -> None:
    """The overflow of the first one belongs to a step after the checkpoint, and must not lower the loaded scale."""
    nets = [net().to(DEVICE) for _ in range(2)]
    optimizers = [plain_sgd(n.parameters()) for n in nets]
    steps = ScaledSteps(DynamicLossScaler(2.0**10, device=DEVICE), optimizers)

    def step(index: int, bad: bool = False) -> None:
        optimizers[index].zero_grad()
        loss = nets[index](batches()[0].to(DEVICE)).pow(2).mean()
        steps.backward(Infinite.apply(loss) if bad else loss)
        steps.step(optimizers[index])

    step(0)
    step(1)
    state = steps.state_dict()
    step(0, bad=True)
    steps.load_state_dict(state)
    step(0)
    step(1)
    steps.flush()
    assert (steps.num_steps, steps.num_skipped) == (4, 0)
    assert steps.state_dict()["scaler"]["scale"] == 2.0**10


# -- beside Accelerate -------------------------------------------------------------------------------------------------


def accelerated(scaled: bool, optimizer: Any, trouble: Any = None, data: Any = None) -> Any:
    """Train with a model and an optimizer that Accelerate has prepared."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=DEVICE == "cpu", mixed_precision="no")
    loop = Loop(False, optimizer, trouble)
    raw = loop.optimizer
    model, wrapped = accelerator.prepare(loop.model, raw)
    loop.model, loop.optimizer = model, wrapped
    schedule = ExponentialLR(raw, 0.8)
    if scaled:
        loop.steps = ScaledSteps(DynamicLossScaler(2.0**10, growth_interval=3, device=DEVICE), [wrapped])
        schedule = loop.steps.guard(schedule)
    loop.run(data, clip=0.5, after=schedule.step)
    return dict(loop.model.state_dict()), optimizer_tensors(raw), float(raw.param_groups[0]["lr"])


@both_ways
@pytest.mark.needs("accelerate")
@pytest.mark.parametrize("optimizer", CASES)
def test_beside_accelerate(optimizer: str) -> None:
    make = OPTIMIZERS[optimizer]
    with own_accelerate():
        assert_same(accelerated(True, make, trouble=BAD), accelerated(False, make, data=without(BAD)))


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "words"), [
    ((DynamicLossScaler,), r"got DynamicLossScaler\. Write `DynamicLossScaler\(\)`"),
    ((None, plain_sgd([nn.Parameter(torch.ones(1))])), r"optimizers.* Write `\[optimizer\]`"),
])  # fmt: skip
def test_wrong_arguments(arguments: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        ScaledSteps(*arguments)


def test_what_it_says_of_itself() -> None:
    steps: Any = ScaledSteps(1024.0, [plain_sgd([nn.Parameter(torch.ones(1))])])
    assert re.fullmatch(r"ScaledSteps\(DynamicLossScaler\(init_scale=1024.0, .*\), \[SGD\]\)", repr(steps))
    with pytest.raises(AttributeError, match="has no `update`: delete the call"):
        steps.update()
