"""Faults that are named at the start of a run, and healthy cases that look similar."""

from __future__ import annotations

import copy
import math
from typing import Any

import lightning as L
import pytest
import torch
from support import Toy, assert_same, batches, fit
from torch import nn

from lightning_amp import AmpPrecision
from lightning_amp.callbacks._early_checks import EarlyChecks


class Checks(L.Callback):
    """Calls the checks where the locator does."""

    def __init__(self) -> None:
        self.checks, self.texts, self.at = EarlyChecks(), list[str](), list[int]()

    def note(self, step: int, texts: list[str]) -> None:
        self.texts += texts
        self.at += [step] * len(texts)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.note(-1, self.checks.before_fit(trainer, module))

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.note(batch_idx, self.checks.before_batch(trainer))


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


def test_masks_and_markers_are_not_named() -> None:
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
    """A module with a teacher in half precision."""

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
        slow.mul_(0.999).add_(fast.to(slow), alpha=0.001)  # a teacher may be on the host


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
    """The average is a dictionary of tensors."""

    def make_teacher(self) -> None:
        self.averages = {name: p.detach().clone().bfloat16() for name, p in self.named_parameters()}

    def pairs(self) -> Any:
        return [(self.averages[name], p) for name, p in self.named_parameters()]


@pytest.mark.parametrize("module", [Student, Lerp, Replaced, Hidden, Shadow])
def test_an_average_in_half_precision_is_named(module: Any) -> None:
    (text,) = texts(module)
    assert "an average is written into it" in text
    assert ("fp16" in text) == (module is Lerp)
    assert "`averages`" in text or "teacher" in text


def test_an_average_in_a_callback_is_named() -> None:
    class Average(L.Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            self.ema = type("ModelEma", (), {})()
            self.ema.module = copy.deepcopy(pl_module.net).bfloat16()

        @torch.no_grad()
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            for slow, fast in zip(
                self.ema.module.state_dict().values(), pl_module.net.state_dict().values(), strict=True
            ):
                slow.copy_(slow * 0.99 + 0.01 * fast.to(slow.device))

    (text,) = texts(lambda: Toy(lambda params: torch.optim.Adam(params, lr=0.05)), "bf16", Average())
    assert "`Average.ema.module` is a copy of `net` in bf16" in text


class InFloat32(Student):
    dtype_of_teacher = torch.float32


class Reference(Student):
    """The teacher is frozen, as for distillation."""

    def write(self, slow: nn.Parameter, fast: nn.Parameter) -> None: ...


class HardCopy(Student):
    def write(self, slow: nn.Parameter, fast: nn.Parameter) -> None:
        slow.copy_(fast)


class Other(Student):
    """The written module has the shape of no trained one."""

    def make_teacher(self) -> None:
        self.teacher = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).bfloat16().requires_grad_(False)

    def pairs(self) -> Any:
        return [(p, torch.ones_like(p)) for p in self.teacher.parameters()]


@pytest.mark.parametrize("module", [InFloat32, Reference, HardCopy, Other])
def test_a_module_that_is_no_average_in_half_precision_is_not_named(module: Any) -> None:
    assert texts(module) == []


def test_the_advice_helps() -> None:
    class Cured(Student):
        def make_teacher(self) -> None:
            super().make_teacher()
            self.teacher.float()

    def moved(module: Any) -> float:
        """Return the share of the teacher's values that the average changes."""
        torch.manual_seed(0)
        ill = module()
        first = ill.teacher[0].weight.clone()
        fit(lambda: ill, AmpPrecision("bf16"), batches(12), max_epochs=1)
        return float((ill.teacher[0].weight != first).float().mean())

    assert texts(Cured) == []
    assert moved(Student) < 0.5
    assert moved(Cured) > 0.9
