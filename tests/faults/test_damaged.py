"""A damaged checkpoint raises an error that names the damage, before any of its state is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import Averaging, Net, ours, plugin_for, train

from lightning_amp import AmpPrecision, DynamicLossScaler

NAN, INF = float("nan"), float("inf")
pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    train(plugin_for("fp16"), 10, nan=[3], callbacks=[Averaging(), *ours()], checkpoints=folder, every_n_steps=10)
    return folder / "step=10.ckpt"


def resume(plugin: AmpPrecision, path: Path, saved: Path, **kwargs: Any) -> None:
    """Train two more steps, with all callbacks."""
    callbacks = [Averaging(), *ours()]
    train(plugin, 12, ckpt_path=path, checkpoints=saved.parent, callbacks=callbacks, every_n_steps=10, **kwargs)


def damaged(saved: Path, folder: Path, damage: Callable[[dict[str, Any]], object]) -> Path:
    checkpoint = torch.load(saved, weights_only=True)
    damage(checkpoint)
    path = folder / "damaged.ckpt"
    torch.save(checkpoint, path)
    return path


def put(value: Any, *keys: str) -> Callable[[dict[str, Any]], None]:
    def damage(checkpoint: dict[str, Any]) -> None:
        for key in keys[:-1]:
            checkpoint = checkpoint[key]
        if value is None:
            del checkpoint[keys[-1]]
        else:
            checkpoint[keys[-1]] = value

    return damage


SCALER = ("AmpPrecision", "scaler")
IN_PLUGIN = [
    *[((*SCALER, "scale"), value, "a finite number above 0") for value in (0.0, -1.0, NAN, INF, "256", [256.0])],
    ((*SCALER, "growth_interval"), 0, "a whole number of 1 or more"),
    (SCALER, [1], "a dictionary"),
    (SCALER, None, "has no entry"),
    (("AmpPrecision",), [1], "a dictionary"),
    (("AmpPrecision", "num_steps"), -1, "a whole number of 0 or more"),
    (("AmpPrecision", "num_skipped"), None, "has no entry"),
    (("AmpPrecision", "consecutive_skips"), ["what"], 'a list of "loss" and "gradient"'),
    (("AmpPrecision", "last_step"), [1, 2], "the fields of a step"),
    (("AmpPrecision", "last_step"), [9, 0, NAN, 1.0, False, "none"], "the fields of a step"),
]


@pytest.mark.parametrize(("keys", "value", "rule"), IN_PLUGIN)
def test_the_entry_of_the_plugin(saved: Path, tmp_path: Path, keys: Any, value: Any, rule: str) -> None:
    path = damaged(saved, tmp_path, put(value, *keys))
    plugin = plugin_for("fp16")
    with pytest.raises(ValueError, match=rule) as caught:
        resume(plugin, path, saved)
    name = ".".join(keys)
    assert f"`{path}: {name}`" in str(caught.value)
    assert "resume from an earlier one, or delete the entry" in str(caught.value)
    assert (plugin.scaler.get_scale(), plugin.num_steps, plugin.num_skipped) == (256.0, 0, 0)


@pytest.mark.parametrize("key", ["MixedPrecision", "FSDPPrecision"])
@pytest.mark.parametrize("scaler", [DynamicLossScaler, lambda: torch.amp.GradScaler("cpu")])
def test_the_entry_of_stock_lightning(saved: Path, tmp_path: Path, key: str, scaler: Any) -> None:
    def damage(checkpoint: dict[str, Any]) -> None:
        del checkpoint["AmpPrecision"]
        checkpoint[key] = checkpoint.pop("MixedPrecision") | {"scale": 0.0}

    path = damaged(saved, tmp_path, damage)
    with pytest.raises(ValueError, match=rf"{key}\.scale` must be a finite number above 0, got 0.0"):
        resume(AmpPrecision("fp16", scaler=scaler()), path, saved)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_what_is_not_needed_may_be_broken(saved: Path, tmp_path: Path, precision: str) -> None:
    """A run whose scale fell to 0 under Lightning's own scaler continues in bf16 without an error."""

    def damage(checkpoint: dict[str, Any]) -> None:
        del checkpoint["AmpPrecision"]
        checkpoint["MixedPrecision"]["scale"] = 0.0

    path = damaged(saved, tmp_path, damage)
    plugin = plugin_for(precision)
    resume(plugin, path, saved)
    assert plugin.num_steps == 2


