"""fp8 changes rounding, speed and memory only; module, checkpoint and evaluation stay the same."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support import FEATURES, Poison, Toy, all_of_ours, assert_same, batches, fit, quiet_trainer, weights
from support.fp8 import RECIPES, Deep, emulated, needs_torchao
from support.promises import plain_adamw
from support.resuming import Resumable
from torch import Tensor, nn
from torch.utils.data import DataLoader
from zoo.compared import Waves, here, spec

from lightning_amp import AmpPrecision, GradientMonitor

pytestmark = [
    needs_torchao,
    pytest.mark.filterwarnings(
        "ignore:lightning_amp. fp8 is emulated",
        "ignore:Checkpoint directory .* exists and is not empty",
        "ignore:You defined a `validation_step` but have no",
    ),
]


def fp8(recipe: str = RECIPES[0], **kwargs: Any) -> AmpPrecision:
    return AmpPrecision("fp8", fp8_recipe=emulated(recipe), **kwargs)


class Net(Toy):
    """Record the output of the last validation."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(plain_adamw, **({"net": Deep()} | kwargs))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.output = self.net(batch)
        self.log("val_loss", nn.functional.mse_loss(self.output.float(), batch.sum(1, keepdim=True)))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.few(1)
def test_learns_as_fp32_does_and_is_not_bf16(recipe: str) -> None:
    losses = {}
    trained = {}
    for name, plugin in {"fp32": AmpPrecision("fp32"), "bf16": AmpPrecision("bf16"), "fp8": fp8(recipe)}.items():
        trainer = fit(Net, plugin, batches(40), max_epochs=2)
        trainer.validate(trainer.lightning_module, batches(4, seed=1), verbose=False)
        losses[name], trained[name] = float(trainer.callback_metrics["val_loss"]), weights(trainer)
    assert losses["fp8"] == pytest.approx(losses["fp32"], rel=0.1)
    assert any(not torch.equal(trained["fp8"][n], trained["bf16"][n]) for n in trained["fp8"])


def test_evaluation_is_that_of_bf16() -> None:
    module = Net()
    fit(module, fp8())
    quiet_trainer(plugins=[fp8()]).validate(module, batches(1), verbose=False)
    ours = module.output
    quiet_trainer(plugins=[AmpPrecision("bf16")]).validate(module, batches(1), verbose=False)
    assert torch.equal(ours, module.output)


def test_validation_in_the_middle_of_a_fit_is_that_of_bf16() -> None:
    class Both(L.Callback):
        def on_validation_batch_end(
            self, trainer: L.Trainer, module: Any, outputs: Any, batch: Tensor, *_: Any
        ) -> None:
            with torch.autocast(batch.device.type, torch.bfloat16, cache_enabled=False):
                plain = nn.Sequential(*module.net)
                for layer in plain:
                    batch = type(layer).forward(layer, batch)
            assert torch.equal(module.output, batch.float())
            seen.append(trainer.global_step)

    seen: list[int] = []
    trainer = quiet_trainer(plugins=[fp8()], val_check_interval=2, callbacks=[Both()], num_sanity_val_steps=0)
    trainer.fit(Net(), batches(), batches(1))
    assert seen == [2, 4, 6, 8]


def test_module_and_checkpoint_are_those_of_a_bf16_run(tmp_path: Path) -> None:
    class Look(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
            types[name] = [type(m) for m in module.modules()]

    types: dict[str, list[type]] = {}
    keys: dict[str, list[str]] = {}
    for name, plugin in {"fp8": fp8(), "bf16": AmpPrecision("bf16")}.items():
        trainer = fit(Net, plugin, callbacks=[Look()])
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
        keys[name] = list(torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["state_dict"])
    assert types["fp8"] == types["bf16"]
    assert keys["fp8"] == keys["bf16"]
    fit(Net, AmpPrecision("bf16"), ckpt_path=tmp_path / "fp8.ckpt", max_epochs=2)
    fit(Net, fp8(), ckpt_path=tmp_path / "bf16.ckpt", max_epochs=2)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path: Path) -> None:
    def run(steps: int, ckpt_path: Path | None = None) -> L.Trainer:
        return fit(Net, fp8(), Resumable(), max_epochs=-1, max_steps=steps, ckpt_path=ckpt_path)

    whole = run(40)
    run(20).save_checkpoint(tmp_path / "half.ckpt")
    resumed = run(40, tmp_path / "half.ckpt")
    assert_same(resumed, whole)
    assert resumed.precision_plugin.num_steps == 40


def test_a_bad_step_did_not_happen() -> None:
    bad = fit(Net, fp8(), callbacks=[Poison({2: "gradient", 5: "nan"})])
    assert (bad.precision_plugin.num_steps, bad.precision_plugin.num_skipped) == (6, 2)
    data = [b for i, b in enumerate(batches()) if i not in (2, 5)]
    assert_same(bad, fit(Net, fp8(), DataLoader(data, batch_size=None)))


