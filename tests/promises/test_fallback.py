"""A stuck run continues in another precision, between two batches, as if it had begun there."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.optim.optimizer as torch_optimizers
from lightning.pytorch.callbacks import ModelCheckpoint
from support import (
    FEATURES,
    Poison,
    Records,
    Toy,
    assert_same,
    attributes,
    batches,
    flags_on_a_device,
    quiet_trainer,
    with_batch_norm,
)
from support.promises import OPTIMIZERS, fused_adamw, plain_adamw, plain_sgd
from support.resuming import Averaging, Resumable
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader

from lightning_amp import AmpPrecision, DynamicLossScaler, ScaleMonitor
from lightning_amp.findings import StepRecord

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
]

STUCK = r"3 optimizer steps in a row .* goes on in 'bf16', without a loss scale"
LIMIT = 3


def falling(precision: Any = "fp16", fallback: Any = ("bf16",), **kwargs: Any) -> AmpPrecision:
    scaler = DynamicLossScaler(64.0, max_consecutive_skips=LIMIT) if precision == "fp16" else None
    return AmpPrecision(precision, scaler=scaler, fallback=fallback, **kwargs)


class RecordsAndPrecisions(Records):
    def __init__(self, at_once: bool = False) -> None:
        super().__init__(at_once)
        self.at_batch_end: list[tuple[str, torch.dtype, bool]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        plugin = trainer.precision_plugin
        self.at_batch_end.append((plugin.precision, plugin.dtype, plugin.scaler is None))


class Net(Toy):
    """Normalisation and a schedule; records the dtypes in which it computes."""

    def __init__(self, optimizer: Any = plain_adamw) -> None:
        super().__init__(optimizer, with_batch_norm(), lambda o: ExponentialLR(o, 0.9))
        self.trained_in: list[torch.dtype] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.trained_in.append(self.net[0](batch).dtype)
        return super().training_step(batch, batch_idx)


class Validated(Net):
    def __init__(self) -> None:
        super().__init__()
        self.validated_in: list[torch.dtype] = []

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated_in.append(self.net[0](batch).dtype)


def train(
    module: L.LightningModule,
    plugin: AmpPrecision,
    bad: Iterable[int] = (),
    *,
    nan: Iterable[int] = (),
    data: Any = None,
    callbacks: Iterable[L.Callback] = (),
    warns: str | None = STUCK,
    ckpt_path: Any = None,
    **kwargs: Any,
) -> L.Trainer:
    torch.manual_seed(0)
    for layer in module.modules():
        if isinstance(layer, (nn.Linear, nn.BatchNorm1d)):
            layer.reset_parameters()
    trainer = quiet_trainer(plugins=[plugin], callbacks=[Poison(bad, nan), *callbacks], **kwargs)
    with contextlib.nullcontext() if warns is None else pytest.warns(UserWarning, match=warns):
        trainer.fit(module, batches(8) if data is None else data, ckpt_path=ckpt_path)
    return trainer


def drawn(count: int = 8, without: int = 0) -> Any:
    """Return this many batches of `batches(8)`, repeated, without the first ones."""
    some = [batch for batch, _ in zip(cycle(batches(8)), range(count), strict=False)]
    return DataLoader(some[without:], batch_size=None)


# -- the switch --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("to", ["bf16", "fp32"])
def test_a_stuck_run_is_the_one_that_never_drew_these_batches(to: str, optimizer: str) -> None:
    """Weights, normalisation, optimizer and schedule agree bit for bit."""
    records = RecordsAndPrecisions(at_once=True)
    module, plugin = Net(OPTIMIZERS[optimizer]), falling(fallback=[to])
    trainer = train(module, plugin, {0, 1, 2}, callbacks=[records], warns=r"goes on in")
    reference = train(Net(OPTIMIZERS[optimizer]), AmpPrecision(to), data=drawn(without=LIMIT), warns=None)
    assert_same(trainer, reference)
    assert_same(trainer.optimizers[0].state_dict(), reference.optimizers[0].state_dict())
    schedules = [t.lr_scheduler_configs[0].scheduler.state_dict() for t in (trainer, reference)]
    assert schedules[0] == schedules[1]
    half = torch.bfloat16 if to == "bf16" else torch.float32
    assert module.trained_in == [torch.float16] * 3 + [half] * 5
    canonical = {"bf16": "bf16-mixed", "fp32": "32-true"}[to]
    assert records.at_batch_end == [("16-mixed", torch.float16, False)] * 2 + [(canonical, half, True)] * 6
    assert [(r.precision, r.skipped, r.scale) for r in records.all] == [
        *(("fp16", True, scale) for scale in (64.0, 32.0, 16.0)), *[(to, False, 1.0)] * 5,
    ]  # fmt: skip
    assert plugin.last_step == StepRecord(7, 0, 1.0, 1.0, False, "none", to)
    assert (plugin.num_steps, plugin.num_skipped) == (5, 3)
    assert plugin.records.streak == ()


def test_on_a_device_it_may_be_a_block_of_records_late() -> None:
    """Reading the history earlier does not bring the fallback forward, because other ranks might not have read it."""
    with flags_on_a_device():
        plugin, records = falling(), Records()

        class Reads(L.Callback):
            def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
                assert plugin.num_skipped <= 10

        train(Toy(fused_adamw), plugin, range(10), data=drawn(72), callbacks=[Reads(), records], warns="goes on in")
    assert [r.precision for r in records.all] == ["fp16"] * 64 + ["bf16"] * 8
    assert (plugin.num_steps, plugin.num_skipped) == (62, 10)


def test_the_warning_says_why_and_what_follows() -> None:
    with pytest.warns(UserWarning, match="lightning_amp") as found:
        train(Net(), falling(fallback=["bf16", "fp32"]), {0, 1, 2}, warns=None)
    [text] = [str(w.message) for w in found if "lightning_amp" in str(w.message)]
    assert text == (
        "lightning_amp: 3 optimizer steps in a row were skipped (the limit is 3), the last at loss scale 16."
        " Reasons: 0 with a non-finite loss, 3 with non-finite gradients under a finite loss. The first parameters"
        " with non-finite gradients are `net.0.weight`. Training in 'fp16' is stuck, and goes on in 'bf16',"
        " without a loss scale. If it is stuck there too, 'fp32' is next."
    )


def test_the_count_starts_anew_and_its_limit_is_64() -> None:
    """The run trains in fp16, then bf16, then fp32, and stops with fp32's error."""
    records, plugin = Records(), falling(fallback=["bf16", "fp32"])
    data = drawn(144)
    with (
        pytest.warns(UserWarning, match=r"64 optimizer .* goes on in 'fp32'\. If it is stuck there too, it stops\."),
        pytest.raises(FloatingPointError, match=r"64 optimizer steps in a row .* no scale is to blame"),
    ):
        train(Net(), plugin, range(3 + 64 + 64), data=data, callbacks=[records])
    assert [r.precision for r in records.all] == ["fp16"] * 3 + ["bf16"] * 64 + ["fp32"] * 64
    assert plugin.precision == "32-true"


