"""What is said before it costs a run, and what looks like it and is well."""

from __future__ import annotations

import copy
import math
from typing import Any

import lightning as L
import pytest
import torch
from support import Toy, assert_same, batches, fit
from torch import Tensor, nn

from lightning_amp import AmpPrecision
from lightning_amp.callbacks._early_checks import EarlyChecks


class Checks(L.Callback):
    """Calls them where the locator does."""

    def __init__(self) -> None:
        self.checks, self.texts, self.at = EarlyChecks(), list[str](), list[int]()

    def note(self, step: int, texts: list[str]) -> None:
        self.texts += texts
        self.at += [step] * len(texts)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.note(-1, self.checks.before_fit(trainer, module))

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.note(batch_idx, self.checks.before_batch(trainer, module))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note(batch_idx, self.checks.after_first_step(trainer, module))


def texts(module: Any, precision: str = "bf16", *callbacks: Any, num: int = 12) -> list[str]:
    checks = Checks()
    plugin = AmpPrecision(precision, skip_nonfinite=True)
    watched = fit(module, plugin, batches(num), callbacks=[*callbacks, checks], max_epochs=1)
    assert_same(watched, fit(module, AmpPrecision(precision), batches(num), callbacks=[*callbacks], max_epochs=1))
    assert len(set(checks.texts)) == len(checks.texts)
    return checks.texts


# -- values ------------------------------------------------------------------------------------------------------------


def test_values_that_are_not_finite_are_named() -> None:
    class Bad(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.net[0].weight.data[1, 1] = math.nan
            self.net[2].bias.data[0] = -math.inf
            self.norm = nn.BatchNorm1d(3)
            self.norm.running_var[1] = math.inf
            self.register_buffer("inverse_std", torch.tensor([1.0, math.inf]))

    weights, buffers = texts(Bad)
    assert "`net.0.weight`, `net.2.bias`" in weights
    assert "`inverse_std`, `norm.running_var`" in buffers


def test_masks_and_markers_are_well() -> None:
    class Masks(Toy):
        def __init__(self) -> None:
            super().__init__()
            mask = torch.full((4, 4), -math.inf).triu(1)
            self.register_buffer("mask", mask)
            self.frozen_mask = nn.Parameter(mask.clone(), requires_grad=False)
            self.register_buffer("best", torch.tensor(math.inf))
            self.register_buffer("unset", torch.full((3,), math.nan))
            self.register_buffer("distance", torch.tensor([[0, math.inf], [math.inf, 0]]))
            self.register_buffer("none", None)
            self.register_buffer("empty", torch.zeros(0))

    assert texts(Masks) == []


# -- averages ----------------------------------------------------------------------------------------------------------


class Student(Toy):
    """Has a teacher in half precision."""

    dtype_of_teacher = torch.bfloat16

    def __init__(self) -> None:
        super().__init__(lambda params: torch.optim.AdamW([p for p in params if p.requires_grad], lr=0.05))
        self.make_teacher()

    def make_teacher(self) -> None:
        self.teacher = copy.deepcopy(self.net).to(self.dtype_of_teacher).requires_grad_(False)

    def pairs(self) -> Any:
        return zip(self.teacher.parameters(), self.net.parameters(), strict=True)

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for slow, fast in self.pairs():
            self.write(slow, fast)

    def write(self, slow: nn.Parameter, fast: nn.Parameter) -> None:
        slow.mul_(0.999).add_(fast.to(slow.dtype), alpha=0.001)


class Lerp(Student):
    dtype_of_teacher = torch.float16

    def write(self, slow: nn.Parameter, fast: nn.Parameter) -> None:
        slow.lerp_(fast.to(slow.dtype), 0.0001)


class Replaced(Student):
    def write(self, slow: nn.Parameter, fast: nn.Parameter) -> None:
        slow.data = slow.data * 0.99 + fast.data.to(slow.dtype) * 0.01


class Hidden(Student):
    def make_teacher(self) -> None:
        super().make_teacher()
        teacher = self.teacher
        del self.teacher
        self.__dict__["teacher"] = [teacher]

    def pairs(self) -> Any:
        return zip(self.__dict__["teacher"][0].parameters(), self.net.parameters(), strict=True)


class Shadow(Student):
    """A dictionary of tensors."""

    def make_teacher(self) -> None:
        self.averages = {name: p.detach().clone().bfloat16() for name, p in self.named_parameters()}

    def pairs(self) -> Any:
        return [(self.averages[name], p) for name, p in self.named_parameters()]


@pytest.mark.parametrize("module", [Student, Lerp, Replaced, Hidden, Shadow])
def test_an_average_in_half_precision_stands_still(module: Any) -> None:
    (text,) = texts(module)
    assert "an average is written into it" in text
    assert ("fp16" in text) == (module is Lerp)
    assert "`averages`" in text or "teacher" in text


def test_one_that_a_callback_keeps() -> None:
    class Average(L.Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            self.ema = type("ModelEma", (), {})()
            self.ema.module = copy.deepcopy(pl_module.net).bfloat16()

        @torch.no_grad()
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            for slow, fast in zip(
                self.ema.module.state_dict().values(), pl_module.net.state_dict().values(), strict=True
            ):
                slow.copy_(slow * 0.99 + 0.01 * fast)

    (text,) = texts(lambda: Toy(lambda params: torch.optim.Adam(params, lr=0.05)), "bf16", Average())
    assert "`Average.ema.module` is a copy of `net` in bf16" in text


class InFloat32(Student):
    dtype_of_teacher = torch.float32


class Reference(Student):
    """A frozen one, as for distillation."""

    def write(self, slow: nn.Parameter, fast: nn.Parameter) -> None: ...


class HardCopy(Student):
    def write(self, slow: nn.Parameter, fast: nn.Parameter) -> None:
        slow.copy_(fast)


class Other(Student):
    """Half precision, written to, and of no trained module's shape."""

    def make_teacher(self) -> None:
        self.teacher = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).bfloat16().requires_grad_(False)

    def pairs(self) -> Any:
        return [(p, torch.ones_like(p)) for p in self.teacher.parameters()]


@pytest.mark.parametrize("module", [InFloat32, Reference, HardCopy, Other])
def test_what_is_no_average_in_half_precision_is_not_called_one(module: Any) -> None:
    assert texts(module) == []


def test_the_advice_helps() -> None:
    class Cured(Student):
        def make_teacher(self) -> None:
            super().make_teacher()
            self.teacher.float()

    def moved(module: Any) -> float:
        """The share of the teacher's values that the average changes."""
        torch.manual_seed(0)
        ill = module()
        first = ill.teacher[0].weight.clone()
        fit(lambda: ill, AmpPrecision("bf16"), batches(12), max_epochs=1)
        return float((ill.teacher[0].weight != first).float().mean())

    assert texts(Cured) == []
    assert moved(Student) < 0.5
    assert moved(Cured) > 0.9


# -- optimizers --------------------------------------------------------------------------------------------------------


def test_an_eps_that_is_zero_in_the_state() -> None:
    checks = EarlyChecks()
    parameter = nn.Parameter(torch.ones(3))

    def trainer_with(eps: float, dtype: torch.dtype) -> Any:
        optimizer = torch.optim.Adam([parameter], eps=eps)
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3, dtype=dtype)}
        return type("T", (), {"optimizers": [optimizer], "lr_scheduler_configs": []})()

    for eps, dtype in ((1e-8, torch.float32), (1e-8, torch.bfloat16), (1e-4, torch.float16), (0.0, torch.float16)):
        assert EarlyChecks().after_first_step(trainer_with(eps, dtype), Toy()) == []
    trainer = trainer_with(1e-8, torch.float16)
    (text,) = checks.after_first_step(trainer, Toy())
    assert text.startswith("The optimizer (Adam) keeps its state in float16, in which its `eps` of 1e-08 is zero")
    assert checks.after_first_step(trainer, Toy()) == checks.before_batch(trainer, Toy()) == []


