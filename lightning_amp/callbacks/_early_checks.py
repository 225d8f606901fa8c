"""Find faults early in a run: values that are not finite, averages in half precision, bad hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from typing_extensions import final

from lightning_amp._compat import _modules
from lightning_amp._text import named
from lightning_amp.callbacks._half_averages import HalfCopy, half_copies
from lightning_amp.callbacks._step_settings import StepSettings, optimizer_name
from lightning_amp.casting import is_metric
from lightning_amp.numerics import dense, stack_scalars

_STATISTICS = ("running_mean", "running_var")
_MOST_BATCHES = 1000  # the number of batches in which to look for a write to a copy


@final
class EarlyChecks:
    """Checks a run at its start and at each step. Each message is returned once; nothing changes.

    Cost: :meth:`before_fit` is one pass over parameters and buffers and waits for the device once. Later checks read
    values on the host. They wait for the device once to check an average in half precision, and in :meth:`read_late`
    for a hyperparameter.
    """

    def __init__(self) -> None:
        self._said: set[object] = set()
        self._copies: list[HalfCopy] = []
        self._num_batches = 0
        self._eps_checked: set[int] = set()
        self._settings = StepSettings()

    def before_fit(self, trainer: Trainer, module: LightningModule) -> list[str]:
        """Name parameters and buffers that are not finite. Call it after a checkpoint was restored."""
        self._num_batches = 0
        self._copies = list(half_copies(trainer, module))
        return self._once(_nonfinite_values(module))

    def before_batch(self, trainer: Trainer, *, steps_are_seen: bool = True) -> list[str]:
        """Name averages that are written into half precision, and optimizers whose state cannot hold their `eps`.

        Without `steps_are_seen`, as with another precision plugin, it also checks hyperparameters.
        """
        found = self._lost_eps(trainer)
        for optimizer in () if steps_are_seen else trainer.optimizers:
            found += self._settings.look(trainer, optimizer, None)
        if self._copies:
            self._num_batches += 1
            written = {copy: copy.verdict() for copy in self._copies}
            found += [(("copy", copy.name), copy.message) for copy, verdict in written.items() if verdict == "average"]
            waits = self._num_batches < _MOST_BATCHES
            self._copies = [copy for copy, verdict in written.items() if verdict == "waits" and waits]
        return self._once(found)

    def before_update(self, trainer: Trainer, step: int | None, optimizer: Optimizer) -> list[str]:
        """Name hyperparameters that are not finite, right before a step uses them; its index `step` may be unknown."""
        return self._once(self._settings.look(trainer, optimizer, step))

    def read_late(self, trainer: Trainer) -> list[str]:
        """Name hyperparameters on a device that are not finite. This waits for the device if there are any."""
        return self._once(self._settings.read(trainer))

    @property
    def bad_setting(self) -> str:
        """Return the first hyperparameter that was not finite, and its step; empty if all were finite."""
        return self._settings.first

    def _once(self, found: Sequence[tuple[object, str]]) -> list[str]:
        new = {key: text for key, text in found if key not in self._said}
        self._said.update(new)
        return list(new.values())

    def _lost_eps(self, trainer: Trainer) -> list[tuple[object, str]]:
        found: list[tuple[object, str]] = []
        for index, optimizer in enumerate(trainer.optimizers):
            state: Mapping[Any, Any] = getattr(optimizer, "state", {})
            if index in self._eps_checked or not state:
                continue
            self._eps_checked.add(index)
            for number, group in enumerate(optimizer.param_groups):
                eps = group.get("eps")
                if not isinstance(eps, float) or eps <= 0 or float(torch.tensor(eps, dtype=torch.float16)) > 0:
                    continue
                kept = [state.get(p, {}) for p in group["params"]]
                if any(t.dtype == torch.float16 and t.dim() > 0 for s in kept for t in _tensors(s)):
                    found.append(
                        (
                            ("eps", index, number),
                            f"{optimizer_name(trainer, optimizer, number)} keeps its state in float16, in which its"
                            f" `eps` of {eps:g} is zero. If a second moment is zero, too, the step divides 0 by 0."
                            " Keep the state in float32, or pass an `eps` that float16 holds, 6e-08 at least:"
                            " `eps=1e-4`.",
                        )
                    )
        return found


# -- values ------------------------------------------------------------------------------------------------------------


def _nonfinite_values(module: nn.Module) -> list[tuple[object, str]]:
    """Find parameters and buffers with NaN or infinity. Buffers may have infinities that are masks or markers."""
    kinds, names, flags = list[str](), list[str](), list[Tensor]()
    for prefix, owner in module.named_modules():
        if is_metric(owner):
            continue
        own: list[tuple[str, str, Tensor]] = []
        own += [("parameter", name, p) for name, p in owner.named_parameters(recurse=False)]
        own += [("buffer", name, b) for name, b in owner.named_buffers(recurse=False)]
        for kind, name, tensor in own:
            if is_lazy(tensor) or tensor.is_meta or not tensor.is_floating_point():
                continue
            kinds.append(kind)
            names.append(_modules.plain_name(f"{prefix}.{name}" if prefix else name))
            strict = (kind == "parameter" and tensor.requires_grad) or name in _STATISTICS
            flags.append(_is_wrong(tensor, strict))
    if not flags:
        return []
    wrong = stack_scalars(flags).tolist()
    bad = [(kind, name) for kind, name, flag in zip(kinds, names, wrong, strict=True) if flag]
    texts: list[tuple[object, str]] = []
    for kind in ("parameter", "buffer"):
        mine = [name for other, name in bad if other == kind]
        if mine:
            text = "1 has" if len(mine) == 1 else f"{len(mine):,} have"
            cure = "load or initialise it anew" if kind == "parameter" else "compute it anew"
            texts.append(
                (
                    (kind, *mine),
                    f"Before the first step, of the {kind}s {text} NaN or infinity: {named(mine)}. No step can mend"
                    f" that, in any precision: {cure}.",
                )
            )
    return texts


@torch.no_grad()
def _is_wrong(tensor: Tensor, strict: bool) -> Tensor:
    """Return a flag, []: any NaN or infinity if `strict`; else NaN, or positive infinity that is no marker.

    Masks have negative infinities on purpose, observers begin with only infinities, and matrices of distances have
    infinity between places that are not connected.
    """
    values = dense(_whole(tensor).detach())
    if strict:
        return torch.isfinite(values).all().logical_not()
    nan, infinite = torch.isnan(values), torch.isposinf(values)
    square = values.dim() >= 2 and values.shape[-1] == values.shape[-2]
    some = nan.any() & nan.all().logical_not()
    return some if square else some | (infinite.any() & torch.isfinite(values).any())


def _whole(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # each rank checks its own shard


def _tensors(state: Any) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)] if isinstance(state, Mapping) else []
