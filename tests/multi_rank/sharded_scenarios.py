"""`ModelParallelStrategy` with several ways of sharding, on two and on four gloo ranks. `test_sharded.py` runs this
script.

Each scenario is compared with one process that trains the same module in fp32 without the bad batches.
"""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from multi_rank import ranks
from multi_rank.ranks import (
    BAD,
    EVERY_KIND,
    FEATURES,
    FIRST_WINDOWS,
    WINDOWS,
    Scenarios,
    Trouble,
    Troubled,
    data,
    folder,
    fused,
    initialise,
    scaled,
    whole,
)
from support import WithoutAutocast, all_of_ours
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.optim.lr_scheduler import ExponentialLR

from lightning_amp import AmpPrecision, DynamicLossScaler
from lightning_amp.scaling import ScaledSteps


class Model(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 16)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.down = nn.Linear(16, 8)
        self.head = nn.Linear(8, 1)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(torch.tanh(self.norm(self.up(x))))) * self.gain


class Regression(Troubled):
    """Build the module; `layout` contains "tp" (up and down), "fsdp" (everything) or "fsdp head"; "" trains in one
    process.
    """

    def __init__(
        self,
        layout: str,
        trouble: Trouble | None = None,
        optimizer: Any = None,
        *,
        norm: bool = False,
        policy: MixedPrecisionPolicy | None = None,
        shard_trouble: int | None = None,
    ) -> None:
        super().__init__(trouble, optimizer)
        self.layout = layout
        self.shard_trouble = shard_trouble
        self.policy = policy or MixedPrecisionPolicy()
        self.model = Model(norm)
        self.is_parallel = False

    def configure_model(self) -> None:
        if not self.layout or self.is_parallel:
            return
        self.is_parallel = True
        tensor_mesh, data_mesh = self.device_mesh["tensor_parallel"], self.device_mesh["data_parallel"]
        if "tp" in self.layout:
            parallelize_module(self.model, tensor_mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if "fsdp head" in self.layout:
            for module in (self.model.up, self.model.down, self.model.head):
                fully_shard(module, mesh=data_mesh, mp_policy=self.policy)
            self.data_group = data_mesh.get_group()
            self.model.gain.register_post_accumulate_grad_hook(self.average)
        elif "fsdp" in self.layout:
            fully_shard(self.model, mesh=data_mesh, mp_policy=self.policy)

    def average(self, parameter: nn.Parameter) -> None:
        """The user reduces the gradients of parameters that nobody shards."""
        torch.distributed.all_reduce(parameter.grad, group=self.data_group)
        parameter.grad.div_(self.data_group.size())

    def loss(self, x: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.model(x).float(), x.sum(1, keepdim=True))

    def on_after_backward(self) -> None:
        if self.shard_trouble == self.trainer.fit_loop.epoch_loop.batch_idx and self.global_rank == 1:
            gradient = self.model.down.weight.grad
            (gradient.to_local() if isinstance(gradient, DTensor) else gradient).fill_(torch.inf)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch[0]), sync_dist=True)


def train(
    module: L.LightningModule,
    mesh: tuple[int, int] = (1, 1),
    without: tuple[int, ...] = (),
    plugin: Any = None,
    distributed_checkpoint: bool = True,
    validate: bool = False,
    **kwargs: Any,
) -> tuple[L.Trainer, dict[str, Any]]:
    initialise(module)
    replicas, shards = mesh
    strategy = partial(ModelParallelStrategy, replicas, shards, save_distributed_checkpoint=distributed_checkpoint)
    loader = data(replicas, without, int(os.environ["LOCAL_RANK"]) // shards)
    validation = {"val_dataloaders": loader} if validate else {}
    trainer, result = ranks.train(module, loader, plugin, strategy, replicas * shards, **validation, **kwargs)
    result["optimizer"] = [whole(v) for v in result["optimizer"]]
    result["parameters"] = [whole(p) for p in module.parameters()]
    meshes = [getattr(p, "device_mesh", None) for p in module.parameters()]
    result["kinds"] = [str(mesh and mesh.mesh_dim_names) for mesh in meshes]
    return trainer, result


def compared(
    mesh: tuple[int, int],
    make: Callable[[str, Trouble], L.LightningModule],
    layout: str,
    trouble: Trouble = EVERY_KIND,
    bad: tuple[int, ...] = BAD,
    plugin: Callable[[], AmpPrecision] = scaled,
    **kwargs: Any,
) -> Any:
    """Run with trouble; on rank 0 also run one process in plain fp32 without the bad batches."""
    result = {"with": train(make(layout, trouble), mesh, plugin=plugin(), **kwargs)[1]}
    if torch.distributed.get_rank() == 0:
        result["single"] = train(make("", {}), (1, 1), bad, plugin=AmpPrecision("fp32"), **kwargs)[1]
    return result


SCENARIOS: dict[int, Scenarios] = {2: {}, 4: {}}


def scenario(world_size: int) -> Any:
    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        SCENARIOS[world_size][function.__name__] = function
        return function

    return register


def regression(kind: type[Regression] | None = None) -> Any:
    return lambda layout, trouble: (kind or Regression)(layout, trouble, fused)


BY_VALUE: dict[str, Any] = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}
SCENARIOS[2] |= {
    "fsdp_fused_norm": lambda: compared((2, 1), regression(), "fsdp", gradient_clip_val=0.5),
    "fsdp_value_bf16": lambda: compared((2, 1), Regression, "fsdp", plugin=lambda: scaled("bf16"), **BY_VALUE),
    "fsdp_accumulation": lambda: compared(
        (2, 1), regression(), "fsdp", WINDOWS, FIRST_WINDOWS, accumulate_grad_batches=3
    ),
    # sharded and plain parameters in one optimizer; trouble is in one rank's shard
    "tensor_parallel_norm": lambda: compared((1, 2), Regression, "tp", gradient_clip_val=0.5),
    "tensor_parallel_value": lambda: compared((1, 2), Regression, "tp", **BY_VALUE),
}


