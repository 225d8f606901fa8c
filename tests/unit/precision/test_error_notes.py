"""Notes on torch's errors under autocast say where to write what, and this works."""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from typing import Any

import lightning as L
import pytest
import torch
from support import DEVICE, Manual, Toy, batches, fit
from support.trainers import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp import AmpPrecision, FabricAmpPrecision
from lightning_amp.precision import fp32_region

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support"),
]

OFF = torch.autocast(DEVICE, enabled=False)


class Layer(nn.Module):
    """Has the fault, or its cure."""

    remedy = r"call `\.float\(\)` on each (float16|bfloat16) tensor of that operation"

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
    remedy = r"float16 does not hold that number: write `torch\.finfo\(x\.dtype\)\.min`"
    precisions = ("fp16",)

    def faulty(self, x: Tensor) -> Tensor:
        return x.masked_fill(x > 0, torch.finfo(x.dtype).min if self.cured else -1e9).clamp(-1, 1)


class Convolution(Layer):
    where = "`net.1.conv` (Conv1d)"

    def faulty(self, x: Tensor) -> Tensor:
        with OFF:
            return self.conv(self.fixed(x)[:, None])[:, 0]


def operation(name: str, faulty: Any, remedy: str = Layer.remedy, *precisions: str) -> type[Layer]:
    """Return a layer with an operation that autocast leaves alone; `faulty(x, other)` has the inputs."""

    def run(self: Layer, x: Tensor) -> Tensor:
        y = faulty(self.fixed(x[:, :8]), self.weight[: len(x)])
        return (y.abs() if y.is_complex() else y).float().sum() + x

    return type(name, (Layer,), {"faulty": run, "remedy": remedy, **({"precisions": precisions} if precisions else {})})


def zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x, dtype=torch.float32)


def product(x: Tensor, _: Tensor) -> Tensor:
    """Multiply a complex32 matrix in fp16, or with the remedy a complex64 one."""
    z = torch.complex(x.half(), x.half()).to(torch.complex64 if x.dtype == torch.float32 else torch.complex32)
    return z @ z.T


def recurrent(x: Tensor, _: Tensor) -> Tensor:
    if x.dtype != torch.float32:  # as `nn.LSTM` on some CPUs
        raise RuntimeError("could not create a primitive descriptor for the LSTM forward propagation primitive.")
    return x


OPERATIONS = [
    # two dtypes that the error names, each in another way
    operation("Cross", lambda x, w: torch.linalg.cross(x[:, :3], w[:, :3])),
    operation("InPlace", lambda x, w: zeros(x)[:, :8].addmm_(x, torch.ones(8, 8, device=x.device))),
    operation("Put", lambda x, _: zeros(x).index_put_((torch.ones(len(x), dtype=torch.long, device=x.device),), x)),
    operation("Bilinear", lambda x, _: nn.functional.bilinear(x, x, torch.ones(2, 8, 8, device=x.device))),
    operation("Lerp", lambda x, w: torch.lerp(x, w, 0.5)),
    operation("Dot", lambda x, w: torch.dot(x[0], w[0])),
    operation("Bag", lambda x, w: nn.functional.embedding_bag((x > 9).long(), w, per_sample_weights=x, mode="sum")),
    operation("Products", OFF(torch.inner)),
    operation("Recurrent", lambda x, _: OFF(nn.RNN(8, 8, device=x.device))(x)[0]),  # torch raises a `ValueError`
    # two dtypes, of which the error names none
    operation("Scatter", lambda x, _: zeros(x).scatter_add_(0, torch.zeros_like(x, dtype=torch.long), x)),
    operation("Inner", torch.inner),
    # an operation without such a kernel
    operation("Descriptor", recurrent, r"this CPU has no b?float16 kernel for that layer: keep the layer in fp32"),
    operation("Determinant", lambda x, _: torch.linalg.det(x[:, : len(x)]), "does not support: call"),
    operation("Complex", lambda x, _: torch.complex(x, x), Layer.remedy, "bf16"),
    operation("ToNumpy", lambda x, _: torch.from_numpy(x.detach().cpu().numpy()), Layer.remedy, "bf16"),
    operation("ComplexProduct", product, r"call `\.to\(torch\.complex64\)` on each complex32", "fp16"),
]


class PseudoInverse(Layer):
    remedy = r"still fails, do so inside `with lightning_amp\.precision\.fp32_region\(\):`"

    def faulty(self, x: Tensor) -> Tensor:
        with fp32_region() if self.cured else contextlib.nullcontext():
            return x + torch.linalg.pinv(self.fixed(x)).sum()


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


class OwnFunction(Layer):
    where, remedy = "the backward", PseudoInverse.remedy

    def faulty(self, x: Tensor) -> Tensor:
        with fp32_region() if self.cured else contextlib.nullcontext():
            return Product.apply(self.fixed(x), self.weight)  # pyright: ignore[reportReturnType]


