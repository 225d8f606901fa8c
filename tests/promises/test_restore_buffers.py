"""Row 38: a skipped step restores named buffers that a step writes (a queue, a centre, a codebook)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support import Toy, WithoutAutocast, assert_same, fit, weights
from support.promises import DIFFERS, OPTIMIZERS, PLAIN_AND_FUSED, Plugins, fused_adamw, plain_adamw, promise
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp import AmpPrecision, DynamicLossScaler

WIDTH, SLOTS = 16, 12


def data(count: int = 10, without: Sequence[int] = ()) -> DataLoader[Tensor]:
    generator = torch.Generator().manual_seed(3)
    everything = [torch.randn(4, 8, generator=generator) for _ in range(count)]
    return DataLoader([b for i, b in enumerate(everything) if i not in without], batch_size=None)  # pyright: ignore[reportArgumentType]


class MoCo(Toy):
    """A queue of keys, which the step writes in place. Keys of earlier batches are negatives of later ones."""

    rules: tuple[str, ...] = ("queue*",)

    def __init__(self, optimizer: Any = plain_adamw, bad: Sequence[int] = ()) -> None:
        super().__init__(optimizer, nn.Linear(8, WIDTH))
        self.bad = bad
        self.register_buffer("queue", nn.functional.normalize(torch.randn(WIDTH, SLOTS), dim=0))
        self.register_buffer("queue_pointer", torch.zeros(1, dtype=torch.long))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(batch * float("inf") if batch_idx in self.bad else batch)

    def loss(self, batch: Tensor) -> Tensor:
        query = nn.functional.normalize(self.net(batch), dim=1)
        with torch.no_grad():
            key = nn.functional.normalize(self.net(batch.roll(1, 1)), dim=1)
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone()], 1)
        self.write(key)
        labels = torch.zeros(len(batch), dtype=torch.long, device=batch.device)
        return nn.functional.cross_entropy(logits.float(), labels)

    @torch.no_grad()
    def write(self, key: Tensor) -> None:
        start = int(self.queue_pointer)
        self.queue[:, start : start + len(key)] = key.mT
        self.queue_pointer[0] = (start + len(key)) % SLOTS


class Data(MoCo):
    """Writes through `.data`, past autograd's counter, as vector quantisers write their codebooks."""

    def write(self, key: Tensor) -> None:
        start = int(self.queue_pointer)
        self.queue.data[:, start : start + len(key)] = key.mT
        self.queue_pointer.data[0] = (start + len(key)) % SLOTS


class Replaced(MoCo):
    """Replaces the tensor by a new one, as DINO moves its centre."""

    rules = ("queue", "queue_pointer")

    @torch.no_grad()
    def write(self, key: Tensor) -> None:
        moved = self.queue * 0.75
        moved[:, : len(key)] += key.mT
        self.queue = moved
        self.queue_pointer = self.queue_pointer + 1