def test_taking_the_entry_out_starts_afresh(saved: Path, tmp_path: Path) -> None:
    """The error recommends this."""

    def damage(checkpoint: dict[str, Any]) -> None:
        del checkpoint["AmpPrecision"], checkpoint["MixedPrecision"]

    path = damaged(saved, tmp_path, damage)
    plugin = plugin_for("fp16", init_scale=64.0)
    resume(plugin, path, saved)
    assert (plugin.num_steps, plugin.scaler.get_scale()) == (2, 64.0)


IN_CALLBACKS = [
    ("ScaleMonitor", "records", None, r"no entry `ScaleHistory\.records`"),
    ("ScaleMonitor", "records", 3, r"ScaleHistory\.records` must be a list"),
    ("ScaleMonitor", "records", [[1]], r"ScaleHistory\.records` must be the fields of a step"),
    ("OverflowLocator", "num_overflows", "1", r"OverflowLocator\.num_overflows` must be a whole number"),
    ("OverflowLocator", "reports", [{"rank": 0}], r"OverflowLocator\.reports` must be a list of reports"),
    ("OverflowLocator", "reports", [3], r"OverflowLocator\.reports` must be a list of reports"),
    ("GradientMonitor", "largest", NAN, r"GradientMonitor\.largest` must be a finite number"),
    ("GradientMonitor", "rows", [[1, 2]], r"GradientMonitor\.rows` must be a list of rows of 12 values"),
    ("MetricComparison", "rows", [[1]], r"MetricComparison\.rows` must be a list of rows of 7 values"),
    ("MetricComparison", "num_validations", None, r"no entry `MetricComparison\.num_validations`"),
]


@pytest.mark.parametrize(("callback", "key", "value", "error"), IN_CALLBACKS)
def test_the_entries_of_callbacks(saved: Path, tmp_path: Path, callback: str, key: str, value: Any, error: str) -> None:
    path = damaged(saved, tmp_path, put(value, "callbacks", callback, key))
    module = Net(lambda params: torch.optim.SGD(params, lr=0.1))
    with pytest.raises(ValueError, match=error):
        resume(plugin_for("fp16"), path, saved, module=module)
    assert not module._forward_hooks


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_file_that_is_cut_off(saved: Path, tmp_path: Path, share: float) -> None:
    """Lightning reads the file before it calls us, and logs its name. The error is torch's; no state is left behind."""
    path = tmp_path / "cut.ckpt"
    path.write_bytes(saved.read_bytes()[: int(saved.stat().st_size * share)])
    plugin = plugin_for("fp16")
    written = tmp_path / "scale_history.csv"
    written.write_text("what the killed run has left\n")
    callbacks = [Averaging(), *ours(tmp_path)]
    with pytest.raises((OSError, RuntimeError, EOFError), match=r"Invalid argument|zip archive|^$|Ran out of input"):
        train(plugin, 12, ckpt_path=path, checkpoints=saved.parent, callbacks=callbacks)
    assert not plugin.records.subscriptions
    assert written.read_text() == "what the killed run has left\n"
    resume(plugin, saved, saved)
    assert plugin.num_steps + plugin.num_skipped == 12


def test_a_scaler_in_a_plain_loop() -> None:
    state = DynamicLossScaler().state_dict()
    scaler = DynamicLossScaler(128.0)
    with pytest.raises(ValueError, match=r"`scaler\.scale` must be a finite number above 0, got nan"):
        scaler.load_state_dict(state | {"scale": NAN})
    assert scaler.get_scale() == 128.0