@pytest.mark.parametrize(
    ("gradient", "nan", "stops"), [([0, 1], [2], False), ([0], [1, 2], True), ([1, 2], [0], False)]
)
def test_more_losses_than_gradients_stop_it(gradient: list[int], nan: list[int], stops: bool) -> None:
    plugin = falling()
    if not stops:
        train(Net(), plugin, gradient, nan=nan)
        assert plugin.precision == "bf16-mixed"
        return
    with pytest.raises(FloatingPointError, match="2 with a non-finite loss, 1 with .* which no loss scale can change"):
        train(Net(), plugin, gradient, nan=nan, warns=None)
    assert plugin.precision == "16-mixed"


def test_the_error_names_the_argument_where_it_would_help() -> None:
    with pytest.raises(
        FloatingPointError, match=r"or use 'bf16'.*; with `fallback=\['bf16'\]` a run that is stuck goes on"
    ):
        train(Net(), falling(fallback=()), {0, 1, 2}, warns=None)


def test_bf16_falls_back_to_fp32() -> None:
    module, plugin = Net(), falling("bf16", ["fp32"])
    warning = r"64 optimizer .* Training in 'bf16' is stuck, and goes on in 'fp32'\. If it is stuck there too, it stops"
    trainer = train(module, plugin, range(64), data=drawn(72), warns=warning)
    assert_same(trainer, train(Net(), AmpPrecision("fp32"), data=drawn(72, 64), warns=None))
    assert module.trained_in == [torch.bfloat16] * 64 + [torch.float32] * 8