FAULTS: list[type[Layer]] = [Constant, Convolution, *OPERATIONS, PseudoInverse, OwnFunction]
CASES = [(f, p) for f in FAULTS for p in getattr(f, "precisions", ("fp16", "bf16"))]


def module(layer: nn.Module) -> Toy:
    return Toy(net=nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 1)))


def failed(layer: nn.Module, precision: str, **kwargs: Any) -> BaseException:
    with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
        fit(lambda: module(layer), AmpPrecision(precision), batches(2), **kwargs)
    return caught.value


@pytest.mark.parametrize(("fault", "precision"), CASES)
def test_an_error_says_where_and_what_to_write(fault: Any, precision: str) -> None:
    layer = fault(False)
    error = failed(layer, precision)
    (note,) = error.__notes__
    where = getattr(layer, "where", f"`net.1` ({fault.__name__})")
    assert note.startswith(f"lightning_amp: raised in {where}, test_error_notes.py:")
    assert re.search(layer.remedy, note)
    assert "autocast is off" not in note
    assert any(entry.filename == __file__ for entry in traceback.extract_tb(error.__traceback__))


@pytest.mark.parametrize(("fault", "precision"), CASES)
def test_what_it_says_works(fault: Any, precision: str) -> None:
    trainer = fit(lambda: module(fault(True)), AmpPrecision(precision), batches(2))
    assert trainer.global_step == 2
    fit(lambda: module(fault(False)), AmpPrecision("fp32"), batches(2))  # in which it was no fault


def test_in_manual_optimization_and_in_the_step_itself_it_is_said_once() -> None:
    class ByHand(Manual):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            x = self.net[0](batch)
            weight = torch.ones(16, 1, device=x.device, requires_grad=True)
            self.manual_backward(Product.apply(x, weight).float().sum())  # pyright: ignore

    class Step(Toy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return self.net(batch).masked_fill(batch.sum(1, keepdim=True) > 9, -1e9).float().sum()

    for make, where in ((ByHand, "the backward, test_error_notes.py"), (Step, "`training_step`, test_error_notes.py")):
        with pytest.raises(RuntimeError) as caught:
            fit(make, AmpPrecision("fp16"), batches(2))
        (note,) = caught.value.__notes__
        assert f"raised in {where}" in note


# -- float64 batches ---------------------------------------------------------------------------------------------------


class Rows(Toy):
    """Reads `batch["x"][0]`; the rows also have an index, and a time in float64 that no layer reads."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch["x"][0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch["x"][0])


def rows(dtype: torch.dtype) -> DataLoader[Any]:
    data: Any = [
        {"x": (torch.randn(8, dtype=dtype),), "t": torch.tensor(1.7e9 + i, dtype=torch.float64)} for i in range(4)
    ]
    return DataLoader(data, batch_size=2)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_an_operation_that_refuses_float64(precision: str) -> None:
    for run in ("fit", "validate"):
        trainer = quiet_trainer(plugins=[AmpPrecision(precision)])
        with pytest.raises(RuntimeError, match="same dtype") as caught:
            getattr(trainer, run)(Rows(), rows(torch.float64), *([rows(torch.float32)] if run == "fit" else []))
        (note,) = caught.value.__notes__
        assert "`batch['x'][0]`, `batch['t']` are float64, and the module is float32" in note


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_in_fabric(precision: str) -> None:
    fabric = L.Fabric(accelerator=DEVICE, devices=1, plugins=[FabricAmpPrecision(precision)])
    model: Any = fabric.setup(module(nn.Identity()).net)
    with pytest.raises(RuntimeError, match="same dtype") as caught:
        model(torch.ones(2, 8, dtype=torch.float64, device=DEVICE))
    assert "`input` is float64, and the module is float32" in caught.value.__notes__[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_float64_entries_stay_as_they_are(precision: str) -> None:
    """In float32 the times of this batch, one second apart, would be one value."""
    times: list[Tensor] = []

    class Looks(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            times.append(batch["t"].cpu())
            return self.loss(batch["x"][0])

    fit(Looks, AmpPrecision(precision), rows(torch.float32))
    assert torch.equal(torch.cat(times).diff(), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("precision", "faulty"),
    [
        ("fp32", lambda x: x.half().masked_fill(x > -9, -1e9)),
        ("bf16", lambda x: torch.zeros_like(x).masked_fill(x, 1.0)),  # it wants booleans
        ("fp16", lambda x: nn.functional.embedding(x, torch.ones(8, 8, device=x.device))),  # it wants integers
        ("fp16", lambda x: torch.complex(x.long(), x.long())),  # float16, which it supports, is not what it got
        ("fp16", lambda x: x @ torch.ones(3, 3, device=x.device)),
    ],
)
def test_other_errors_have_no_note(precision: str, faulty: Any) -> None:
    layer = Layer(False)
    layer.faulty = faulty
    assert not hasattr(failed(layer, precision), "__notes__")
