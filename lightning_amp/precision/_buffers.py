"""Normalisation statistics of a skipped batch are taken back."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_amp import _compat
from lightning_amp.scaling import Outcome


class BufferGuard:
    """Running statistics are those of a run that never drew the skipped batch.

    A forward that overflows folds inf or NaN into BatchNorm's running mean for ever. A snapshot is taken when a window
    opens (one copy for all buffers of a dtype) and put back if its step is skipped. A window is everything since the
    last attempted step, so with accumulation all its batches are dropped.

    Args:
        module: The user's.

    """

    def __init__(self, module: nn.Module) -> None:
        self._norms = _compat.norm_modules(module)
        self._names = {norm: name for name, norm in module.named_modules()}
        self._snapshot: _Snapshot | None = None
        self._previous: tuple[_Snapshot, int] | None = None
        self._spare: _Snapshot | None = None  # nobody needs it any more; its memory is used again
        self._open = False
        self._backward = False  # in this training step
        self._decided_later = False  # some backward of this window will be followed by a step

    def __bool__(self) -> bool:
        return bool(self._norms)

    def _buffers(self) -> list[Tensor]:
        # looked up each time: SWA's BatchNorm update replaces the tensors
        return [b for norm in self._norms for b in norm.buffers(recurse=False)]

    def enter_step(self) -> None:
        """A training step begins."""
        buffers = self._buffers()
        if self._open and not self._backward:
            self.settle()  # the step before had no backward, so no flag will ever tell whether it was good
        if not self._open:
            self._decided_later = False
            version = _version(buffers)
            if self._snapshot is None or self._snapshot.version != version:
                self._take(buffers, version, self._snapshot or self._spare)
        self._open = True
        self._backward = False

    def _take(self, buffers: list[Tensor], version: int, old: _Snapshot | None) -> None:
        if old is self._spare:
            self._spare = None
        if old is None or not old.is_of(buffers):
            old = _Snapshot(buffers)
        old.take(version)
        self._snapshot = old

    def note_backward(self) -> None:
        """The step had a backward: its optimizer step will decide."""
        self._backward = self._decided_later = True

    def settle(self) -> None:
        """Drop the statistics of a step without a backward if they are not finite (SWA's BatchNorm pass)."""
        if self._open and not self._backward and self._snapshot is not None:
            buffers = self._buffers()
            if _version(buffers) != self._snapshot.version:
                self._snapshot.restore_unless_finite(buffers)
                if not self._decided_later:
                    self._snapshot = None
            self._open = self._decided_later

    def mend(self, state_dict: dict[str, Any]) -> None:
        """Take the statistics of an overflow out of a checkpoint that is saved in the middle of a window.

        The window cannot be dropped any more where the checkpoint is loaded: its gradients are not in there. Finite
        statistics stay, as in fp32. Waits for the device if a window is open.

        Args:
            state_dict: Of the module; its entries are replaced, never written into.

        """
        snapshot = self._snapshot
        if not (self._norms and self._open) or snapshot is None:
            return
        names = [f"{self._names[n]}.{name}" for n in self._norms for name, _ in n.named_buffers(recurse=False)]
        entries = [state_dict.get(name.removeprefix(".")) for name in names]
        if all(e is None or bool(torch.isfinite(e).all()) for e in entries):
            return
        for name, entry, value in zip(names, entries, snapshot.copies(), strict=True):
            if entry is not None and entry.shape == value.shape:
                state_dict[name.removeprefix(".")] = value

    def observe(self, outcome: Outcome, inside_step: bool) -> None:
        """A step was attempted.

        Args:
            outcome: What became of it.
            inside_step: Manual optimization: more forwards may follow in this training step.

        """
        if outcome.skipped is not True:
            self.settle()  # a step without a new backward: its flag says nothing about the forward
        buffers = self._buffers()
        version = _version(buffers)
        basis = self._snapshot
        if self._previous is not None and self._previous[1] == version:
            basis = self._previous[0]  # no forward since the last attempt: backward, backward, step, step
        if basis is None:
            return
        if outcome.skipped is True:
            basis.restore(buffers)
        else:  # also of a batch that was not dropped, since its gradients were mended: NaN stays in there for ever
            bad_loss = outcome.bad_loss
            if isinstance(outcome.skipped, Tensor) or isinstance(bad_loss, Tensor):
                basis.restore_where(buffers, outcome.skipped, bad_loss)
            elif bad_loss:
                basis.restore_unless_finite(buffers)
        version = _version(buffers)
        if self._previous is not None and self._previous[0] is not basis:
            self._spare = self._previous[0]
        self._previous = (basis, version)
        self._open = self._backward = self._decided_later = False
        self._snapshot = None
        if inside_step:
            self._take(buffers, version, self._spare)
            self._open = True


class _Snapshot:
    """Copies of buffers, flat per device and dtype."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self._buffers = buffers
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, buffer in enumerate(buffers):
            groups.setdefault((buffer.device, buffer.dtype), []).append(i)
        self._groups = [_Group(buffers, indices) for indices in groups.values()]
        self.version = -1

    def is_of(self, buffers: list[Tensor]) -> bool:
        """Whether it has place for these very tensors."""
        return len(buffers) == len(self._buffers) and all(map(operator.is_, buffers, self._buffers))

    @torch.no_grad()
    def take(self, version: int) -> None:
        """Copy the buffers as they are."""
        self.version = version
        for group in self._groups:
            _compat.foreach_copy_(group.views, [self._buffers[i] for i in group.indices])

    def copies(self) -> list[Tensor]:
        """In the order of the buffers."""
        found = {i: view for group in self._groups for i, view in zip(group.indices, group.views, strict=True)}
        return [found[i].clone() for i in range(len(found))]

    @torch.no_grad()
    def restore(self, buffers: list[Tensor]) -> None:
        for group in self._groups:
            _compat.foreach_copy_([buffers[i] for i in group.indices], group.views)

    @torch.no_grad()
    def restore_where(self, buffers: list[Tensor], flag: Tensor | bool, if_not_finite: Tensor | bool = False) -> None:
        """On the device; `where`, not `lerp`: NaN times 0 is NaN.

        Args:
            buffers: What to restore.
            flag: Shape []: put all back where it is set.
            if_not_finite: Shape [], bool: where it is set, put all back if one of them is not finite.

        """
        now = [torch.cat([buffers[i].reshape(-1) for i in group.indices]) for group in self._groups]
        back = flag > 0
        if if_not_finite is not False:
            for values in now:
                if values.is_floating_point():
                    back = back | (torch.isfinite(values).all().logical_not() & if_not_finite)
        for group, values in zip(self._groups, now, strict=True):
            here = [buffers[i] for i in group.indices]
            where = torch.as_tensor(back, device=values.device)
            _compat.foreach_copy_(here, group.split(torch.where(where, group.flat, values)))

    @torch.no_grad()
    def restore_unless_finite(self, buffers: list[Tensor]) -> None:
        sums = [b.sum() for b in buffers if b.is_floating_point()]
        bad = torch.isfinite(torch.stack(sums)).all().logical_not() if sums else None
        if bad is not None:
            self.restore_where(buffers, bad)


class _Group:
    """Place for the buffers of one device and dtype; the views of it are made once."""

    def __init__(self, buffers: list[Tensor], indices: list[int]) -> None:
        self.indices = indices
        self._shapes = [buffers[i].shape for i in indices]
        first = buffers[indices[0]]
        self.flat = torch.empty(sum(s.numel() for s in self._shapes), device=first.device, dtype=first.dtype)
        self.views = self.split(self.flat)

    def split(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


def _version(buffers: list[Tensor]) -> int:
    """Grows with every in-place change of any buffer; also changes when a buffer is replaced."""
    return sum(_compat.version(b) for b in buffers) + sum(id(b) for b in buffers)
