"""Restore buffers after a skipped step: normalisation statistics, and the buffers in `restore_buffers`.

A forward that overflows would leave inf or NaN in BatchNorm's running mean forever. A window begins with the first
training step after an attempted optimizer step, so with accumulation it has several batches. The buffers are copied
when it begins, and restored if its step is skipped.

If several optimizers step after the same forwards, they share a window. A skipped step then restores only the buffers
of its own layers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from typing_extensions import final

from lightning_amp._arguments import no_match
from lightning_amp._compat import _modules, _torch
from lightning_amp.numerics import all_finite
from lightning_amp.scaling import Skip, StepResult


class BufferPlace(NamedTuple):
    """The place of a buffer: its module and its name there. The tensor may be replaced, or be `None`."""

    module: nn.Module
    name: str
    qualified: str

    def read(self) -> Tensor | None:
        """Return the buffer's present tensor; `None` before the first forward of a lazy module."""
        tensor: Any = getattr(self.module, self.name, None)
        return None if is_lazy(tensor) else tensor


def norm_places(root: nn.Module) -> list[BufferPlace]:
    """Find all running statistics of normalisation layers."""
    norms = set(_modules.norm_modules(root))
    return [place for name, module in root.named_modules() if module in norms for place in _places(name, module)]


def matching_places(root: nn.Module, rules: Sequence[str]) -> list[BufferPlace]:
    """Find the buffers that the rules match, in the order of the modules, without statistics of normalisation layers.

    Raise `ValueError` with the closest names if a rule matches nothing.
    """
    if not rules:
        return []
    modules = root.named_modules(remove_duplicate=False)
    everywhere = [(_modules.plain_name(p.qualified), p) for name, module in modules for p in _places(name, module)]
    names = [name for name, _ in everywhere]
    for rule in rules:
        if not any(fnmatchcase(name, rule) for name in names):
            raise no_match("restore_buffers", rule, "buffer", names)
    norms = {(place.module, place.name) for place in norm_places(root)}
    found = {(p.module, p.name): p for name, p in everywhere if any(fnmatchcase(name, rule) for rule in rules)}
    return [place for key, place in found.items() if key not in norms]


def _places(prefix: str, module: nn.Module) -> list[BufferPlace]:
    return [BufferPlace(module, name, f"{prefix}.{name}".lstrip(".")) for name in _modules.buffer_names(module)]


# -- their values ------------------------------------------------------------------------------------------------------

_Part = tuple[Collection[int] | None, Collection[Optimizer]]
"""Some buffers (`None`: all), and the optimizers whose skipped steps restore them."""


@final
class _Snapshot:
    """The tensors of some places at one time, and copies of their values: one flat tensor per device and dtype."""

    def __init__(self, places: Sequence[BufferPlace]) -> None:
        # read again each time, because SWA's BatchNorm update and user code replace the tensors
        self.tensors = {i: tensor for i, place in enumerate(places) if (tensor := place.read()) is not None}
        self.version = _version(places)
        groups: dict[Any, list[int]] = {}
        for i, tensor in self.tensors.items():
            groups.setdefault((tensor.device, tensor.dtype), []).append(i)
        with torch.no_grad():
            flats = [torch.cat([self.tensors[i].reshape(-1) for i in indices]) for indices in groups.values()]
        self._flats = list(zip(groups.values(), flats, strict=True))

    def copies(self, part: Collection[int] | None = None) -> list[tuple[list[int], Tensor]]:
        """Return flat copies, with the buffers that each holds: one for each buffer of a part, or few for all."""
        if part is None:
            return self._flats
        pairs = [
            pair for indices, flat in self._flats for pair in zip(indices, self._split(indices, flat), strict=True)
        ]
        return [([i], copy.view(-1)) for i, copy in pairs if i in part]

    def floating(self, part: Collection[int] | None = None) -> list[Tensor]:
        """Return the copies that may hold inf or NaN."""
        return [copy for _, copy in self.copies(part) if copy.is_floating_point()]

    def _split(self, indices: list[int], flat: Tensor) -> list[Tensor]:
        tensors = [self.tensors[i] for i in indices]
        return [v.view(t.shape) for v, t in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)]

    def write(self, indices: list[int], flat: Tensor, *, unseen: bool) -> None:
        """Write values into the tensors, `unseen` by autograd or not."""
        targets = [self.tensors[i].data if unseen else self.tensors[i] for i in indices]
        _torch.foreach_copy_(targets, self._split(indices, flat))


@final
@dataclass
class _Window:
    """The steps after the same forwards, and the buffers `before` and, once they are needed, `after` these forwards."""

    before: _Snapshot
    after: _Snapshot | None = None
    results: dict[Optimizer, StepResult] = field(default_factory=dict)