class Growing(MoCo):
    """A memory bank that grows and is not saved in checkpoints."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("queue_first", None)

    @torch.no_grad()
    def write(self, key: Tensor) -> None:
        self.queue = torch.cat([self.queue, key.mT], 1)
        if getattr(self, "queue_first", None) is None:
            self.queue_first = key.mean(0)


class Hidden(MoCo):
    """A buffer inside another module that is not in the state dict."""

    rules = ("*.queue*",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self.queue, self.queue_pointer
        self.memory = nn.Module()
        self.memory.register_buffer(
            "queue", nn.functional.normalize(torch.randn(WIDTH, SLOTS), dim=0), persistent=False
        )
        self.memory.register_buffer("queue_pointer", torch.zeros(1, dtype=torch.int32), persistent=False)

    def on_train_start(self) -> None:
        self.queue, self.queue_pointer = self.memory.queue, self.memory.queue_pointer


KINDS: dict[str, type[MoCo]] = {
    "in place": MoCo, "data": Data, "replaced": Replaced, "growing": Growing, "hidden": Hidden,
}  # fmt: skip


def buffers(trainer: L.Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.lightning_module.named_buffers()}


def ours(kind: type[MoCo]) -> AmpPrecision:
    return WithoutAutocast("fp16", scaler=DynamicLossScaler(2.0**10), restore_buffers=kind.rules)


@pytest.mark.parametrize("bad", [(0,), (3, 4)])
@pytest.mark.parametrize("optimizer", PLAIN_AND_FUSED)
@pytest.mark.parametrize("kind", KINDS)
@promise(38, stock=DIFFERS)
@pytest.mark.few(14)
def test_a_queue_is_that_of_a_run_without_the_batch(
    plugins: Plugins, kind: str, optimizer: str, bad: tuple[int, ...]
) -> None:
    make = functools.partial(KINDS[kind], OPTIMIZERS[optimizer])
    trainer = fit(lambda: make(bad=bad), ours(KINDS[kind]) if plugins.ours else plugins.scaled(), data())
    reference = fit(make, None, data(without=bad))
    assert_same(trainer, reference)
    assert_same(buffers(trainer), buffers(reference))


class Manual(MoCo):
    """Two optimizers. The second forward writes the queue."""

    def __init__(self, order: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False
        self.other = nn.Linear(8, 1)
        self.order = order

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        if self.order == "in turn":
            self.turn(first, self.other(batch).square().mean())
        self.turn(second, super().training_step(batch, batch_idx))
        if self.order == "after":
            self.turn(first, self.other(batch).square().mean())

    def turn(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.other.parameters()), self.make_optimizer(self.net.parameters())


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("order", ["in turn", "after"])
@pytest.mark.parametrize("optimizer", ["adamw", "fused adamw"])
@pytest.mark.few(8)
def test_manual_optimization(optimizer: str, order: str) -> None:
    make = functools.partial(Manual, order, OPTIMIZERS[optimizer])
    trainer = fit(lambda: make(bad=[3]), ours(Manual), data())
    reference = fit(make, None, data(without=[3]))
    assert_same(buffers(trainer), buffers(reference))
    own = {name: value for name, value in weights(trainer).items() if not name.startswith("other")}
    assert_same(own, {name: value for name, value in weights(reference).items() if name in own})


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_an_infinity_that_belongs_there_stays() -> None:
    """NaN often marks empty slots. A step without a loss must keep its writes all the same."""

    class Marked(MoCo):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue_age", torch.full((10,), float("inf")))

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.queue_age[batch_idx] = batch_idx
            return None if batch_idx == 4 else super().training_step(batch, batch_idx)

    trainer = fit(Marked, ours(Marked), data())
    assert_same(trainer.lightning_module.queue_age, torch.arange(10.0))


@pytest.mark.usefixtures("where_flags_live")
def test_a_checkpoint_has_the_buffers_of_the_last_good_step(tmp_path: Path) -> None:
    trainer = fit(lambda: MoCo(fused_adamw, bad=[3]), ours(MoCo), data(4))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    assert_same(saved["queue"], fit(lambda: MoCo(fused_adamw), None, data(3)).lightning_module.queue)


# -- rules ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (["quue"], r"'quue', which matches no buffer. Close to it are: 'queue'"),
        (["queue", "centre"], r"'centre', which matches no buffer. There are: 'queue', 'queue_pointer'"),
    ],
)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_rule_that_matches_nothing(rules: list[str], message: str, precision: str) -> None:
    with pytest.raises(ValueError, match=f"`restore_buffers` has the rule {message}"):
        fit(MoCo(), AmpPrecision(precision, restore_buffers=rules))


@pytest.mark.parametrize("rules", ["queue", [3], [nn.Linear], [""], 7])
def test_what_is_no_rule(rules: Any) -> None:
    with pytest.raises(ValueError, match=r"`restore_buffers` must (be a sequence|hold globs)"):
        AmpPrecision("bf16", restore_buffers=rules)


def test_compiled_and_shared_names() -> None:
    class Shared(MoCo):
        rules = ("b.queue",)

        def __init__(self, bad: Sequence[int] = ()) -> None:
            super().__init__(bad=bad)
            self.a = self.b = Hidden().memory
            del self.queue, self.queue_pointer

        def on_train_start(self) -> None:  # on the device
            self.queue, self.queue_pointer = self.a.queue, self.a.queue_pointer

        def write(self, key: Tensor) -> None:
            self.queue[:, : len(key)] = key.mT

    assert_same(
        buffers(fit(lambda: Shared(bad=[3]), ours(Shared), data())), buffers(fit(Shared, None, data(without=[3])))
    )
