"""What a skipped batch wrote into buffers is taken back: normalisation statistics, and what the user names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from typing_extensions import final

from lightning_amp._compat import _modules
from lightning_amp.numerics import all_finite
from lightning_amp.scaling import StepResult
from lightning_amp.skipped_steps._named_buffers import BufferPlace, norm_places
from lightning_amp.skipped_steps._snapshots import Buffers, Snapshot


@final
class StatisticsRollback:
    """Keeps buffers as in a run that never drew the skipped batch.

    A forward that overflows folds inf or NaN into BatchNorm's running mean forever. A snapshot is taken when a window
    opens (one copy for all buffers of a dtype) and put back if its step is skipped. A window is everything since the
    last attempted step, so with accumulation all its batches are dropped.

    Args:
        module: The user's; its normalisation statistics are kept.
        named: Other buffers.

    """

    def __init__(self, module: nn.Module, named: Sequence[BufferPlace] = ()) -> None:
        norms = norm_places(module)
        self._parts = [part for part in (_Part(norms, counted=True), _Part(named, counted=False)) if part]

    def __bool__(self) -> bool:
        return bool(self._parts)

    def enter_step(self) -> None:
        """Remember the buffers if a window opens with this training step."""
        for part in self._parts:
            part.enter_step()

    def note_backward(self) -> None:
        """Note that the training step had a backward: its optimizer step will decide."""
        for part in self._parts:
            part.note_backward()

    def settle(self) -> None:
        """Drop what a step without a backward wrote if it is not finite (SWA's BatchNorm pass)."""
        for part in self._parts:
            part.settle()

    def mend(self, state_dict: dict[str, Any]) -> None:
        """Take what an overflow wrote out of a checkpoint that is saved in the middle of a window.

        The window cannot be dropped any more where the checkpoint is loaded: its gradients are not in there. Finite
        values stay, as in fp32. Waits for the device if a window is open.

        Args:
            state_dict: Of the module; its entries are replaced, never written into.

        """
        for part in self._parts:
            part.mend(state_dict)

    def observe(self, result: StepResult, inside_step: bool) -> None:
        """Put buffers back after a step that was skipped.

        Args:
            result: What became of it.
            inside_step: Manual optimization: more forwards may follow in this training step.

        """
        for part in self._parts:
            part.observe(result, inside_step)


@final
class _Part:
    """Buffers of one kind.

    Args:
        places: Where they are.
        counted: Whether each write moves autograd's counter, as torch's own layers do. Users also write past it, with
            `.data`.

    """

    def __init__(self, places: Sequence[BufferPlace], *, counted: bool) -> None:
        self._places = places
        self._counted = counted
        self._snapshot: Snapshot | None = None
        self._previous: tuple[Snapshot, int] | None = None
        self._spare: Snapshot | None = None  # nobody needs it any more; its memory is used again
        self._open = False
        self._backward = False  # in this training step
        self._decided_later = False  # some backward of this window will be followed by a step

    def __bool__(self) -> bool:
        return bool(self._places)

    def _buffers(self) -> Buffers:
        # looked up each time: SWA's BatchNorm update, and many a user, replaces the tensors
        return [place.read() for place in self._places]

    def enter_step(self) -> None:
        buffers = self._buffers()
        if self._open and not self._backward:
            self.settle()  # the step before had no backward, so no flag will ever tell whether it was good
        if not self._open:
            self._decided_later = False
            version = _version(buffers)
            if self._snapshot is None or self._snapshot.version != version or not self._counted:
                self._take(buffers, version, self._snapshot or self._spare)
        self._open = True
        self._backward = False

    def _take(self, buffers: Buffers, version: int, old: Snapshot | None) -> None:
        if old is self._spare:
            self._spare = None
        if old is None or not old.is_of(buffers):
            old = Snapshot(buffers)
        old.take(version)
        self._snapshot = old

    def note_backward(self) -> None:
        self._backward = self._decided_later = True

    def settle(self) -> None:
        if self._open and not self._backward and self._snapshot is not None:
            if not self._counted or _version(self._buffers()) != self._snapshot.version:
                self._snapshot.restore_unless_finite(self._places)
                if not self._decided_later:
                    self._snapshot = None
            self._open = self._decided_later

    def mend(self, state_dict: dict[str, Any]) -> None:
        snapshot = self._snapshot
        if not self._open or snapshot is None:
            return
        names = [place.qualified for place in self._places]
        entries = [state_dict.get(name) for name in names]  # some buffers are not saved
        if all_finite(e for e in entries if e is not None) or not snapshot.is_finite():
            return
        for name, entry, value in zip(names, entries, snapshot.copies(), strict=True):
            if entry is not None and value is not None and entry.shape == value.shape:
                state_dict[name] = value

    def observe(self, result: StepResult, inside_step: bool) -> None:
        skip = result.skip
        if not skip.known:
            self.settle()  # a step without a new backward: its flag says nothing about the forward
        version = _version(self._buffers())
        basis = self._snapshot
        if self._previous is not None and self._previous[1] == version and (self._counted or not self._backward):
            basis = self._previous[0]  # no forward since the last attempt: backward, backward, step, step
        if basis is None:
            return
        if skip.known:
            basis.restore(self._places)
        else:  # also of a batch that was not dropped, since its gradients were mended: NaN stays in there forever
            bad_loss = result.bad_loss
            if skip.known is None or bad_loss.known is None:
                basis.restore_where(self._places, skip, bad_loss)
            elif bad_loss.known:
                basis.restore_unless_finite(self._places)
        buffers = self._buffers()
        version = _version(buffers)
        if self._previous is not None and self._previous[0] is not basis:
            self._spare = self._previous[0]
        self._previous = (basis, version)
        self._open = self._backward = self._decided_later = False
        self._snapshot = None
        if inside_step:
            self._take(buffers, version, self._spare)
            self._open = True


def _version(buffers: Buffers) -> int:
    """Return a number that grows with every in-place change of any buffer, and changes when a buffer is replaced."""
    return sum(_modules.version(b) for b in buffers if b is not None) + sum(map(id, buffers))