@final
class KeptBuffers:
    """Buffers of one kind. Their values are the same as in a run without the batches of skipped steps.

    `counted`: each write moves autograd's version counter, as in torch's own layers. User code may also write through
    `.data`, which does not change the counter. Autograd does not see that counted buffers are restored: the forward of
    a normalisation layer in training mode saves its running statistics, and its backward does not read them. A restore
    that is seen would make the backward of a GAN's generator fail after the discriminator's step was skipped.
    """

    def __init__(self, root: nn.Module, places: Sequence[BufferPlace], *, counted: bool) -> None:
        self._root, self._places, self._counted = root, places, counted
        self._parts: dict[tuple[Optimizer, ...], list[_Part]] = {}
        self._before: _Snapshot | None = None  # the buffers before the open window; `None` if none is open
        self._latest: _Window | None = None  # the window of the last attempt
        self._seen_version = 0  # after that attempt
        self._entered = False  # whether a training step has begun since
        self._will_step = False  # whether the open window had a backward, so that an optimizer step will follow
        self._had_backward = False  # whether this training step had one

    @property
    def window_is_open(self) -> bool:
        """Return whether a training step has begun since the last attempted optimizer step."""
        return self._before is not None

    def enter_step(self) -> None:
        """Copy the buffers if a window opens with this training step."""
        self.settle()  # the previous step, if it had no backward, because no flag will show whether it was finite
        if self._before is None:
            self._before = _Snapshot(self._places)
        self._entered, self._had_backward = True, False

    def note_backward(self) -> None:
        """Record that the training step had a backward."""
        self._had_backward = self._will_step = True

    def settle(self, *, in_window: bool = False) -> None:
        """Restore the buffers if a step without a backward left non-finite values (SWA's BatchNorm pass).

        With `in_window`, also if backwards have left them whose step is still to come.
        """
        before = self._before
        if before is None or (self._had_backward and not in_window):
            return
        if not self._counted or before.version != _version(self._places):
            after = _Snapshot(self._places)
            if floating := after.floating():
                bad = all_finite(before.floating()) & all_finite(floating).logical_not()
                self._choose(before, after, None, Skip(bad))
        if not self._will_step:
            self._before = None

    def observe(self, optimizer: Optimizer, result: StepResult, *, manual: bool) -> None:
        """Restore buffers if the step was skipped. `manual`: more forwards may follow in this training step."""
        window = self._latest
        if window is None or not self._is_shared(window, optimizer):
            if not result.skip.known:
                self.settle()  # without a new backward, the flag is not about the last forward
            window = self._latest = None if self._before is None else _Window(self._before)
        if window is not None:
            window.results[optimizer] = result
            self._restore(window)
        self._seen_version = _version(self._places)
        self._entered = self._will_step = self._had_backward = False
        self._before = _Snapshot(self._places) if manual else None

    def _is_shared(self, window: _Window, optimizer: Optimizer) -> bool:
        """Return whether no forward has run since the last attempt, as in the order backward, backward, step, step."""
        same_step = not self._will_step or (self._counted and not self._entered)
        return same_step and optimizer not in window.results and self._seen_version == _version(self._places)

    @torch.no_grad()
    def _restore(self, window: _Window) -> None:
        """Give each buffer the value that follows from all steps of the window so far."""
        results = window.results
        doubt = reduce(or_, (skip for result in results.values() for skip in (result.skip, result.bad_loss)))
        if window.after is None:
            if doubt.known is False:
                return
            window.after = _Snapshot(self._places)
        for part, owners in self._parts_of(tuple(results)):
            skip = reduce(or_, (results[owner].skip for owner in owners))
            if not skip.known and (floating := window.after.floating(part)):  # NaN would stay in the buffers forever
                bad = all_finite(floating).logical_not()
                skip |= Skip(bad & (doubt.flag(bad.device) > 0))
            self._choose(window.before, window.after, part, skip)

    @torch.no_grad()
    def _choose(self, before: _Snapshot, after: _Snapshot, part: Collection[int] | None, skip: Skip) -> None:
        """Give a part of the buffers their values `before` if `skip`, else those `after`.

        The device decides. The host waits for the flag only if a tensor was replaced.
        """
        where = range(len(self._places)) if part is None else part
        if skip.known is None and all(before.tensors.get(i) is after.tensors.get(i) for i in where):
            for (indices, old), (_, new) in zip(before.copies(part), after.copies(part), strict=True):
                # `where`, not `lerp`: NaN times 0 is NaN
                values = torch.where(skip.flag(old.device) > 0, old, new)
                before.write(indices, values, unseen=self._counted)
            return
        chosen = before if skip.wait() else after
        for i in where:
            place, tensor = self._places[i], chosen.tensors.get(i)
            if tensor is None and place.read() is not None and self._counted:  # its layer was lazy
                place.module.reset_running_stats()  # pyright: ignore[reportCallIssue]
            elif place.read() is not tensor:
                setattr(place.module, place.name, tensor)
        for indices, values in chosen.copies(part):
            chosen.write(indices, values, unseen=self._counted)

    def _parts_of(self, optimizers: tuple[Optimizer, ...]) -> list[_Part]:
        """Divide the buffers by the optimizers of the nearest parameters in the tree of modules."""
        if len(optimizers) == 1:
            return [(None, optimizers)]
        if optimizers not in self._parts:
            below: dict[str, set[Optimizer]] = {}
            owners = {id(p): o for o in optimizers for group in o.param_groups for p in group["params"]}
            for name, parameter in self._root.named_parameters(remove_duplicate=False):
                for prefix in _prefixes(name) if id(parameter) in owners else ():
                    below.setdefault(prefix, set()).add(owners[id(parameter)])
            parts: dict[frozenset[Optimizer], set[int]] = {}
            for i, place in enumerate(self._places):
                nearest = next((below[prefix] for prefix in _prefixes(place.qualified) if prefix in below), optimizers)
                parts.setdefault(frozenset(nearest), set()).add(i)
            self._parts[optimizers] = [(part if len(parts) > 1 else None, theirs) for theirs, part in parts.items()]
        return self._parts[optimizers]


def _version(places: Sequence[BufferPlace]) -> int:
    """Return a number that increases with every in-place change of any buffer, and changes if a tensor is replaced."""
    tensors = [place.read() for place in places]
    return sum(_modules.version(tensor) + id(tensor) for tensor in tensors if tensor is not None)


def _prefixes(name: str) -> list[str]:
    """Return the names of the modules around a parameter or buffer, the nearest first."""
    return [name.rsplit(".", n)[0] for n in range(1, name.count(".") + 1)] + [""]
