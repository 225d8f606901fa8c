"""The shadow shares parameters and nothing else, and leaves trainer, loggers and random generators alone."""

import functools
import random
import threading
import types
import weakref
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from support.comparison_models import Rows
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection

from lightning_amp import AmpPrecision, GradientMonitor, MetricComparison, OverflowLocator
from lightning_amp.shadow._module_copy import copy_batch, copy_module
from lightning_amp.shadow._not_copied import NotCopied, NotCopiedError
from lightning_amp.shadow._shadow import Shadow
from lightning_amp.tracing import full_precision, paired_random


class Tracker:
    """A user's object that cannot be copied as a whole."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.values: list[float] = []


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.metrics = MetricCollection({"a": MeanMetric(), "b": MeanMetric()})
        self.values: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.values.append(1.0)
        self.metrics.update(batch)
        loss = self.net(batch).sum()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict(self.metrics)
        self.trainer.should_stop = True
        self.print("hello")
        assert isinstance(self.logger, Rows)
        self.logger.log_metrics({"by hand": 1.0}, step=0)
        self.logger.experiment.append("call")
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def copied(module: pl.LightningModule) -> Any:
    return copy_module(module, {})


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec.*is deprecated")
def test_a_step_of_the_shadow_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    module, logger, found = Module(), Rows(), {}

    class Probe(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            before = {name: value.clone() for name, value in module.state_dict().items()}
            shadow = Shadow(trainer, pl_module, trainer_attributes={"answer": 42})
            with torch.enable_grad():
                loss = shadow.call("training_step", batch, batch_idx)
            found["shadow"] = shadow
            found["loss"] = loss
            assert shadow.module.trainer.answer == 42
            assert isinstance(shadow.module.trainer, pl.Trainer)
            assert isinstance(shadow.module.trainer.strategy, SingleDeviceStrategy)
            assert shadow.module.trainer.lightning_module is shadow.module
            assert shadow.view.should_stop
            assert not trainer.should_stop
            assert module.values == []
            assert module.metrics["a"].update_count == 0
            assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
            assert "loss" not in trainer.callback_metrics
            assert "loss" in shadow.view.callback_metrics
            assert logger.rows == logger.calls == []
            trainer.should_stop = True

    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, logger=logger, callbacks=[Probe()], enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, limit_train_batches=1, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(module, DataLoader(torch.randn(4, 2), batch_size=4))
    shadow = found["shadow"]
    assert capsys.readouterr().out.count("hello") == 1
    assert [a is b for a, b in zip(module.parameters(), shadow.module.parameters(), strict=True)] == [True] * 4
    assert found["loss"].requires_grad
    assert shadow.module.values == [1.0]
    assert next(set(row) - {"epoch"} for _, row in logger.rows) == {"by hand"}
    assert len(logger.rows) == 3  # and Lightning's two, of the real step
    assert logger.calls == ["call"]


def test_what_is_shared_and_what_is_copied() -> None:
    module: Any = Module()
    module.tracker = Tracker()
    nested: dict[str, Any] = {"lock": threading.Lock(), "values": [], "deep": [{"generator": (i for i in range(3))}]}
    module.nested = nested
    module.generator = torch.Generator().manual_seed(1)
    module.data = TensorDataset(torch.zeros(2))
    module.non_leaf = module.net[0].weight * 2
    module.teacher = [nn.Linear(2, 2)]
    module.teacher[0].pupil = [module]
    module.method = module.values.append
    module.bound = module.configure_optimizers
    module.partial = functools.partial(Module.print, module)
    module.net[0].parent = [module]
    copy = copied(module)
    assert copy.net[0].weight is module.net[0].weight
    assert copy.net[1].running_mean is not module.net[1].running_mean
    assert copy.tracker.lock is module.tracker.lock
    assert copy.tracker.values is not module.tracker.values
    assert copy.nested["values"] is not module.nested["values"]
    assert copy.data is module.data
    assert not torch.equal(torch.rand(1, generator=copy.generator), torch.rand(1, generator=None))
    assert torch.equal(module.generator.get_state(), torch.Generator().manual_seed(1).get_state())
    assert torch.equal(copy.non_leaf, module.non_leaf)
    assert copy.non_leaf is not module.non_leaf
    assert copy.teacher[0] is not module.teacher[0]
    assert copy.teacher[0].weight is module.teacher[0].weight
    assert copy.teacher[0].pupil == [copy]
    assert copy.bound.__self__ is copy
    assert copy.partial.args == (copy,)
    assert copy.net[0].parent[0] is copy
    assert {id(m) for m in copy.modules()}.isdisjoint({id(m) for m in module.modules()})
    with pytest.raises(NotCopiedError, match=r"`Module\.nested\['deep'\]\[0\]\['generator'\]` cannot be copied"):
        next(copy.nested["deep"][0]["generator"])
    assert list(module.nested["deep"][0]["generator"]) == [0, 1, 2]


def test_a_failed_copy_leaves_no_half_filled_objects() -> None:
    module: Any = Module()
    values = [1.0, 2.0]
    unlucky: list[Any] = [values, threading.Lock(), 3.0]
    module.first = module.second = unlucky
    copy: Any = copied(module)
    assert copy.first[0] == [1.0, 2.0]
    assert copy.first[2] == 3.0
    assert copy.second is copy.first
    assert copy.first[0] is not values


def test_an_open_file_is_refused_when_used(tmp_path: Any) -> None:
    module: Any = Module()
    with (tmp_path / "log.txt").open("w") as file:
        module.file = file
        copy = copied(module)
    assert type(copy.file) is NotCopied
    with pytest.raises(NotCopiedError, match=r"`Module\.file` cannot be copied.*`__deepcopy__`"):
        copy.file.write("twice")


def test_hooks_that_close_over_the_module_see_the_copy() -> None:
    module: Any = Module()
    features: list[Tensor] = []
    module.features = features
    module.net[0].register_forward_hook(lambda _module, _inputs, output: module.values.append(output.numel()))
    module.net[0].register_forward_hook(lambda _module, _inputs, output: features.append(output))
    copied(module).net(torch.randn(3, 2))
    assert module.values == []
    assert features == []
    module.net(torch.randn(3, 2))
    assert len(module.values) == len(features) == 1


class Recorder:
    """Writes to a file, counts, and changes what the layer returns."""

    def __init__(self, file: Any) -> None:
        self.file, self.lock, self.calls = file, threading.Lock(), 0

    def __call__(self, module: Any, inputs: Any, output: Tensor) -> Tensor:
        with self.lock:
            self.calls += 1
            self.file.write("x")
        return output + 1


@pytest.mark.parametrize("kind", ["object", "bound method", "partial", "closure", "method of the module"])
def test_hooks_may_use_what_cannot_be_copied(kind: str, tmp_path: Any) -> None:
    module: Any = Module().eval()
    with (tmp_path / "log.txt").open("w") as file:
        recorder = Recorder(file)
        module.recorder = recorder  # of the module too: there it may not be used
        if kind == "method of the module":
            module.hook = types.MethodType(lambda self, *args: self.recorder(*args), module)
        hooks: dict[str, Any] = {
            "object": recorder,
            "bound method": recorder.__call__,
            "partial": functools.partial(recorder.__call__),
            "closure": lambda *args: recorder(*args) * 1,
            "method of the module": getattr(module, "hook", None),
        }
        module.net[0].register_forward_hook(hooks[kind])
        copy: Any = copied(module)
        x = torch.randn(3, 2)
        assert torch.equal(copy.net(x), module.net(x))
        assert recorder.calls == 1  # the copy has its own
        with pytest.raises(NotCopiedError, match=r"file` cannot be copied"):
            copy.recorder.file.write("y")
    assert (tmp_path / "log.txt").read_text() == "xx"


def test_a_weak_proxy_of_the_module_is_one_of_the_copy() -> None:
    module: Any = Module()
    module.lock = threading.Lock()
    module.profiled = [weakref.proxy(module)]
    copy: Any = copied(module)
    copy.profiled[0].values.append(1.0)
    assert copy.values == [1.0]
    assert module.values == []
    assert type(copy.profiled[0]) in weakref.ProxyTypes


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:The PyTorch ?Profiler")
def test_the_pytorch_profiler_switches_no_callback_off() -> None:
    comparison, monitor, locator = MetricComparison(), GradientMonitor(1), OverflowLocator()

    class Inf(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(batch).float().sum() * (torch.inf if batch_idx == 1 else 1.0)

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("val_loss", self.net(batch).sum())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, profiler=PyTorchProfiler(export_to_chrome=False),
        plugins=AmpPrecision("fp16", scaler=64.0), callbacks=[comparison, monitor, locator],
    )  # fmt: skip
    loader = DataLoader(torch.randn(8, 2), batch_size=4)
    trainer.fit(Inf(), loader, loader)
    assert [row.metric for row in comparison.table] == ["val_loss"]
    assert {row.name for row in monitor.table} == {"net.0", "net.1", "(all)"}
    assert [(report.cause, report.note) for report in locator.reports] == [("loss", "")]


def test_hooks_that_draw_from_a_generator_share_it() -> None:
    module: Any = Module().eval()
    noise = (torch.full((2,), float(i)) for i in range(10))
    module.net[0].register_forward_hook(lambda _module, _inputs, output: output + next(noise))
    copied(module).net(torch.zeros(1, 2))
    assert next(noise)[0] == 1.0


def test_imported_modules_are_shared() -> None:
    module: Any = Module()
    module.numpy = np
    assert copied(module).numpy is np


def test_half_precision_is_upcast_on_demand() -> None:
    module: Any = Module()
    module.net[0].bfloat16()
    module.again = module.net[0].weight  # another name for it
    module.net[1].half()
    copy: Any = copy_module(module, {}, upcast=True)
    assert {value.dtype for value in copy.state_dict().values()} == {torch.float32, torch.int64}
    assert copy.net[0].weight is copy.again
    assert torch.equal(copy.net[0].weight, module.net[0].weight.float())
    assert module.net[0].weight.dtype == torch.bfloat16
    assert module.net[1].running_mean.dtype == torch.float16
    assert copied(module).net[0].weight is module.net[0].weight


class Graphs:
    """A batch of a class of its own, as graph libraries have them."""

    def __init__(self, x: Tensor) -> None:
        self.store = {"x": x, "itself": self}


def test_half_precision_batches_are_upcast_however_deep() -> None:
    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    batch = {"list": [x, (x, 1)], "point": Point(x, 1), "graph": Graphs(x), "index": torch.arange(2), "name": "a"}
    copy = copy_batch(batch, upcast=True)
    assert copy["list"][0].dtype == torch.float32
    assert copy["list"][0].requires_grad
    assert copy["list"][1][0] is copy["list"][0] is copy["point"][0]
    assert isinstance(copy["point"], Point)
    assert copy["graph"].store["x"].dtype == torch.float32
    assert copy["graph"].store["itself"] is copy["graph"]
    assert copy["index"].dtype == torch.int64
    assert x.dtype == batch["graph"].store["x"].dtype == torch.bfloat16  # type: ignore[attr-defined]


def test_forward_redirection_of_ddp_is_rebound() -> None:
    # Lightning's DDP leaves the bound `forward` of the module as an attribute on it.
    module = Module()
    module.forward = types.MethodType(lambda self, x: self, module)  # type: ignore[method-assign]
    copy = copied(module)
    assert copy(torch.zeros(1)) is copy


@pytest.mark.parametrize("how", ["submodule", "in place", "lightning module"])
def test_compiled_modules_are_copied_uncompiled(how: str) -> None:
    calls: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(1)
        return graph.forward

    module: Any = Module()
    if how == "submodule":
        module.net = torch.compile(module.net, backend=backend)
    elif how == "in place":
        module.net.compile(backend=backend)
    else:
        from lightning.pytorch.utilities.compile import from_compiled

        module.forward = module.net.forward
        module = from_compiled(torch.compile(module, backend=backend))  # type: ignore[arg-type]
    copy = copied(module)
    assert copy.forward is not module.forward
    copy.net(torch.randn(3, 2))
    assert calls == []
    assert copy.training_step.__self__ is copy
    assert next(copy.parameters()) is next(module.parameters())
    assert torch.equal(next(module.buffers()), torch.zeros(2))


def test_buffers_can_be_used_with_gradients_in_a_validation() -> None:
    module = Module()
    with torch.inference_mode():
        copy = copied(module)
    copy.eval()
    x = torch.randn(3, 2, requires_grad=True)
    copy.net(x).sum().backward()  # BatchNorm saves its statistics for the backward, which must be ordinary tensors
    assert x.grad is not None


def test_recurrent_layers_keep_their_weights() -> None:
    class Recurrent(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(2, 3)

    module = Recurrent()
    copy, x = copied(module), torch.randn(4, 1, 2)
    with torch.no_grad():
        module.rnn.weight_hh_l0.mul_(2)
    assert torch.equal(copy.rnn(x)[0], module.rnn(x)[0])


def test_batches_are_copied_deep_but_not_their_storage() -> None:
    storage = torch.arange(1000.0)
    shared = storage[3:5]
    batch = {"x": shared, "again": [shared], "names": ["a"], "array": np.zeros(2), "point": Point(shared, 1)}
    copy = copy_batch(batch)
    copy["x"] += 1
    copy["names"].append("b")
    copy["array"] += 1
    assert shared.tolist() == [3.0, 4.0]
    assert batch["names"] == ["a"]
    assert batch["array"].tolist() == [0.0, 0.0]
    assert copy["again"][0] is copy["x"]
    assert isinstance(copy["point"], Point)
    assert copy["x"].untyped_storage().nbytes() == 8


class Point(tuple):
    _fields = ("x", "y")

    def __new__(cls, x: Any, y: Any) -> "Point":
        return super().__new__(cls, (x, y))


def test_random_generators_are_paired() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    pl.seed_everything(1, verbose=False)
    with paired_random("cpu"):
        first = draw()
    with paired_random("cpu"), pytest.raises(ZeroDivisionError):
        assert draw() == first
        raise ZeroDivisionError
    assert draw() == first
    assert draw() != first


def precisions() -> dict[str, str]:
    backends: Any = torch.backends
    switches = {
        "all": backends, "cuda": backends.cudnn, "matmul": backends.cuda.matmul, "conv": backends.cudnn.conv,
        "rnn": backends.cudnn.rnn, "cpu matmul": backends.mkldnn.matmul, "cpu conv": backends.mkldnn.conv,
        "cpu rnn": backends.mkldnn.rnn,
    }  # fmt: skip
    return {name: switch.fp32_precision for name, switch in switches.items()}


@pytest.mark.parametrize("setting", ["default", "high", "medium", "all tf32", "matmul tf32"])
def test_reduced_precision_is_off_and_restored(setting: str) -> None:
    backends: Any = torch.backends
    if setting in ("high", "medium"):
        torch.set_float32_matmul_precision(setting)
    elif setting == "all tf32":
        backends.fp32_precision = "tf32"
    elif setting == "matmul tf32":
        backends.cuda.matmul.fp32_precision = "tf32"
    try:
        found = precisions()
        with torch.autocast("cpu", dtype=torch.bfloat16), full_precision("cpu"):
            assert not torch.is_autocast_enabled("cpu")
            leaves = {value for name, value in precisions().items() if name not in ("all", "cuda")}
            assert leaves <= {"ieee", "none"}
        assert precisions() == found
        if setting == "all tf32":  # what was inherited still is
            backends.fp32_precision = "ieee"
            assert precisions()["matmul"] == "ieee"
    finally:
        backends.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")
        backends.cudnn.conv.fp32_precision = backends.cudnn.rnn.fp32_precision = "tf32"
