"""Restore buffers after a skipped step: normalisation statistics, and the buffers in `restore_buffers`.

A forward that overflows would leave inf or NaN in BatchNorm's running mean forever. A window begins after each
attempted step, so with accumulation it has several batches. Its buffers are copied when it opens (one copy for all
buffers of a dtype), and restored if its step is skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import final

from lightning_amp._compat import _modules
from lightning_amp.numerics import all_finite
from lightning_amp.scaling import StepResult
from lightning_amp.skipped_steps._named_buffers import BufferPlace
from lightning_amp.skipped_steps._snapshots import Buffers, Snapshot


@final
@dataclass(frozen=True)
class _Closed:
    """No window: no training step has begun since the last attempt, or no optimizer step will follow.

    `snapshot` equals the current values if no code has changed them since it was taken.
    """

    snapshot: Snapshot | None = None


@final
@dataclass(frozen=True)
class _Open:
    """An open window, with the values from before the window.

    `will_step`: the window had a backward, so an optimizer step will follow.
    """

    snapshot: Snapshot
    will_step: bool = False


@final
class KeptBuffers:
    """Buffers of one kind. Their values are the same as in a run without the batches of skipped steps.

    `counted`: each write moves autograd's version counter, as in torch's own layers. User code may also write through
    `.data`, which does not change the counter.
    """

    def __init__(self, places: Sequence[BufferPlace], *, counted: bool) -> None:
        self._places, self._counted = places, counted
        self._window: _Closed | _Open = _Closed()
        self._had_backward = False  # whether this training step had a backward
        # the values of the last attempt, and the version after it
        self._last_attempt: tuple[Snapshot, int] | None = None
        self._spare: Snapshot | None = None  # is not needed any more; its memory is reused

    def __bool__(self) -> bool:
        return bool(self._places)

    def enter_step(self) -> None:
        """Copy the buffers if a window opens with this training step."""
        self.settle()  # the previous step, if it had no backward, because no flag will show whether it was finite
        if isinstance(self._window, _Closed):
            self._window = _Open(self._snapshot_now(self._window.snapshot))
        self._had_backward = False

    def note_backward(self) -> None:
        """Record that the training step had a backward."""
        self._had_backward = True
        if isinstance(self._window, _Open) and not self._window.will_step:
            self._window = _Open(self._window.snapshot, will_step=True)

    def settle(self) -> None:
        """Restore the buffers if a step without a backward left non-finite values (SWA's BatchNorm pass)."""
        window = self._window
        if isinstance(window, _Closed) or self._had_backward:
            return
        written = not self._counted or _version(self._buffers()) != window.snapshot.version
        if written:
            window.snapshot.restore_unless_finite(self._places)
        if not window.will_step:
            self._window = _Closed(None if written else window.snapshot)

    def mend(self, state_dict: dict[str, Any]) -> None:
        """Replace non-finite values of an overflow in a checkpoint; see `SkipProtection.mend`."""
        if isinstance(self._window, _Closed):
            return
        snapshot = self._window.snapshot
        names = [place.qualified for place in self._places]
        entries = [state_dict.get(name) for name in names]  # some buffers are not saved
        if all_finite(e for e in entries if e is not None) or not snapshot.is_finite():
            return
        for name, entry, value in zip(names, entries, snapshot.copies(), strict=True):
            if entry is not None and value is not None and entry.shape == value.shape:
                state_dict[name] = value

    def observe(self, result: StepResult, inside_step: bool) -> None:
        """Restore buffers if the step was skipped. `inside_step`: more forwards may follow in this training step."""
        skip = result.skip
        if not skip.known:
            self.settle()  # without a new backward, the flag is not about the last forward
        basis = self._basis()
        if basis is None:
            return
        if skip.known:
            basis.restore(self._places)
        else:  # the step was applied since its gradients were repaired, but NaN would stay in the buffers forever
            bad_loss = result.bad_loss
            if skip.known is None or bad_loss.known is None:
                basis.restore_where(self._places, skip, bad_loss)
            elif bad_loss.known:
                basis.restore_unless_finite(self._places)
        if self._last_attempt is not None and self._last_attempt[0] is not basis:
            self._spare = self._last_attempt[0]
        self._last_attempt = basis, _version(self._buffers())
        self._had_backward = False
        self._window = _Open(self._snapshot_now()) if inside_step else _Closed()

    def _basis(self) -> Snapshot | None:
        """Return the values from before the forward that belongs to this step; `None` if they are not known."""
        if self._last_attempt is not None and (self._counted or not self._had_backward):
            basis, version = self._last_attempt
            # no forward has run since, as in the order backward, backward, step, step
            if version == _version(self._buffers()):
                return basis
        return self._window.snapshot

    def _snapshot_now(self, kept: Snapshot | None = None) -> Snapshot:
        """Return a copy of the current values. Reuse `kept`, or its memory, if possible."""
        buffers = self._buffers()
        version = _version(buffers)
        if kept is not None and kept.version == version and self._counted:
            return kept
        if kept is None:
            kept, self._spare = self._spare, None
        if kept is None or not kept.is_of(buffers):
            kept = Snapshot(buffers, is_unseen=self._counted)
        kept.take(version)
        return kept

    def _buffers(self) -> Buffers:
        # read again each time, because SWA's BatchNorm update and user code replace the tensors
        return [place.read() for place in self._places]


def _version(buffers: Buffers) -> int:
    """Return a number that increases with every in-place change of any buffer, and changes if a buffer is replaced."""
    return sum(_modules.version(b) for b in buffers if b is not None) + sum(map(id, buffers))
