"""Normalisation statistics of a skipped batch are taken back."""

from __future__ import annotations

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
        self._open = False
        self._backward = False

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
        if not self._open or not self._backward:
            version = _version(buffers)
            if self._snapshot is None or self._snapshot.version != version:
                self._snapshot = _Snapshot(buffers, version, self._snapshot)
        self._open = True
        self._backward = False

    def note_backward(self) -> None:
        """The step had a backward: its optimizer step will decide."""
        self._backward = True

    def settle(self) -> None:
        """Drop the statistics of a step without a backward if they are not finite (SWA's BatchNorm pass)."""
        if self._open and not self._backward and self._snapshot is not None:
            buffers = self._buffers()
            if _version(buffers) != self._snapshot.version:
                self._snapshot.restore_unless_finite(buffers)
                self._snapshot = None
            self._open = False

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
        elif isinstance(outcome.skipped, Tensor):
            basis.restore_where(buffers, outcome.skipped)
        version = _version(buffers)
        self._previous = (basis, version)
        self._open = self._backward = False
        self._snapshot = None
        if inside_step:
            self._snapshot = _Snapshot(buffers, version, None)
            self._open = True


class _Snapshot:
    """Copies of buffers, flat per device and dtype."""

    def __init__(self, buffers: list[Tensor], version: int, old: _Snapshot | None) -> None:
        self.version = version
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, buffer in enumerate(buffers):
            groups.setdefault((buffer.device, buffer.dtype), []).append(i)
        shapes = [b.shape for b in buffers]
        if old is not None and old._groups == groups and old._shapes == shapes:
            self._flat = old._flat
        else:
            self._flat = {
                key: torch.empty(sum(buffers[i].numel() for i in indices), device=key[0], dtype=key[1])
                for key, indices in groups.items()
            }
        self._groups, self._shapes = groups, shapes
        with torch.no_grad():
            for key, indices in groups.items():
                _compat.foreach_copy_(self._views(key), [buffers[i] for i in indices])

    def _views(self, key: tuple[torch.device, torch.dtype], flat: Tensor | None = None) -> list[Tensor]:
        shapes = [self._shapes[i] for i in self._groups[key]]
        parts = (self._flat[key] if flat is None else flat).split([shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def copies(self) -> list[Tensor]:
        """In the order of the buffers."""
        found: dict[int, Tensor] = {}
        for key, indices in self._groups.items():
            found.update(zip(indices, (view.clone() for view in self._views(key)), strict=True))
        return [found[i] for i in range(len(found))]

    @torch.no_grad()
    def restore(self, buffers: list[Tensor]) -> None:
        for key, indices in self._groups.items():
            _compat.foreach_copy_([buffers[i] for i in indices], self._views(key))

    @torch.no_grad()
    def restore_where(self, buffers: list[Tensor], flag: Tensor) -> None:
        """On the device; `where`, not `lerp`: NaN times 0 is NaN."""
        for key, indices in self._groups.items():
            here = [buffers[i] for i in indices]
            now = torch.cat([b.reshape(-1) for b in here])
            merged = torch.where(flag.to(key[0]) > 0, self._flat[key], now)
            _compat.foreach_copy_(here, self._views(key, merged))

    @torch.no_grad()
    def restore_unless_finite(self, buffers: list[Tensor]) -> None:
        sums = [b.sum() for b in buffers if b.is_floating_point()]
        bad = torch.isfinite(torch.stack(sums)).all().logical_not() if sums else None
        if bad is not None:
            self.restore_where(buffers, bad)


def _version(buffers: list[Tensor]) -> int:
    """Grows with every in-place change of any buffer; also changes when a buffer is replaced."""
    return sum(_compat.version(b) for b in buffers) + sum(id(b) for b in buffers)
