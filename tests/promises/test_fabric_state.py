"""State of a Fabric loop: a cut in the middle leaves no trace, checkpoints of others load, and bad input is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.precision import MixedPrecision
from support import assert_same, quiet_trainer, with_batch_norm
from support.fabric import CASES, DEVICE, FabricPlugins, Loop, batches, exact, make_fabric, net, optimizer_tensors
from support.promises import OPTIMIZERS, plain_adamw, plain_sgd
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR
from torch.optim.swa_utils import AveragedModel

from lightning_amp import DynamicLossScaler, FabricAmpPrecision

both_ways = pytest.mark.usefixtures("where_flags_live")


# -- save and resume ---------------------------------------------------------------------------------------------------

TROUBLE: Any = {1: "gradient", 4: "loss", 9: "gradient", 11: "gradient", 15: "loss"}


class Run:
    """A loop with a schedule, averaged weights and BatchNorm that can be saved after any batch."""

    def __init__(self, precision: str, optimizer: Any) -> None:
        scaler: Any = DynamicLossScaler(256.0, growth_interval=3, hysteresis=2) if precision == "fp16" else None
        self.amp = FabricAmpPrecision(precision, scaler=scaler)
        self.loop = Loop(self.amp, with_batch_norm, optimizer, TROUBLE)
        self.schedule = self.amp.guard(ExponentialLR(self.loop.raw, 0.9))
        self.averaged = self.amp.guard(AveragedModel(self.loop.model.module))
        self.seen: list[Any] = []
        self.amp.records.subscribe(self.seen.extend)

    def train(self, first: int, last: int) -> Run:
        self.loop.index = first
        for batch in batches(20)[first:last]:
            self.loop.optimizer.zero_grad()
            self.loop.backward(batch)
            self.loop.clip(max_norm=0.5)
            self.loop.optimizer.step()
            self.schedule.step()
            self.averaged.update_parameters(self.loop.model.module)
            self.loop.index += 1
        return self

    def state(self) -> dict[str, Any]:
        return {
            "model": self.loop.model, "optimizer": self.loop.optimizer, "amp": self.amp, "schedule": self.schedule,
            "averaged": self.averaged,
        }  # fmt: skip

    def everything(self) -> Any:
        self.amp.flush()
        return {
            "weights": self.loop.weights(),
            "optimizer": optimizer_tensors(self.loop.optimizer),
            "rate": float(self.loop.raw.param_groups[0]["lr"]),
            "schedule": self.schedule.last_epoch,
            "averaged": {k: v.clone() for k, v in self.averaged.state_dict().items()},
        }, (self.amp.state_dict(), self.amp.num_steps, self.amp.num_skipped, self.amp.last_step)


@both_ways
@pytest.mark.parametrize("cut", [2, 7])
@pytest.mark.parametrize("optimizer", ["adamw", "fused adamw"])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.few(5)
def test_a_cut_leaves_no_trace(precision: str, optimizer: str, cut: int, tmp_path: Path) -> None:
    """Cut after a skip (2, 10, 12), and before and after clean steps. The file loads with `weights_only`."""
    make, path = OPTIMIZERS[optimizer], tmp_path / "checkpoint.pt"
    whole = Run(precision, make).train(0, 20)
    first = Run(precision, make).train(0, cut)
    first.loop.fabric.save(path, first.state())
    torch.load(path, weights_only=True)
    second = Run(precision, make)
    left = second.loop.fabric.load(path, second.state())
    assert not left
    second.train(cut, 20)
    ours, reference = second.everything(), whole.everything()
    assert_same(ours[0], reference[0])
    assert ours[1] == reference[1]
    assert whole.amp.num_skipped == 5
    assert [record.index for record in second.seen] == list(range(cut, 20))


@both_ways
@pytest.mark.parametrize("way", ["guard", "on_applied"])
@pytest.mark.parametrize("optimizer", ["adamw", "fused adamw"])
def test_a_run_goes_back_to_an_earlier_checkpoint(optimizer: str, way: str, tmp_path: Path) -> None:
    """If only the device knows of the last step, its schedule step is still due. It must not follow the load."""

    def train(plugin: Any) -> Any:
        loop = Loop(plugin, optimizer=OPTIMIZERS[optimizer])
        schedule = CosineAnnealingLR(loop.raw, 40)
        if plugin is not None and way == "guard":
            schedule = plugin.guard(schedule)

        def after(_: Loop) -> None:
            schedule.step() if plugin is None or way == "guard" else plugin.on_applied(schedule.step)

        state = {"model": loop.model, "optimizer": loop.optimizer, "schedule": schedule}
        state |= {} if plugin is None else {"amp": plugin}
        loop.run(batches(2), after=after)
        loop.fabric.save(tmp_path / "checkpoint.pt", state)
        for batch in batches(3, seed=1):
            loop.optimizer.zero_grad()
            loop.backward(batch)
            loop.optimizer.step()
            after(loop)
        loop.fabric.load(tmp_path / "checkpoint.pt", state)
        loop.run(after=after)
        return loop.weights(), float(loop.raw.param_groups[0]["lr"])

    assert_same(train(FabricPlugins().fp16()), train(None))


def stock_state() -> tuple[dict[str, Any], Loop]:
    """Return the state of Fabric's own plugin after a skip, and the loop."""
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, growth_interval=5)
    loop = Loop(MixedPrecision("16-mixed", DEVICE, scaler), exact, plain_adamw, {1: "gradient"}).run(batches(4))
    return scaler.state_dict(), loop


