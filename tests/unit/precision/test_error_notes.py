"""Notes on torch's errors under autocast say where to write what, and this works."""

from __future__ import annotations

import sys
import traceback
from typing import Any

import pytest
import torch
from support import DEVICE, Toy, batches, fit
from support.trainers import quiet_trainer
from torch import Tensor, nn

from lightning_amp import AmpPrecision

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")

OFF = torch.autocast(DEVICE, enabled=False)


class Layer(nn.Module):
    """Has the fault, or its cure."""

    def __init__(self, cured: bool) -> None:
        super().__init__()
        self.cured = cured
        self.linear, self.conv = nn.Linear(8, 8), nn.Conv1d(1, 1, 3, padding=1)
        self.weight = nn.Parameter(torch.ones(8, 8))

    def fixed(self, x: Tensor) -> Tensor:
        return x.float() if self.cured else x

    def forward(self, x: Tensor) -> Tensor:
        return self.faulty(self.linear(x))

    def faulty(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Constant(Layer):
    remedy = r"fp16 ends at 65,504 and does not hold the number: write `torch\.finfo\(x\.dtype\)\.min`"
    precisions = ("fp16",)

    def faulty(self, x: Tensor) -> Tensor:
        return x.masked_fill(x > 0, torch.finfo(x.dtype).min if self.cured else -1e9).clamp(-1, 1)


class Products(Layer):
    remedy = r"meets a float32 tensor where autocast is off: call `\.float\(\)` on the input"

    def faulty(self, x: Tensor) -> Tensor:
        with OFF:
            return self.fixed(x) @ self.weight


class Einsum(Products):
    def faulty(self, x: Tensor) -> Tensor:
        with OFF:
            return torch.einsum("bi,ij->bj", self.fixed(x), self.weight)


class Convolution(Products):
    where = "`net.1.conv` (Conv1d)"

    def faulty(self, x: Tensor) -> Tensor:
        with OFF:
            return self.conv(self.fixed(x)[:, None])[:, 0]


class Put(Layer):
    remedy = r"are put into a float32 tensor: call `\.to\(target\.dtype\)` on them"

    def faulty(self, x: Tensor) -> Tensor:
        target = torch.zeros_like(x, dtype=torch.float32)
        target[torch.arange(len(x), device=x.device)] = x.to(target.dtype) if self.cured else x
        return target


class Scatter(Layer):
    remedy = r"autocast made them (fp16|bf16): call `\.to\(target\.dtype\)` on them"

    def faulty(self, x: Tensor) -> Tensor:
        target = torch.zeros_like(x, dtype=torch.float32)
        index = torch.zeros_like(x, dtype=torch.long)
        return target.scatter_add_(0, index, x.to(target.dtype) if self.cured else x)


class IndexAdd(Put):
    def faulty(self, x: Tensor) -> Tensor:
        target = torch.zeros_like(x, dtype=torch.float32)
        return target.index_add(0, torch.arange(len(x), device=x.device), x.to(target.dtype) if self.cured else x)


class ToNumpy(Layer):
    remedy = r"NumPy has no bf16: call `\.float\(\)` before `\.numpy\(\)`"
    precisions = ("bf16",)

    def faulty(self, x: Tensor) -> Tensor:
        self.fixed(x.detach()).cpu().numpy()
        return x


class Product(torch.autograd.Function):
    """Ignores autocast, as most functions do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.mm(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient.mm(weight.t()), x.t().mm(gradient)


class CuredProduct(Product):
    forward = staticmethod(torch.amp.custom_fwd(Product.forward, device_type=DEVICE, cast_inputs=torch.float32))
    backward = staticmethod(torch.amp.custom_bwd(Product.backward, device_type=DEVICE))


class OwnFunction(Layer):
    where = "`Product.backward`, a `torch.autograd.Function`"
    remedy = (
        rf"decorate `Product\.forward` with `torch\.amp\.custom_fwd\(device_type='{DEVICE}', cast_inputs="
        rf"torch\.float32\)` and `Product\.backward` with `torch\.amp\.custom_bwd\(device_type='{DEVICE}'\)`"
    )

    def faulty(self, x: Tensor) -> Tensor:
        return (CuredProduct if self.cured else Product).apply(x, self.weight)  # pyright: ignore


FAULTS = [Constant, Products, Einsum, Convolution, Put, Scatter, IndexAdd, ToNumpy, OwnFunction]
CASES = [(f, p) for f in FAULTS for p in getattr(f, "precisions", ("fp16", "bf16"))]


def module(layer: nn.Module) -> Toy:
    return Toy(net=nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 1)))


def failed(layer: nn.Module, precision: str, **kwargs: Any) -> BaseException:
    with pytest.raises((RuntimeError, TypeError)) as caught:
        fit(lambda: module(layer), AmpPrecision(precision), batches(2), **kwargs)
    return caught.value


@pytest.mark.parametrize(("fault", "precision"), CASES)
def test_an_error_says_where_and_what_to_write(fault: Any, precision: str) -> None:
    error = failed(fault(False), precision)
    (note,) = error.__notes__
    where = getattr(fault, "where", f"`net.1` ({fault.__name__})")
    assert note.startswith(f"lightning_amp: raised under {precision} autocast in {where}, test_error_notes.py:")
    with pytest.raises(AssertionError, match=fault.remedy):
        raise AssertionError(note)
    assert any(entry.filename == __file__ for entry in traceback.extract_tb(error.__traceback__))


@pytest.mark.parametrize(("fault", "precision"), CASES)
def test_what_it_says_works(fault: Any, precision: str) -> None:
    trainer = fit(lambda: module(fault(True)), AmpPrecision(precision), batches(2))
    assert trainer.global_step == 2
    fit(lambda: module(fault(False)), AmpPrecision("fp32"), batches(2))  # in which it was no fault


@pytest.mark.parametrize("fault", [Constant, Products])
def test_in_validation(fault: Any) -> None:
    class Validates(Toy):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.loss(batch)

    ill = Validates(net=nn.Sequential(nn.Linear(8, 8), fault(False), nn.Linear(8, 1)))
    trainer = quiet_trainer(plugins=[AmpPrecision("fp16")])
    with pytest.raises(RuntimeError) as caught:
        trainer.validate(ill, batches(1), verbose=False)
    (note,) = caught.value.__notes__
    assert f"in `net.1` ({fault.__name__}), test_error_notes.py" in note


def test_in_manual_optimization_and_in_the_step_itself_it_is_said_once() -> None:
    class Manual(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            x = self.net[0](batch)
            weight = torch.ones(16, 1, device=x.device, requires_grad=True)
            self.manual_backward(Product.apply(x, weight).float().sum())  # pyright: ignore

    class Step(Toy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return self.net(batch).masked_fill(batch.sum(1, keepdim=True) > 9, -1e9).float().sum()

    for make, where in ((Manual, "`Product.backward`, a"), (Step, "`training_step`, test_error_notes.py")):
        with pytest.raises(RuntimeError) as caught:
            fit(make, AmpPrecision("fp16"), batches(2))
        (note,) = caught.value.__notes__
        assert f"autocast in {where}" in note


class OwnHalf(Layer):
    """Has half precision of its own, so it fails in fp32 as well."""

    def __init__(self) -> None:
        super().__init__(False)
        self.register_buffer("table", torch.ones(8, 8, dtype=torch.float16))

    def faulty(self, x: Tensor) -> Tensor:
        with OFF:
            return x.float() @ self.table


class Shapes(Layer):
    def faulty(self, x: Tensor) -> Tensor:
        return x @ x.new_ones(3, 3)


class Double(Layer):
    def faulty(self, x: Tensor) -> Tensor:
        with OFF:
            return x.float() @ self.weight.double()


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("layer", [OwnHalf, lambda: Shapes(False), lambda: Double(False)])
def test_other_errors_have_no_note(layer: Any, precision: str) -> None:
    assert not hasattr(failed(layer(), precision), "__notes__")


def test_in_fp32_there_is_no_note() -> None:
    class Own(Layer):
        def faulty(self, x: Tensor) -> Tensor:
            return x.half().masked_fill(x > -9, -1e9)

    assert not hasattr(failed(Own(False), "fp32"), "__notes__")
