"""Copy buffers into one flat tensor per device and dtype, and restore them."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import final

from lightning_amp._compat import _torch
from lightning_amp.numerics import all_finite
from lightning_amp.scaling import Skip
from lightning_amp.skipped_steps._named_buffers import BufferPlace

Buffers = Sequence[Tensor | None]


@final
class Snapshot:
    """The values of some buffers at one time.

    With `is_unseen`, autograd does not see that values are restored. The forward of a normalisation layer in training
    mode saves its running statistics, and its backward does not read them. A restore that is seen would make the
    backward fail if the forward came first: in a GAN, the generator's, after the discriminator's step was skipped.
    """

    def __init__(self, buffers: Buffers, *, is_unseen: bool = False) -> None:
        self._buffers = list(buffers)
        self._is_unseen = is_unseen
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, buffer in enumerate(buffers):
            if buffer is not None:
                groups.setdefault((buffer.device, buffer.dtype), []).append(i)
        self._groups = [_Group(self._buffers, indices) for indices in groups.values()]
        self._copies = {i: view for group in self._groups for i, view in zip(group.indices, group.views, strict=True)}
        self.version = -1

    def is_of(self, buffers: Buffers) -> bool:
        """Return whether the snapshot was made of exactly these tensor objects."""
        return len(buffers) == len(self._buffers) and all(map(operator.is_, buffers, self._buffers))

    @torch.no_grad()
    def take(self, version: int) -> None:
        """Copy the current values of the buffers."""
        self.version = version
        for group in self._groups:
            _torch.foreach_copy_(group.views, group.of(self._buffers))

    def copies(self) -> list[Tensor | None]:
        """Return copies of the values, in the order of the buffers."""
        return [self._copies[i].clone() if i in self._copies else None for i in range(len(self._buffers))]

    def is_finite(self) -> bool:
        """Return whether all values are finite. This waits for the device."""
        return bool(all_finite(group.flat for group in self._groups))

    @torch.no_grad()
    def restore(self, places: Sequence[BufferPlace]) -> None:
        """Restore the values. Restore the earlier tensor object where it was replaced."""
        for group in self._groups:
            self._write(group, group.views)
        for place, buffer in zip(places, self._buffers, strict=True):
            if place.read() is not buffer:
                place.write(buffer)

    def _write(self, group: _Group, values: list[Tensor]) -> None:
        targets = group.of(self._buffers)
        _torch.foreach_copy_([t.data for t in targets] if self._is_unseen else targets, values)

    @torch.no_grad()
    def restore_where(self, places: Sequence[BufferPlace], skip: Skip, bad_loss: Skip = Skip.NO) -> None:
        """Restore all values if `skip`, or if `bad_loss` and the current values are not finite.

        The device decides. The host waits for the flag only if a shape changed.
        """
        now = [place.read() for place in places]
        changed = [i for i, (new, old) in enumerate(zip(now, self._buffers, strict=True)) if new is not old]
        current = [torch.cat([b.reshape(-1) for b in group.of(self._buffers)]) for group in self._groups]
        # tensors that were replaced do not count any more
        filled = [b for b in (now if changed else current) if b is not None and b.is_floating_point()]
        if bad_loss.known is not False and filled:
            bad = all_finite(filled).logical_not()
            skip |= Skip(bad & (bad_loss.flag(bad.device) > 0))
        for group, values in zip(self._groups, current, strict=True):
            # `where`, not `lerp`: NaN times 0 is NaN
            restored = group.split(torch.where(skip.flag(values.device) > 0, group.flat, values))
            self._write(group, restored)
        for i in changed:
            old, new = self._buffers[i], now[i]
            if _alike(old, new):
                assert new is not None
                places[i].write(torch.where(skip.flag(new.device) > 0, self._copies[i], new))
            elif skip.wait():
                places[i].write(old)

    @torch.no_grad()
    def restore_unless_finite(self, places: Sequence[BufferPlace]) -> None:
        """Restore the values if all of them were finite, and the current values are not."""
        now = [b for place in places if (b := place.read()) is not None and b.is_floating_point()]
        before = [group.flat for group in self._groups if group.flat.is_floating_point()]
        if now and before:
            self.restore_where(places, Skip(all_finite(before) & all_finite(now).logical_not().to(before[0].device)))


@final
class _Group:
    """Memory for the buffers of one device and dtype, with a view for each buffer."""

    def __init__(self, buffers: Buffers, indices: list[int]) -> None:
        self.indices = indices
        members = self.of(buffers)
        self._shapes = [buffer.shape for buffer in members]
        first = members[0]
        self.flat = torch.empty(sum(s.numel() for s in self._shapes), device=first.device, dtype=first.dtype)
        self.views = self.split(self.flat)

    def of(self, buffers: Buffers) -> list[Tensor]:
        """Return the items of this group from a list with one item per buffer."""
        members = [buffers[i] for i in self.indices]
        return [member for member in members if member is not None]

    def split(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


def _alike(old: Tensor | None, new: Tensor | None) -> bool:
    if old is None or new is None:
        return False
    return (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
