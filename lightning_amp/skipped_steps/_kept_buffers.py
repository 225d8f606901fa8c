"""What a skipped batch wrote into buffers is taken back: normalisation statistics, and what the user names.

A forward that overflows folds inf or NaN into BatchNorm's running mean forever. A snapshot is taken when a window opens
(one copy for all buffers of a dtype) and put back if its step is skipped. A window is everything since the last step
that was attempted, so with accumulation all its batches are dropped.
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
    """No training step has begun since the last attempt, or nothing will decide on those that have.

    `snapshot` holds the values as nobody has changed them since, if it is known.
    """

    snapshot: Snapshot | None = None


@final
@dataclass(frozen=True)
class _Open:
    """A window, with the values from before it.

    `will_step` says whether it had a backward, so that an optimizer step will decide on it.
    """

    snapshot: Snapshot
    will_step: bool = False


@final
class KeptBuffers:
    """Buffers of one kind, which stay as in a run that never drew the batches of skipped steps.

    Args:
        places: Where they are.
        counted: Whether each write moves autograd's counter, as torch's own layers do. Users also write past it, with
            `.data`.

    """

    def __init__(self, places: Sequence[BufferPlace], *, counted: bool) -> None:
        self._places, self._counted = places, counted
        self._window: _Closed | _Open = _Closed()
        self._had_backward = False  # in this training step
        self._last_attempt: tuple[Snapshot, int] | None = None  # from before its window, and the version after it
        self._spare: Snapshot | None = None  # nobody needs it any more; its memory is used again

    def __bool__(self) -> bool:
        return bool(self._places)

    def enter_step(self) -> None:
        """Remember the buffers if a window opens with this training step."""
        self.settle()  # if the step before had no backward: no flag will ever tell whether it was good
        if isinstance(self._window, _Closed):
            self._window = _Open(self._snapshot_now(self._window.snapshot))
        self._had_backward = False

    def note_backward(self) -> None:
        """Note that the training step had a backward."""
        self._had_backward = True
        if isinstance(self._window, _Open) and not self._window.will_step:
            self._window = _Open(self._window.snapshot, will_step=True)

    def settle(self) -> None:
        """Drop what a step without a backward wrote if it is not finite (SWA's BatchNorm pass)."""
        window = self._window
        if isinstance(window, _Closed) or self._had_backward:
            return
        written = not self._counted or _version(self._buffers()) != window.snapshot.version
        if written:
            window.snapshot.restore_unless_finite(self._places)
        if not window.will_step:
            self._window = _Closed(None if written else window.snapshot)

    def mend(self, state_dict: dict[str, Any]) -> None:
        """Take what an overflow wrote out of a checkpoint; see `SkipProtection.mend`."""
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
        """Put buffers back after a step that was skipped.

        `inside_step`: in manual optimization more forwards may follow in this training step.
        """
        skip = result.skip
        if not skip.known:
            self.settle()  # a step without a new backward: its flag says nothing about the forward
        basis = self._basis()
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
        if self._last_attempt is not None and self._last_attempt[0] is not basis:
            self._spare = self._last_attempt[0]
        self._last_attempt = basis, _version(self._buffers())
        self._had_backward = False
        self._window = _Open(self._snapshot_now()) if inside_step else _Closed()

    def _basis(self) -> Snapshot | None:
        """Return the values from before the forward on which a step decides; `None` if nobody knows them."""
        if self._last_attempt is not None and (self._counted or not self._had_backward):
            basis, version = self._last_attempt
            if version == _version(self._buffers()):  # no forward since: backward, backward, step, step
                return basis
        return self._window.snapshot

    def _snapshot_now(self, kept: Snapshot | None = None) -> Snapshot:
        """Return the values as they are; `kept` may have them already, or else has the memory for them."""
        buffers = self._buffers()
        version = _version(buffers)
        if kept is not None and kept.version == version and self._counted:
            return kept
        if kept is None:
            kept, self._spare = self._spare, None
        if kept is None or not kept.is_of(buffers):
            kept = Snapshot(buffers)
        kept.take(version)
        return kept

    def _buffers(self) -> Buffers:
        # looked up each time: SWA's BatchNorm update, and many a user, replaces the tensors
        return [place.read() for place in self._places]


def _version(buffers: Buffers) -> int:
    """Return a number that grows with every in-place change of any buffer, and changes when a buffer is replaced."""
    return sum(_modules.version(b) for b in buffers if b is not None) + sum(map(id, buffers))
