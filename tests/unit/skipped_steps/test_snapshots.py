"""Buffers are restored in place, on the device if only the device knows. Replaced tensors come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import CountReads, flags_on_a_device
from torch import Tensor, nn

from lightning_amp.scaling import Skip
from lightning_amp.skipped_steps import BufferPlace
from lightning_amp.skipped_steps._snapshots import Snapshot

INF, NAN = float("inf"), float("nan")


class Holder:
    """Return places of buffers of two dtypes and several shapes, one of them `None`."""

    def __init__(self, **more: Any) -> None:
        self.module = nn.Module()
        values = {
            "mean": torch.ones(3),
            "var": torch.full((2, 2), 2.0),
            "count": torch.tensor(7),
            "later": None,
            **more,
        }
        for name, value in values.items():
            self.module.register_buffer(name, value)
        self.places = [BufferPlace(self.module, name, name) for name in values]
        self.first = self.read()
        self.snapshot = Snapshot(self.first)
        self.snapshot.take(0)

    def read(self) -> list[Tensor | None]:
        return [place.read() for place in self.places]

    def write(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self.module, name, value)

    @property
    def values(self) -> list[Any]:
        return [value if value is None else value.tolist() for value in self.read()]


BEFORE = [[1.0, 1.0, 1.0], [[2.0, 2.0], [2.0, 2.0]], 7, None]


def restore(holder: Holder, how: str) -> None:
    if how == "restore":
        holder.snapshot.restore(holder.places)
    else:
        holder.snapshot.restore_where(holder.places, Skip(torch.tensor(1.0)) if how == "device" else Skip.YES)


WAYS = ["restore", "device", "host"]


@pytest.mark.parametrize("how", WAYS)
def test_what_was_written_in_place_is_put_back_in_place(how: str) -> None:
    holder = Holder()
    for buffer in holder.read()[:3]:
        buffer.mul_(0).add_(5)
    holder.write(later=torch.ones(1))
    restore(holder, how)
    assert holder.values == BEFORE
    assert holder.snapshot.is_of(holder.read())


@pytest.mark.parametrize("how", WAYS)
def test_a_tensor_that_replaced_another_is_not_written_into(how: str) -> None:
    holder = Holder()
    holder.write(mean=(mine := torch.full((3,), NAN)), count=torch.tensor(9), var=(grown := torch.ones(5)))
    restore(holder, how)
    assert holder.values == BEFORE
    assert mine.isnan().all()
    assert grown.tolist() == [1.0] * 5


def test_on_the_device_nothing_happens_to_a_step_that_was_taken() -> None:
    holder = Holder()
    holder.write(mean=torch.full((3,), 4.0), var=torch.ones(5), later=torch.ones(1))
    holder.module.count.add_(1)
    holder.snapshot.restore_where(holder.places, Skip(torch.tensor(0.0)))
    assert holder.values == [[4.0] * 3, [1.0] * 5, 8, [1.0]]


@pytest.mark.parametrize(("shape", "reads"), [((3,), 0), ((4,), 1)])
def test_it_waits_only_where_a_shape_changed(shape: tuple[int, ...], reads: int) -> None:
    holder = Holder()
    holder.write(mean=torch.zeros(shape))
    with CountReads() as counted:
        holder.snapshot.restore_where(holder.places, Skip(torch.tensor(1.0)), Skip(torch.tensor(0.0)))
    assert counted.count == reads
    assert holder.values == BEFORE


@pytest.mark.parametrize("bad_loss", [False, True])
@pytest.mark.parametrize("value", [3.0, NAN, INF])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_bad_loss_takes_back_only_what_is_not_finite(bad_loss: bool, value: float, replaced: bool) -> None:
    """The step was applied, since its gradients were repaired."""
    with flags_on_a_device():
        holder = Holder()
        if replaced:
            holder.write(mean=torch.full((3,), value))
        else:
            holder.module.mean.fill_(value)
        holder.module.count.add_(1)
        bad = Skip.if_nonfinite(torch.tensor(NAN if bad_loss else 1.0))
        holder.snapshot.restore_where(holder.places, Skip(torch.tensor(0.0)), bad)
    taken_back = bad_loss and value != 3.0
    assert holder.module.count.item() == (7 if taken_back else 8)
    assert (holder.values == BEFORE) is taken_back


def test_what_was_infinite_before_stays_as_it_is() -> None:
    """NaN often marks empty slots, and says nothing about this step."""
    for before, after in ((1.0, 1.0), (INF, NAN)):
        holder = Holder(age=torch.tensor([before]))
        holder.module.age.fill_(NAN)
        holder.module.count.add_(1)
        holder.snapshot.restore_unless_finite(holder.places)
        torch.testing.assert_close(holder.module.age.item(), after, equal_nan=True)
        assert holder.module.count.item() == (7 if before == 1.0 else 8)


def test_finite_values_stay() -> None:
    holder = Holder()
    holder.module.mean.fill_(3.0)
    holder.snapshot.restore_unless_finite(holder.places)
    assert holder.values[0] == [3.0] * 3


def test_whole_numbers_alone_are_never_taken_back() -> None:
    holder = Holder(mean=None, var=None)
    holder.module.count.add_(1)
    holder.snapshot.restore_unless_finite(holder.places)
    assert holder.module.count.item() == 8


def test_it_can_be_taken_again_and_its_copies_are_their_own() -> None:
    holder = Holder()
    holder.module.mean.fill_(3.0)
    holder.snapshot.take(4)
    assert holder.snapshot.version == 4
    copies = holder.snapshot.copies()
    assert [copy if copy is None else copy.tolist() for copy in copies] == holder.values
    copies[0].fill_(NAN)
    holder.snapshot.restore(holder.places)
    assert holder.values[0] == [3.0] * 3


def test_it_knows_its_tensors() -> None:
    holder = Holder()
    assert holder.snapshot.is_of(holder.read())
    assert not holder.snapshot.is_of(holder.read()[:-1])
    holder.write(mean=holder.module.mean.clone())
    assert not holder.snapshot.is_of(holder.read())


def test_whether_it_is_finite() -> None:
    for make, finite in ((Holder, True), (lambda: Holder(bad=torch.tensor(INF, dtype=torch.float64)), False)):
        kind: Callable[[], Holder] = make
        assert kind().snapshot.is_finite() is finite