@both_ways
def test_a_checkpoint_of_fabrics_own_plugin_is_loaded(tmp_path: Path) -> None:
    """`fabric.save` of `fabric.strategy.precision` and of the scaler itself write the same entries."""
    state, stock = stock_state()
    stock.fabric.save(tmp_path / "stock.pt", {"model": stock.model, "optimizer": stock.optimizer, "amp": stock.plugin})
    plugin = FabricAmpPrecision("fp16")
    loop = Loop(plugin)
    loop.fabric.load(tmp_path / "stock.pt", {"model": loop.model, "optimizer": loop.optimizer, "amp": plugin})
    assert plugin.scaler.get_scale() == state["scale"] == 512.0
    assert plugin.scaler.state_dict()["_growth_tracker"] == state["_growth_tracker"] == 2
    assert plugin.scaler.get_growth_interval() == 5
    again = FabricAmpPrecision("fp16")
    again.load_state_dict(state)
    assert again.scaler.get_scale() == 512.0
    stock.trouble = {}
    assert_same(loop.run().weights(), stock.run().weights())


def test_arguments_of_the_user_override_a_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    plugin = FabricAmpPrecision("fp16", scaler=DynamicLossScaler(growth_interval=77))
    with caplog.at_level("INFO"):
        plugin.load_state_dict(stock_state()[0])
    assert plugin.scaler.get_growth_interval() == 77
    assert "growth_interval" in caplog.text


def test_our_scaler_goes_back_to_fabrics_own_plugin() -> None:
    plugin = FabricPlugins().fp16()
    Loop(plugin, trouble={1: "gradient"}).run()
    stock = MixedPrecision("16-mixed", DEVICE)
    stock.load_state_dict(plugin.scaler.state_dict())
    assert stock.scaler.get_scale() == 512.0


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"fp32_modules": ["nowhere*"]}, {"restore_buffers": ["nowhere*"]}])
def test_rules_that_match_nothing(settings: Any) -> None:
    loop = Loop(FabricPlugins().fp16(settings=settings), net)
    with pytest.raises(ValueError, match=rf"{next(iter(settings))}.*nowhere"):
        loop.model(loop.fabric.to_device(batches()[0]))


def test_an_unneeded_scaler_is_left_unused() -> None:
    plugin = FabricAmpPrecision("fp32", scaler=1024.0)
    Loop(plugin, net).run()
    assert plugin.scaler is None


# -- wrong uses --------------------------------------------------------------------------------------------------------


def test_the_trainer_refuses_the_plugin() -> None:
    with pytest.raises((TypeError, RuntimeError, ValueError, L.pytorch.utilities.exceptions.MisconfigurationException),
                       match=r"(?<!Fabric)AmpPrecision"):  # fmt: skip
        quiet_trainer(plugins=[FabricAmpPrecision("fp16")])


@both_ways
@pytest.mark.parametrize("optimizer", CASES)
def test_a_step_past_fabric(optimizer: str) -> None:
    """The scaled gradients reach no weight."""
    loop = Loop(FabricPlugins().fp16(), optimizer=OPTIMIZERS[optimizer])
    before = loop.weights()
    loop.backward(batches()[0])
    with pytest.raises(RuntimeError, match=r"optimizer|fabric\.setup"):
        loop.optimizer.optimizer.step()
    assert_same(loop.weights(), before)
    loop.run()
    assert loop.plugin.num_steps == 8


@both_ways
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_backward_past_fabric(precision: str) -> None:
    loop = Loop(getattr(FabricPlugins(), precision)())
    with pytest.raises(RuntimeError, match=r"fabric\.backward"):
        loop.loss(batches()[0]).backward()
    loop.optimizer.zero_grad()
    loop.run()
    assert_same(loop.weights(), Loop().run().weights())