class Sequence(Regression):
    """Sequence parallel: the gradients of the normalisation are partial sums, still to be added up."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model.norm = nn.LayerNorm(16)

    def configure_model(self) -> None:
        if self.layout and not self.is_parallel:
            self.is_parallel = True
            up, down = ColwiseParallel(output_layouts=Shard(0)), RowwiseParallel(input_layouts=Shard(0))
            plan = {"up": up, "norm": SequenceParallel(sequence_dim=0), "down": down}
            parallelize_module(self.model, self.device_mesh["tensor_parallel"], plan)


SCENARIOS[2] |= {
    "sequence_parallel_norm": lambda: compared((1, 2), Sequence, "tp", gradient_clip_val=0.5),
    "sequence_parallel_value": lambda: compared((1, 2), Sequence, "tp", **BY_VALUE),
}


@scenario(2)
def one_shard_overflows() -> Any:
    """Check after the gradients were reduced."""

    def make(layout: str, trouble: Any) -> L.LightningModule:
        return Regression(layout, {}, fused, shard_trouble=4 if trouble is EVERY_KIND else None)

    return compared((2, 1), make, "fsdp", EVERY_KIND, (4,))


@scenario(2)
def batch_norm() -> Any:
    """Each rank has its own statistics, so there is nothing to compare with in one process."""
    make = lambda t: Regression("fsdp", t, fused, norm=True)  # noqa: E731
    return {"with": train(make(EVERY_KIND), (2, 1))[1], "without": train(make({}), (2, 1), BAD)[1]}


class Manual(Regression):
    """Two optimizers by hand over sharded parameters."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, schedule in zip(self.optimizers(), self.lr_schedulers(), strict=True):
            self.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            schedule.step()

    def configure_optimizers(self) -> Any:
        down = list(self.model.down.parameters())
        ids = {id(p) for p in down}
        optimizers = [
            self.make_optimizer(down),
            self.make_optimizer([p for p in self.parameters() if id(p) not in ids]),
        ]
        return optimizers, [ExponentialLR(o, 0.9) for o in optimizers]


SCENARIOS[2]["manual"] = lambda: compared((2, 1), regression(Manual), "fsdp")