def test_fp32_modules_are_fp32() -> None:
    class Watch(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            handles = [m.register_forward_hook(lambda m, a, out: dtypes.add((m, out.dtype))) for m in self.net]
            loss = self.loss(batch)
            for handle in handles:
                handle.remove()
            return loss

    dtypes: set[tuple[nn.Module, torch.dtype]] = set()
    amp = fp8(fp32_modules=["net.4"])
    module = Watch()
    fit(module, amp)
    assert amp.fp8_layers["net.4"] == "in `fp32_modules`"
    found = dict(dtypes)
    assert found[module.net[4]] == torch.float32
    assert found[module.net[2]] == torch.bfloat16
    assert amp.last_step.precision == "fp8"  # pyright: ignore[reportOptionalMemberAccess]


def test_eval_precision_holds_for_evaluation_alone() -> None:
    module = Net()
    fit(module, fp8(eval_precision="fp32"), batches())
    quiet_trainer(plugins=[fp8(eval_precision="fp32")]).validate(module, batches(1), verbose=False)
    ours = module.output
    quiet_trainer(plugins=[AmpPrecision("fp32")]).validate(module, batches(1), verbose=False)
    assert torch.equal(ours, module.output)


def test_gradients_are_between_18_and_35_db() -> None:
    """Without the rule that a layer without autocast computes in fp32, the sample's reference would be fp8, too."""
    figures = {}
    for name, plugin in {"fp8": fp8(), "bf16": AmpPrecision("bf16")}.items():
        monitor = GradientMonitor(every_n_steps=4)
        fit(Net, plugin, batches(8, size=16), callbacks=[monitor])
        figures[name] = [row.sqnr_db for row in monitor.table if row.name == "(all)"]
    assert all(18 < value < 35 for value in figures["fp8"])
    assert all(value > 38 for value in figures["bf16"])


def test_callbacks_look_and_change_nothing() -> None:
    callbacks = all_of_ours()
    runs: list[L.Trainer] = []
    for chosen in ([], callbacks):
        torch.manual_seed(0)
        runs.append(quiet_trainer(plugins=[fp8()], callbacks=chosen))
        runs[-1].fit(Net(), batches(), batches(1))
    assert_same(*runs)
    monitor: Any = callbacks[0]
    assert (monitor.history.num_attempted, monitor.history.num_skipped) == (8, 0)


class DeepWaves(Waves):
    """A module for a comparison of whole runs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Deep()


def test_an_arm_of_a_comparison_says_what_it_multiplied_in(tmp_path: Path) -> None:
    run = here(spec(tmp_path, {"precision": "fp8", "fp8_recipe": emulated()}, DeepWaves, max_epochs=1))
    assert run.error is None
    assert run.precision == "fp8"
    shares = {name: flops / sum(run.matmul_flops.values()) for name, flops in run.matmul_flops.items()}
    assert 0.5 < shares["float8_e4m3fn"] < 0.7
    assert set(shares) == {"float8_e4m3fn", "bfloat16"}


class Critic(L.LightningModule):
    """A WGAN with gradient penalty, in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.make, self.judge = Deep(width=32), Deep(width=32)
        self.lift = nn.Linear(1, FEATURES)
        self.penalties: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()  # pyright: ignore[reportGeneralTypeIssues]
        fake = self.lift(self.make(torch.randn_like(batch)))
        between = (0.3 * batch + 0.7 * fake.detach()).requires_grad_()
        (gradient,) = torch.autograd.grad(self.judge(between).float().sum(), between, create_graph=True)
        penalty = (gradient.float().norm(dim=1) - 1).square().mean()
        self.penalties.append(penalty.detach())
        first.zero_grad()
        self.manual_backward(self.judge(fake.detach()).mean() - self.judge(batch).mean() + 10 * penalty)
        first.step()
        second.zero_grad()
        self.manual_backward(-self.judge(fake).mean())
        second.step()

    def configure_optimizers(self) -> Any:
        makers = [*self.make.parameters(), *self.lift.parameters()]
        return [torch.optim.Adam(self.judge.parameters(), 1e-3), torch.optim.Adam(makers, 1e-3)]


def test_a_gan_with_a_gradient_penalty() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs = [fit(Critic, plugin).lightning_module for plugin in (fp8(), AmpPrecision("fp32"))]
    ours, exact = (torch.stack(run.penalties) for run in runs)
    assert torch.isfinite(ours).all()
    torch.testing.assert_close(ours, exact, rtol=0.1, atol=0.01)


def test_a_layer_that_is_called_many_times() -> None:
    """A recurrent net by hand: each call casts for itself, and the sums of gradients are fp32."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.again, self.last = nn.Linear(FEATURES, 32), nn.Linear(32, 32), nn.Linear(32, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            for _ in range(4):
                h = torch.tanh(self.again(h) + h)
            return self.last(h)

    monitor = GradientMonitor(1)
    amp = fp8()
    fit(lambda: Net(net=Recurrent()), amp, batches(3), callbacks=[monitor])
    assert [n for n, why in amp.fp8_layers.items() if why is None] == ["net.again"]
    assert all(row.sqnr_db > 15 for row in monitor.table if row.name == "(all)")