def test_fp32_falls_back_to_bf16() -> None:
    """There is no need to fall back from bf16, but the request is followed: fp32 modules and shared weights work as in
    bf16.
    """
    module, plugin = Net(), falling("fp32", ["bf16"], fp32_modules=["net.3"])
    trainer = train(module, plugin, range(64), data=drawn(72), warns="goes on in 'bf16'")
    reference = train(Net(), AmpPrecision("bf16", fp32_modules=["net.3"]), data=drawn(72, 64), warns=None)
    assert_same(trainer, reference)


def test_evaluation_follows_unless_it_has_a_precision_of_its_own() -> None:
    for eval_precision, dtype in ((None, torch.bfloat16), ("fp32", torch.float32)):
        module = Validated()
        trainer = quiet_trainer(
            plugins=[falling(eval_precision=eval_precision)], callbacks=[Poison({0, 1, 2})], val_check_interval=2,
            num_sanity_val_steps=0,
        )  # fmt: skip
        with pytest.warns(UserWarning, match=STUCK):
            trainer.fit(module, batches(8), batches(1))
        first = torch.float16 if eval_precision is None else dtype
        assert module.validated_in == [first, dtype, dtype, dtype]
        trainer.validate(module, batches(1), verbose=False)  # the same Trainer keeps the precision that it trained in
        assert module.validated_in[-1] == dtype


def test_with_accumulation_whole_windows_are_dropped() -> None:
    module, plugin = Net(), falling()
    trainer = train(module, plugin, {1, 2, 4}, data=drawn(12), accumulate_grad_batches=2)
    assert_same(trainer, train(Net(), AmpPrecision("bf16"), data=drawn(12, 6), warns=None, accumulate_grad_batches=2))
    assert module.trained_in == [torch.float16] * 6 + [torch.bfloat16] * 6


def test_averaged_weights_do_not_notice() -> None:
    averages = [Averaging(), Averaging()]
    train(Net(), falling(), {0, 1, 2}, callbacks=[averages[0]])
    train(Net(), AmpPrecision("bf16"), data=drawn(without=LIMIT), callbacks=[averages[1]], warns=None)
    assert_same(*(a._average_model.state_dict() for a in averages))


def test_without_skip_nonfinite_nothing_is_skipped_from_there_on() -> None:
    module, plugin = Net(plain_sgd), falling(skip_nonfinite=False)
    train(module, plugin, {0, 1, 2, 5}, callbacks=[Records(at_once=True)])
    assert (plugin.num_steps, plugin.num_skipped) == (5, 3)
    assert module.net[0].weight.isnan().any()


def test_any_scaler() -> None:
    """Another library's scaler with a limit of 64 skips, and a scaler whose scale never moves."""
    for scaler, number in ((torch.amp.GradScaler("cpu"), 64), (64.0, 64)):
        plugin = AmpPrecision("fp16", scaler=scaler, fallback=["bf16"])
        trainer = train(Net(), plugin, range(number), data=drawn(72), warns="goes on in 'bf16'")
        assert_same(trainer, train(Net(), AmpPrecision("bf16"), data=drawn(72, number), warns=None))


# -- manual optimization -----------------------------------------------------------------------------------------------


class TwoByHand(Net):
    """Two optimizers; the second one accumulates over two batches."""

    def __init__(self, optimizer: Any = plain_adamw) -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False
        self.other = nn.Linear(FEATURES, 1)
        self.seen: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.trained_in.append(self.net[0](batch).dtype)
        first.zero_grad()
        self.manual_backward(self.loss(batch))
        first.step()
        self.manual_backward(self.other(batch).float().square().mean())
        if batch_idx % 2:
            self.seen.append(self.other.weight.grad.clone())
            second.step()
            second.zero_grad()

    def configure_optimizers(self) -> Any:
        return [self.make_optimizer(self.net.parameters()), self.make_optimizer(self.other.parameters())]


@pytest.mark.usefixtures("where_flags_live")
def test_manual_optimization_with_two_optimizers() -> None:
    """The second optimizer's gradients from before the change are unscaled, and its window continues."""
    module, plugin, records = TwoByHand(), falling(), Records(at_once=True)

    # batch 0: A skipped; batch 1: A and B skipped; so the change comes between the windows of both
    class Both(Poison):
        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            if self.batch in self.gradient:
                for p in pl_module.parameters():
                    if p.grad is not None:
                        p.grad.flatten()[0] = float("inf")

    trainer = quiet_trainer(plugins=[plugin], callbacks=[Both({0, 1}), records])
    torch.manual_seed(0)
    start = copy.deepcopy(module.state_dict())
    with pytest.warns(UserWarning, match=STUCK):
        trainer.fit(module, batches(8))
    assert module.trained_in == [torch.float16] * 2 + [torch.bfloat16] * 6
    reference = TwoByHand()
    reference.load_state_dict(start)
    quiet_trainer(plugins=[AmpPrecision("bf16")]).fit(reference, drawn(without=2))
    assert_same(module, reference)
    assert [r.optimizer_idx for r in records.all[:6]] == [0, 0, 1, 0, 0, 1]


