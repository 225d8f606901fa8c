"""Row 27: we read the state that Lightning's plugin wrote, it reads ours, and the user's arguments win."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import Poison, Toy, assert_same, batches, fit, stock
from support.promises import Plugins, plain_adamw, promise

from lightning_amp import AmpPrecision, DynamicLossScaler


def toy() -> Toy:
    return Toy(plain_adamw)


def half(plugin: Any, path: Path, poison: tuple[int, ...] = (1,)) -> Path:
    """Train the first of two epochs of four batches."""
    trainer = fit(toy, plugin, batches(4), callbacks=[Poison(gradient=poison)])
    trainer.save_checkpoint(path)
    return path


def rest(plugin: Any, path: Path, **kwargs: Any) -> Any:
    return fit(toy, plugin, batches(4), max_epochs=2, ckpt_path=path, **kwargs)


@promise(27, stock="Scalars are not")
def test_another_plugin_class_goes_on_with_the_scale(plugins: Plugins, tmp_path: Path) -> None:
    class Other(type(plugins.fp16())):
        pass

    path = half(plugins.fp16(256.0), tmp_path / "a.ckpt")
    plugin = plugins.fp16(65536.0)
    plugin.__class__ = Other
    rest(plugin, path)
    torch.testing.assert_close(plugin.scaler.get_scale(), 128.0)


@pytest.mark.parametrize("key", ["MixedPrecision", "FSDPPrecision", "native_amp_scaling_state"])
def test_stock_checkpoints_are_read(key: str, tmp_path: Path) -> None:
    path = half(stock("fp16", init_scale=256.0, growth_interval=100), tmp_path / "a.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    checkpoint[key] = checkpoint.pop("MixedPrecision")
    torch.save(checkpoint, path)
    plugin = AmpPrecision("fp16")
    rest(plugin, path)
    assert plugin.scaler.get_scale() == 128.0
    assert plugin.scaler.get_growth_interval() == 100
    assert plugin.num_steps == 4  # counts this run only; the old checkpoint had no counts


def test_stock_lightning_reads_ours(tmp_path: Path) -> None:
    path = half(AmpPrecision("fp16", scaler=DynamicLossScaler(256.0)), tmp_path / "a.ckpt")
    theirs = stock("fp16", init_scale=65536.0)
    assert_same(rest(theirs, path), rest(AmpPrecision("fp16", scaler=DynamicLossScaler(256.0)), path))
    assert theirs.scaler.get_scale() == 128.0


@promise(27, stock="Scalars are not")
def test_what_the_user_passes_wins(plugins: Plugins, tmp_path: Path) -> None:
    path = half(plugins.fp16(256.0, growth_interval=1000), tmp_path / "a.ckpt")
    plugin = plugins.fp16(256.0, growth_interval=3)
    rest(plugin, path)
    torch.testing.assert_close(plugin.scaler.get_growth_interval(), 3)


def test_it_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = half(AmpPrecision("fp16", scaler=DynamicLossScaler(256.0, growth_interval=50)), tmp_path / "a.ckpt")
    for scaler in (DynamicLossScaler(growth_interval=7), torch.amp.GradScaler("cpu", growth_interval=7)):
        caplog.clear()
        with caplog.at_level("INFO"):
            rest(AmpPrecision("fp16", scaler=scaler), path)
        assert "`growth_interval=7`, as passed, is used; the checkpoint had 50." in caplog.text


@promise(28, stock="Scalars are not")
def test_k_folds_start_fresh(plugins: Plugins) -> None:
    plugin = plugins.fp16(256.0)
    for _ in range(2):
        fit(toy, plugin, batches(4), callbacks=[Poison(gradient=[0, 2])])
        torch.testing.assert_close(plugin.scaler.get_scale(), 64.0)