def scheduled(function: Any, tensor: bool = False) -> Any:
    def make() -> Toy:
        lr = torch.tensor(0.1) if tensor else 0.1
        return Toy(
            lambda params: torch.optim.SGD(params, lr=lr),
            schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, function),
        )

    return make


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_learning_rate_that_is_not_finite_is_named_before_its_step(value: float, tensor: bool) -> None:
    checks = Checks()
    module = scheduled(lambda step: 1.0 if step < 3 else value, tensor)
    fit(module, AmpPrecision("bf16"), batches(8), callbacks=[checks])
    (text,) = checks.texts
    assert checks.at == [3]
    what = "NaN" if math.isnan(value) else "infinite"
    assert text.startswith(
        f"The optimizer (SGD): `lr` is {what}, as `LambdaLR` has set it, by the function at test_early"
    )


@pytest.mark.parametrize(
    "function", [lambda step: step / 10, lambda step: 0.0, lambda step: 1 / (1 + step), lambda step: 1e-30]
)
def test_usual_schedules_are_well(function: Any) -> None:
    assert texts(scheduled(function)) == []


def test_a_negative_rate_and_unusual_groups_are_well() -> None:
    class Two(Toy):
        def configure_optimizers(self) -> Any:
            one = torch.optim.SGD(self.net[0].parameters(), lr=0.01, momentum=0.9, maximize=False)
            one.param_groups[0]["lr"] = -0.01
            two = [{"params": [p], "lr": 0.1, "betas": (0.9, 0.99)} for p in self.net[2].parameters()]
            return torch.optim.SGD([*one.param_groups, *two], lr=0.1)

    assert texts(Two) == []


def test_the_group_is_named() -> None:
    class Groups(Toy):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([{"params": [p], "weight_decay": 0.1} for p in self.parameters()])

        def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
            self.trainer.optimizers[0].param_groups[2]["weight_decay"] = math.inf

    (text,) = texts(Groups)
    assert text.startswith("The optimizer (AdamW, parameter group 2): `weight_decay` is infinite.")