def test_gradients_that_are_still_there_become_true_ones() -> None:
    """The first optimizer is skipped in batch 2, when the second one has half of its gradients."""
    modules: list[TwoByHand] = []
    at_once = AmpPrecision("fp16", scaler=DynamicLossScaler(64.0, max_consecutive_skips=1), fallback=["fp32"])
    for plugin in (at_once, AmpPrecision("fp32")):
        modules.append(TwoByHand(lambda params: torch.optim.SGD(params, lr=0.0)))
        scales = plugin is at_once
        train(modules[-1], plugin, {2} if scales else (), warns=r"1 optimizer .* goes on in 'fp32'" if scales else None)
    assert modules[0].trained_in == [torch.float16] * 3 + [torch.float32] * 5
    for mine, true in zip(*(module.seen[1:] for module in modules), strict=True):
        torch.testing.assert_close(mine, true, rtol=0.01, atol=1e-3)


def test_steps_in_hooks() -> None:
    """Their records are closed when the next batch begins, which is in the new precision already."""

    class Late(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            self.trained_in.append(self.net[0](batch).dtype)
            self.manual_backward(self.loss(batch))

        def on_train_batch_end(self, *args: Any) -> None:
            self.optimizers().step()
            self.optimizers().zero_grad()

    module, plugin = Late(), falling()
    train(module, plugin, {0, 1, 2})
    assert module.trained_in == [torch.float16] * 3 + [torch.bfloat16] * 5


# -- checkpoints, second fits, copies ----------------------------------------------------------------------------------


def cut(folder: Path, at: int, resumes: Callable[[], AmpPrecision], warns: str | None) -> tuple[L.Trainer, L.Trainer]:
    """Run 12 steps, and resume the same run after some of them with another plugin."""
    bad, trainers = {4, 5, 6}, []
    for ckpt_path in (None, folder / f"step={at}.ckpt"):
        saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        plugin = falling() if ckpt_path is None else resumes()
        module, callbacks = Net(), [ScaleMonitor(), *([] if ckpt_path else [saves])]
        poison = Poison(bad)
        poison.batch = -1 if ckpt_path is None else at - 1
        torch.manual_seed(0)
        trainer = quiet_trainer(
            plugins=[plugin],
            callbacks=[poison, *callbacks],
            max_steps=12,
            max_epochs=-1,
            enable_checkpointing=ckpt_path is None,
        )
        expected = STUCK if ckpt_path is None else warns
        with contextlib.nullcontext() if expected is None else pytest.warns(UserWarning, match=expected):
            trainer.fit(module, Resumable(count=16), ckpt_path=ckpt_path)
        trainers.append(trainer)
    return trainers[0], trainers[1]


@pytest.mark.usefixtures("weights_only")
@pytest.mark.parametrize(("at", "warns"), [(6, STUCK), (7, None), (9, None)])
def test_a_resumed_run_equals_the_uninterrupted_one(
    at: int, warns: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Resume from before the change, from right after it (in its batch's `on_train_batch_end`) and from later."""
    with caplog.at_level("INFO"):
        whole, resumed = cut(tmp_path, at, falling, warns)
    assert_same(whole, resumed)
    assert_same(whole.optimizers[0].state_dict(), resumed.optimizers[0].state_dict())
    plugins = whole.precision_plugin, resumed.precision_plugin
    assert plugins[0].state_dict() == plugins[1].state_dict()
    assert [plugin.precision for plugin in plugins] == ["bf16-mixed"] * 2
    histories = [t.callbacks[1].history for t in (whole, resumed)]
    assert list(histories[0]) == list(histories[1])
    said = "the run of the checkpoint was stuck in 'fp16' and fell back to 'bf16', in which it goes on."
    assert caplog.text.count(said) == (warns is None)


def test_the_checkpoint_says_what_it_was_written_in(tmp_path: Path) -> None:
    cut(tmp_path, 9, falling, None)
    for at, (now, scaler) in {6: ("fp16", True), 7: ("bf16", False)}.items():
        checkpoint = torch.load(tmp_path / f"step={at}.ckpt", weights_only=True)
        entry = checkpoint["AmpPrecision"]
        assert (entry["precision"], entry["began_in"]) == (now, "fp16")
        assert (entry["scaler"] is not None) is scaler
        assert ("MixedPrecision" in checkpoint) is scaler
        assert entry["last_step"][-1] == "fp16"


@pytest.mark.parametrize(
    ("plugin", "precision", "said"),
    [
        (lambda: AmpPrecision("fp16"), "bf16-mixed", "in which it goes on"),
        (lambda: AmpPrecision("fp16", fallback=["fp32"]), "bf16-mixed", "in which it goes on"),
        (lambda: AmpPrecision("fp32"), "32-true", "this one is in 'fp32', as passed"),
        (lambda: AmpPrecision("bf16"), "bf16-mixed", None),
    ],
)
def test_whoever_resumes(
    plugin: Any, precision: str, said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        _, resumed = cut(tmp_path, 9, plugin, None)
    assert resumed.precision_plugin.precision == precision
    assert caplog.text.count("fell back") == (said is not None)
    assert said is None or said in caplog.text


def test_a_second_fit_goes_on_and_another_trainer_starts_afresh(caplog: pytest.LogCaptureFixture) -> None:
    module, plugin = Net(), falling()
    scaler = plugin.scaler
    trainer = train(module, plugin, {0, 1, 2})
    trainer.fit_loop.max_epochs = 2
    with caplog.at_level("INFO"):
        trainer.fit(module, batches(2))
    assert (plugin.precision, plugin.scaler, plugin.num_steps) == ("bf16-mixed", None, 7)
    assert caplog.text.count("bf16 autocast on") == 1
    assert plugin.records.streak == ()
    again = Net()
    train(again, plugin, {4}, warns=None)
    assert plugin.precision == "16-mixed"
    assert plugin.scaler is scaler
    assert again.trained_in == [torch.float16] * 8
    assert (plugin.num_steps, plugin.num_skipped, scaler.get_scale()) == (7, 1, 32.0)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_checkpoint_from_before_brings_a_second_fit_back(tmp_path: Path) -> None:
    module, plugin = Net(), falling()
    saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = train(module, plugin, {2, 3, 4}, callbacks=[saves], enable_checkpointing=True)
    assert plugin.precision == "bf16-mixed"
    module.trained_in.clear()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, batches(8), ckpt_path=tmp_path / "step=2.ckpt")
    assert (plugin.precision, plugin.scaler.get_scale()) == ("16-mixed", 64.0)
    assert set(module.trained_in) == {torch.float16}
    assert plugin.num_skipped == 0


@pytest.mark.parametrize("make", [copy.deepcopy, lambda plugin: pickle.loads(pickle.dumps(plugin))])
def test_a_copy_starts_afresh(make: Any) -> None:
    plugin = falling(fallback=["bf16", "fp32"])
    assert make(plugin).precision == "16-mixed"
    train(Net(), plugin, {0, 1, 2})
    copied = make(plugin)
    assert (copied.precision, copied.scaler.max_consecutive_skips) == ("16-mixed", LIMIT)
    assert plugin.precision == "bf16-mixed"
    train(Net(), copied, {0, 1, 2})


def test_nothing_is_left_behind() -> None:
    module, plugin = Net(), falling(fp32_modules=["net.3"])
    before = attributes(module)
    of_torch = torch_optimizers._global_optimizer_pre_hooks, torch_optimizers._global_optimizer_post_hooks
    hooks = [dict(found) for found in of_torch]
    during: list[Any] = []

    class Looks(L.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            during.append([len(torch_optimizers._global_optimizer_pre_hooks), watched(module)])

    def watched(module: nn.Module) -> int:
        return sum(len(p._post_accumulate_grad_hooks or ()) for p in module.parameters())

    train(module, plugin, {0, 1, 2}, callbacks=[Looks()])
    assert during[0] == [len(hooks[0]) + 1, 1]  # loss scaling's own records disappear with it
    assert during[-1] == [len(hooks[0]), 0]
    assert attributes(module) == before
    assert [*of_torch] == hooks
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