@both_ways
@pytest.mark.parametrize("optimizer", CASES)
def test_gradients_by_hand_are_not_divided(optimizer: str) -> None:
    """Also where scaled gradients were before, and where the user has unscaled them."""

    def train(plugin: Any) -> Any:
        loop = Loop(plugin, optimizer=OPTIMIZERS[optimizer]).run(batches(2))
        for index in range(3):
            if index:
                loop.optimizer.zero_grad()
            if index == 2:
                loop.backward(batches()[2])
                loop.unscale()
            for parameter in loop.model.parameters():
                parameter.grad = torch.full_like(parameter, 0.25)
            loop.optimizer.step()
        return loop.weights()

    assert_same(train(FabricPlugins().fp16()), train(None))


@both_ways
def test_a_model_that_was_not_set_up() -> None:
    plugin = FabricPlugins().fp16()
    fabric = make_fabric(plugin)
    module = net().to(fabric.device)
    optimizer = fabric.setup_optimizers(plain_adamw(module.parameters()))
    loss = module(fabric.to_device(batches()[0])).pow(2).mean()
    with pytest.raises(RuntimeError, match="setup"):
        fabric.backward(loss)
        optimizer.step()


@both_ways
def test_an_optimizer_that_was_not_set_up() -> None:
    plugin = FabricPlugins().fp16()
    fabric = make_fabric(plugin)
    module = net()
    optimizer = plain_adamw(module.parameters())
    model = fabric.setup_module(module)
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    fabric.backward(model(fabric.to_device(batches()[0])).pow(2).mean())
    with pytest.raises(RuntimeError, match="setup"):
        optimizer.step()
    assert_same(dict(module.named_parameters()), before)


@both_ways
@pytest.mark.parametrize("precision", ["auto", "fp16", "bf16"])
def test_a_checkpoint_is_complete_before_the_first_forward(precision: str) -> None:
    """With `"auto"`, the precision is not known yet when a checkpoint is loaded."""
    plugin = FabricPlugins().fp16()
    Loop(plugin, trouble={1: "gradient"}).run()
    loaded = FabricAmpPrecision(precision)
    loaded.load_state_dict(plugin.state_dict())
    assert (loaded.num_steps, loaded.num_skipped) == (7, 1)
    if precision != "bf16":  # which has no scaler
        assert loaded.state_dict() == plugin.state_dict()
    with pytest.raises(ValueError, match="num_steps"):
        FabricAmpPrecision(precision).load_state_dict({**plugin.state_dict(), "num_steps": -1})


def test_before_the_first_step() -> None:
    plugin = FabricAmpPrecision("fp16")
    assert (plugin.num_steps, plugin.num_skipped, plugin.last_step) == (0, 0, None)
    plugin.flush()
    state = plugin.state_dict()
    FabricAmpPrecision("fp16").load_state_dict(state)
    assert "FabricAmpPrecision" in repr(plugin)


@both_ways
def test_a_plugin_used_in_a_second_fabric_begins_with_its_own_steps() -> None:
    """As in k folds with one object; `load_state_dict` is the way to go on instead."""
    plugin = FabricPlugins().fp16()
    first = Loop(plugin, trouble={1: "gradient"}).run().weights()
    second = Loop(plugin, trouble={1: "gradient"}).run().weights()
    assert_same(first, second)


@both_ways
@pytest.mark.parametrize("new_optimizer", [False, True])
def test_the_same_model_can_be_set_up_again(new_optimizer: bool) -> None:
    """As in a notebook whose cell runs again. The scale changes while gradients accumulate over many steps."""

    def train(plugin: Any) -> Any:
        loop = Loop(plugin, optimizer=plain_sgd)
        module = loop.model.module
        for _ in range(3):
            loop.raw = plain_sgd(module.parameters()) if new_optimizer else loop.raw
            loop.model, loop.optimizer = loop.fabric.setup(module, loop.raw)
            for index, batch in enumerate(batches()):
                if index % 4 == 3:
                    loop.optimizer.zero_grad()
                loop.backward(batch)
                loop.optimizer.step()
        return loop.weights()

    plugin = FabricPlugins().fp16(growth_interval=3)
    assert_same(train(plugin), train(None))
    assert plugin.num_steps == 24


@both_ways
@pytest.mark.parametrize("bad", ["on_applied", "guard"])
def test_wrong_followers(bad: str) -> None:
    plugin = FabricPlugins().fp16()
    Loop(plugin).run()
    with pytest.raises((TypeError, ValueError, AttributeError)):
        plugin.on_applied(3) if bad == "on_applied" else plugin.guard(object())  # pyright: ignore[reportArgumentType]
