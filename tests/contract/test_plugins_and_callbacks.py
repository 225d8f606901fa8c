"""Each plugin and each callback keeps the same rules: it resumes, restores its changes, and leaves nothing behind."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from multi_rank.fsdp_models import OnTheCPU
from support import Poison, Toy, assert_same, batches, fit
from torch import nn

import lightning_amp
from lightning_amp import AmpPrecision, DynamicLossScaler, FSDPAmpPrecision

PLUGINS: dict[str, Callable[[], AmpPrecision]] = {
    "auto": AmpPrecision,
    "bf16": lambda: AmpPrecision("bf16"),
    "fp32": lambda: AmpPrecision("fp32"),
    "fp16": lambda: AmpPrecision("fp16", scaler=DynamicLossScaler(64.0, growth_interval=3)),
    "fp16, torch's scaler": lambda: AmpPrecision("fp16", scaler=torch.amp.GradScaler("cpu", init_scale=64.0)),
    "fp16, static": lambda: AmpPrecision("fp16", scaler=64.0),
}
CALLBACKS: dict[str, Callable[[], L.Callback]] = {
    name: getattr(lightning_amp, name)
    for name in ("ScaleMonitor", "MetricComparison", "OverflowLocator", "GradientMonitor")
    if name in lightning_amp.__all__
}


class Crash(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 3:
            raise KeyError("crash")


class WithValidation(Toy):
    def __init__(self) -> None:
        net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 1))
        super().__init__(functools.partial(torch.optim.AdamW, lr=0.01), net)

    def train_dataloader(self) -> Any:
        return batches(8)

    def val_dataloader(self) -> Any:
        return batches(3, seed=1)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


def traces(module: L.LightningModule) -> dict[str, Any]:
    """Return everything that a plugin or callback could leave behind on a user's module."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "attributes": {n: sorted(vars(m)) for n, m in module.named_modules()},
        "hooks": {n: [len(getattr(m, h)) for h in hooks] for n, m in module.named_modules()},
        "classes": {n: type(m) for n, m in module.named_modules()},
        "parameter hooks": [bool(p._backward_hooks) for p in module.parameters()],
    }


@pytest.mark.parametrize("name", PLUGINS)
class TestPlugins:
    def test_can_be_used_after_a_crash(self, name: str) -> None:
        plugin = PLUGINS[name]()
        expected = fit(Toy, PLUGINS[name]())
        with pytest.raises(KeyError, match="crash"):
            fit(Toy, plugin, callbacks=[Crash()])
        assert_same(fit(Toy, plugin), expected)

    @pytest.mark.parametrize("how", [copy.deepcopy, lambda plugin: pickle.loads(pickle.dumps(plugin))])
    def test_copies(self, name: str, how: Callable[[AmpPrecision], AmpPrecision]) -> None:
        plugin = PLUGINS[name]()
        expected = fit(Toy, plugin)
        assert_same(fit(Toy, how(plugin)), expected)

    def test_resumes(self, name: str, tmp_path: Path) -> None:
        whole_plugin, plugin = PLUGINS[name](), PLUGINS[name]()
        whole = fit(Toy, whole_plugin, batches(6), max_epochs=2, callbacks=[Poison(gradient=[1, 8])])
        half = fit(Toy, PLUGINS[name](), batches(6), max_epochs=1, callbacks=[Poison(gradient=[1])])
        half.save_checkpoint(tmp_path / "half.ckpt")
        torch.load(tmp_path / "half.ckpt", weights_only=True)
        resumed = fit(
            Toy, plugin, batches(6), max_epochs=2, callbacks=[Poison(gradient=[2])], ckpt_path=tmp_path / "half.ckpt"
        )
        assert_same(resumed, whole)
        assert (plugin.num_steps, plugin.num_skipped) == (whole_plugin.num_steps, whole_plugin.num_skipped)
        assert plugin.last_step == whole_plugin.last_step