def _policy(precision: str, dtype: torch.dtype) -> Any:
    """Weights are gathered in half precision; gradients are reduced in fp32."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    plugin = AmpPrecision(precision, scaler=DynamicLossScaler(1024.0) if precision == "fp16" else None)
    module = Regression("fsdp", EVERY_KIND, fused, policy=policy)
    return {"with": train(module, (2, 1), plugin=plugin, gradient_clip_val=0.5)[1]}


SCENARIOS[2] |= {
    "half_precision_fp16": lambda: _policy("fp16", torch.float16),
    "half_precision_bf16": lambda: _policy("bf16", torch.bfloat16),
}


@scenario(2)
def resume() -> Any:
    """Train two epochs at once, and one epoch, a checkpoint and one more; checkpoints of shards and whole ones."""
    make = lambda: Regression("fsdp", EVERY_KIND, fused)  # noqa: E731
    options: dict[str, Any] = {"gradient_clip_val": 0.5}
    result = {"without": train(make(), (2, 1), max_epochs=2, **options)[1]}
    for distributed, name in ((True, "with"), (False, "whole")):
        path, options["distributed_checkpoint"] = folder() / f"checkpoint_{name}", distributed
        train(make(), (2, 1), **options)[0].save_checkpoint(path)
        result[name] = train(make(), (2, 1), max_epochs=2, ckpt_path=path, **options)[1]
    return result


@scenario(2)
def callbacks() -> Any:
    """Callbacks that run steps twice run beside a run with trouble, and the run is the same."""
    printed = io.StringIO()
    handler = logging.StreamHandler(printed)
    loggers = [logging.getLogger(f"lightning.{name}") for name in ("pytorch", "fabric")]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    everything = all_of_ours(folder() / "files", every_n_steps=2)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            options: dict[str, Any] = {"validate": True, "max_epochs": 2, "num_sanity_val_steps": 0}
            trainer, result = train(Regression("fsdp", EVERY_KIND), (2, 1), callbacks=everything, **options)
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
            logger.setLevel(logging.ERROR)
    return {
        "with": result,
        "said": printed.getvalue().splitlines() + [str(w.message) for w in caught],
        "logged": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "skipped": everything[0].history.num_skipped,
        "files": sorted(str(p.relative_to(folder())) for p in folder().rglob("*.*") if "checkpoint" not in str(p)),
    }


@scenario(2)
def stuck() -> Any:
    """A run that only skips raises its error on all ranks, and the error names parameters."""
    plugin = WithoutAutocast("fp16", scaler=DynamicLossScaler(1024.0, min_scale=1024.0, max_consecutive_skips=2))
    try:
        train(Regression("fsdp", {(1, 1): "gradient", (0, 2): "gradient"}), (2, 1), plugin=plugin)
    except FloatingPointError as error:
        return {"message": str(error)}
    return {"message": ""}


def kept(mesh: DeviceMesh, switch: str) -> Any:
    """FSDP2 keeps gradients that it has not reduced elsewhere, while other steps move the scale."""
    torch.manual_seed(0)
    a, b = (nn.Linear(8, 4) for _ in range(2))
    for module in (a, b):
        fully_shard(module, mesh=mesh)
    one, two = (torch.optim.SGD(module.parameters(), lr=0.1) for module in (a, b))
    steps = ScaledSteps(DynamicLossScaler(init_scale=1024.0, growth_interval=1), [one, two])
    x = torch.full((2, 8), 0.5)
    getattr(b, switch)(False)
    steps.backward(b(x).sum())
    for _ in range(3):
        one.zero_grad()
        steps.backward(a(x).sum())
        steps.step(one)
    getattr(b, switch)(True)
    steps.backward(b(2 * x).sum())
    steps.unscale_(two)
    return {"gradient": b.weight.grad.full_tensor(), "scale": steps.scaler.get_scale()}


@scenario(2)
def unsynchronised() -> Any:
    return kept(torch.distributed.device_mesh.init_device_mesh("cpu", (2,)), "set_requires_gradient_sync")


@scenario(4)
def not_reduced_over_replicas() -> Any:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return kept(mesh, "set_requires_all_reduce")


class HalfLoaded(Regression):
    """Train in bfloat16; `written` has the line that the error recommends."""

    def __init__(self, layout: str, written: bool) -> None:
        super().__init__(layout, optimizer=fused)
        self.model.to(torch.bfloat16)
        self.written = written

    def configure_model(self) -> None:
        if self.written:
            self.model.float()
        super().configure_model()


@scenario(2)
def half_parameters() -> Any:
    """Shards cannot be upcast. With the line that the error recommends, the run equals one process that upcasts."""
    messages: list[str] = []
    for upcast in (True, False):
        try:
            train(HalfLoaded("fsdp", False), (2, 1), plugin=AmpPrecision("bf16", upcast_parameters=upcast))
        except ValueError as error:
            messages.append(str(error))
    result = {"messages": messages, "with": train(HalfLoaded("fsdp", True), (2, 1), plugin=scaled("bf16"))[1]}
    if torch.distributed.get_rank() == 0:
        result["single"] = train(HalfLoaded("", False), plugin=AmpPrecision("fp32", upcast_parameters=True))[1]
    return result


# 2 x 2: `up` and `down` are on both meshes, `head` on one, `gain` on none
SCENARIOS[4]["three_meshes"] = lambda: compared((2, 2), Regression, "tp, fsdp head", gradient_clip_val=0.5)


@scenario(4)
def three_meshes_fused() -> Any:
    """torch's fused kernels take one mesh at a time, so each mesh has a parameter group."""

    def by_mesh(parameters: Any) -> torch.optim.Optimizer:
        groups: dict[Any, list[Any]] = {}
        for p in parameters:
            groups.setdefault(getattr(p, "device_mesh", None), []).append(p)
        return torch.optim.AdamW([{"params": group} for group in groups.values()], lr=0.01, fused=True)

    result = compared((2, 2), lambda lay, t: Regression(lay, t, by_mesh), "tp, fsdp head", gradient_clip_val=0.5)
    result.pop("single", None)
    return result


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    ranks.main(SCENARIOS[int(os.environ["WORLD_SIZE"])])