FSDP_PLUGINS: dict[str, Callable[[], FSDPAmpPrecision]] = {
    "auto": FSDPAmpPrecision,
    "bf16": lambda: FSDPAmpPrecision("bf16"),
    "fp32": lambda: FSDPAmpPrecision("fp32"),
    "fp16": lambda: FSDPAmpPrecision("fp16", scaler=DynamicLossScaler(64.0, growth_interval=3)),
}


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Run with a process group of one, and remove group and environment afterwards."""
    before = dict(os.environ)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


class NothingRandom(WithValidation):
    """A model whose gradients do not depend on details of the run.

    It has no dropout, because a distributed strategy seeds again where `seed_everything` was called before. It has no
    bias before BatchNorm: that gradient is zero except for rounding, and Adam makes it as large as any other.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def fit_sharded(module: Any, plugin: Any, **kwargs: Any) -> L.Trainer:
    strategy = OnTheCPU(sharding_strategy="NO_SHARD")
    return fit(module, plugin, accelerator="cpu", strategy=strategy, use_distributed_sampler=False, **kwargs)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy is deprecated")
@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log.*sync_dist=True")
@pytest.mark.parametrize("name", FSDP_PLUGINS)
class TestFSDPPlugins:
    """Wrap the module in FSDP on one rank; `tests/multi_rank/test_fsdp.py` has several."""

    def test_equals_the_plugin_for_one_device(self, name: str) -> None:
        plugin = FSDP_PLUGINS[name]()
        trainer = fit_sharded(NothingRandom, plugin, callbacks=[Poison(gradient=[2])])
        assert (plugin.num_steps, plugin.num_skipped) == (7, 1)
        assert torch.isfinite(trainer.callback_metrics["val_loss"])
        alone = fit(NothingRandom, PLUGINS[name](), accelerator="cpu", callbacks=[Poison(gradient=[2])])
        assert_same(trainer, alone, rtol=1e-5, atol=1e-6)

    def test_fits_again_after_a_crash_and_copied(self, name: str, tmp_path: Path) -> None:
        plugin = FSDP_PLUGINS[name]()
        state = torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled("cpu")
        expected = fit_sharded(Toy, plugin)
        with pytest.raises(KeyError, match="crash"):
            fit_sharded(Toy, plugin, callbacks=[Crash()])
        assert (torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled("cpu")) == state
        for again in (plugin, copy.deepcopy(plugin), pickle.loads(pickle.dumps(plugin))):
            assert again.reduce_dtype == torch.float32
            assert_same(fit_sharded(Toy, again), expected)


@pytest.mark.parametrize("name", CALLBACKS)
class TestCallbacks:
    @pytest.mark.parametrize("plugin", [None, *PLUGINS])
    @pytest.mark.few(10)
    def test_only_observes(self, name: str, plugin: str | None) -> None:
        def run(callbacks: list[L.Callback]) -> tuple[L.Trainer, Any]:
            random.seed(0)
            trainer = fit(
                WithValidation, plugin and PLUGINS[plugin](), data=None, max_epochs=2,
                callbacks=[Poison(gradient=[1] if plugin else []), *callbacks],
            )  # fmt: skip
            return trainer, (torch.get_rng_state(), random.getstate())

        (watched, rng), (alone, rng_alone) = run([CALLBACKS[name]()]), run([])
        assert_same(watched, alone)
        assert_same(watched.optimizers[0].state_dict(), alone.optimizers[0].state_dict())
        assert torch.equal(rng[0], rng_alone[0])
        assert rng[1] == rng_alone[1]
        metrics = {k: v for k, v in watched.callback_metrics.items() if not k.startswith("amp/")}
        assert_same(metrics, dict(alone.callback_metrics))

    @pytest.mark.parametrize("crash", [False, True])
    def test_leaves_nothing_behind(self, name: str, crash: bool) -> None:
        module = WithValidation()
        fit(module, None)
        before = traces(module)
        if crash:
            with pytest.raises(KeyError, match="crash"):
                fit(module, PLUGINS["fp16"](), callbacks=[CALLBACKS[name](), Crash()])
        else:
            fit(module, PLUGINS["fp16"](), callbacks=[CALLBACKS[name]()])
        assert traces(module) == before

    def test_fits_twice_and_pickles(self, name: str) -> None:
        callback = CALLBACKS[name]()
        for _ in range(2):
            fit(WithValidation, PLUGINS["fp16"](), callbacks=[callback])
        pickle.loads(pickle.dumps(callback))
        copy.deepcopy(callback)
