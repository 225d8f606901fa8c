"""What can be known to be wrong before it costs a run: values, averages in half precision, hyperparameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from typing_extensions import final

from lightning_amp._compat import _modules
from lightning_amp._text import named
from lightning_amp.callbacks._step_settings import StepSettings, optimizer_name
from lightning_amp.casting import is_metric
from lightning_amp.numerics import HALF_DTYPES, dense, stack_scalars

_STATISTICS = ("running_mean", "running_var")
_MOST_BATCHES = 1000  # in which a write to a copy is waited for
_FEWEST_WRITES = 3  # something loaded once is no average
_LARGEST = 2**20  # values of the tensor that stands for a copy
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@final
class EarlyChecks:
    """Looks at a run before and while it begins, and at each step. Each message is returned once; nothing is changed.

    Cost: :meth:`before_fit` is one pass over parameters and buffers, and waits for the device once. :meth:`read_late`
    waits if a hyperparameter is a tensor on a device. The others read attributes on the host; they wait once where an
    average is written into a half-precision copy.

    """

    def __init__(self) -> None:
        self._said: set[object] = set()
        self._copies: list[_Copy] = []
        self._num_batches = 0
        self._eps_checked: set[int] = set()
        self._settings = StepSettings()

    def before_fit(self, trainer: Trainer, module: LightningModule) -> list[str]:
        """Name parameters and buffers that are not finite. Weights are restored, optimizers exist."""
        self._num_batches = 0
        self._copies = list(_half_copies(trainer, module))
        return self._once(_nonfinite_values(module))

    def before_batch(self, trainer: Trainer, *, steps_are_seen: bool = True) -> list[str]:
        """Name averages that are written into half precision, and optimizers whose state cannot hold their `eps`.

        If nobody sees the steps, as under another precision plugin, hyperparameters are looked at here.
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
        """Name hyperparameters that are not finite, right before an optimizer step of this index uses them.

        `None`: the next step, where its index is not known.
        """
        return self._once(self._settings.look(trainer, optimizer, step))

    def read_late(self, trainer: Trainer) -> list[str]:
        """Name those that are tensors on a device. Waits for it, if there are any."""
        return self._once(self._settings.read(trainer))

    @property
    def bad_setting(self) -> str:
        """Say which hyperparameter was not finite in which step, of the first; empty: none was."""
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
                            f" `eps` of {eps:g} is zero: where a second moment is zero, too, the step divides 0 by 0."
                            " Keep the state in float32, or pass an `eps` that float16 holds, 6e-08 at least:"
                            " `eps=1e-4`.",
                        )
                    )
        return found


# -- values ------------------------------------------------------------------------------------------------------------


def _nonfinite_values(module: nn.Module) -> list[tuple[object, str]]:
    """Find parameters with NaN or infinity, and buffers with what no mask or marker has."""
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
    """Tell, []: any NaN or infinity if `strict`; else NaN, or some positive infinities that look like no marker.

    Masks have negative infinities on purpose, observers begin with nothing but infinity, matrices of distances have it
    where there is no way.
    """
    values = dense(_whole(tensor).detach())
    if strict:
        return torch.isfinite(values).all().logical_not()
    nan, infinite = torch.isnan(values), torch.isposinf(values)
    square = values.dim() >= 2 and values.shape[-1] == values.shape[-2]
    some = nan.any() & nan.all().logical_not()
    return some if square else some | (infinite.any() & torch.isfinite(values).any())


def _whole(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a shard: each rank looks at its own


# -- averages ----------------------------------------------------------------------------------------------------------


@final
class _Copy:
    """A half-precision copy of something that is trained."""

    def __init__(self, name: str, of: str, pairs: Sequence[tuple[Any, Tensor]]) -> None:
        self.name, self._of = name, of
        # one pair stands for all: what averages writes all of them
        size = [(min(t.numel(), _LARGEST), -t.numel()) for _, t in pairs]
        self._read, self._trained = pairs[size.index(max(size))]
        copied = self._read()
        self._dtype = copied.dtype
        self._state = _state(copied)
        self._before = self._trained.detach().clone()
        self._values = copied.detach().to(self._before.device, copy=True)
        self._num_writes, self._looks_at = 0, _FEWEST_WRITES

    @torch.no_grad()
    def verdict(self) -> str:
        """Return `"waits"` while nothing was written, `"average"`, or `"copy"` if it follows the trained one whole."""
        copied = self._read()
        if not isinstance(copied, Tensor) or copied.shape != self._trained.shape or copied.dtype != self._dtype:
            return "copy"
        verdict = "waits"
        state = _state(copied)
        if state != self._state:
            self._state = state
            self._num_writes += 1
            if self._num_writes == self._looks_at:
                self._looks_at *= 2
                verdict = self._look(copied)
        self._before.copy_(self._trained)  # without waiting: in the next batch it may be what is copied
        return verdict

    def _look(self, copied: Tensor) -> str:
        now = self._trained.detach()
        copied = copied.to(now.device)  # some averages are kept on the host
        same = torch.stack([(copied == t.to(copied.dtype)).float().mean() for t in (now, self._before)]).max()
        moved = (now.to(copied.dtype) != self._values).float().mean()
        same_share, moved_share = torch.stack([same, moved]).tolist()
        if moved_share == 0:  # what is trained has not moved by enough to tell
            return "waits"
        return "copy" if same_share > 1 - 0.2 * moved_share else "average"

    @property
    def message(self) -> str:
        """Say what it is, and what to do."""
        bits = {torch.bfloat16: "1/512", torch.float16: "1/4,096"}[self._dtype]
        short = _NAMES[self._dtype]
        return (
            f"`{self.name}` is a copy of {self._of} in {short}, and an average is written into it: what changes a value"
            f" by less than {bits} of it rounds away, so that it (nearly) stands still. Keep it in float32:"
            f" `{self.name}.float()`, before the fit; autocast runs its forward in half precision all the same."
        )


def _state(tensor: Tensor) -> tuple[int, int]:
    return 0 if tensor.is_inference() else _modules.version(tensor), tensor.data_ptr()


def _half_copies(trainer: Trainer, module: LightningModule) -> Iterator[_Copy]:
    trained = {id(p) for o in trainer.optimizers for g in o.param_groups for p in g["params"] if p.requires_grad}
    twins: dict[tuple[Any, ...], tuple[str, nn.Module]] = {}
    for name, part in module.named_modules():
        parameters = list(part.parameters())
        if parameters and any(id(p) in trained for p in parameters):
            twins.setdefault(_signature(part), (f"`{name}`" if name else "the module", part))
    seen: set[int] = set()
    for name, holder in _holders(trainer, module):
        if isinstance(holder, nn.Module):
            for inner, part in holder.named_modules():
                parameters = dict(part.named_parameters())
                if id(part) in seen or not parameters or any(id(p) in trained for p in parameters.values()):
                    continue
                twin = twins.get(_signature(part))
                if twin is None or twin[1] is part:
                    continue
                seen.update(id(m) for m in part.modules())
                pairs = [
                    (lambda part=part, n=n: part.get_parameter(n), own)
                    for (n, p), own in zip(parameters.items(), twin[1].parameters(), strict=True)
                    if p.dtype in HALF_DTYPES and own.dtype not in HALF_DTYPES
                ]
                if pairs:
                    yield _Copy(".".join(filter(None, (name, inner))), twin[0], pairs)
        else:
            own = {n: p for n, p in module.named_parameters() if id(p) in trained}
            pairs = [
                (lambda holder=holder, n=n: holder.get(n), own[n])
                for n, value in holder.items()
                if n in own and value.dtype in HALF_DTYPES and own[n].dtype not in HALF_DTYPES
                and value.shape == own[n].shape
            ]  # fmt: skip
            if pairs and len(pairs) == len(holder):
                yield _Copy(name, "the parameters", pairs)


def _signature(module: nn.Module) -> tuple[Any, ...]:
    return tuple((name, tuple(p.shape)) for name, p in module.named_parameters() if not is_lazy(p))


def _holders(trainer: Trainer, module: LightningModule) -> Iterator[tuple[str, Any]]:
    """Iterate over what may hold an average: the module itself, and attributes of it and of callbacks."""
    yield "", module
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    owners = [("", module), *((type(callback).__name__, callback) for callback in callbacks)]
    for prefix, owner in owners:
        for name, value in list(vars(owner).items()):
            if name in ("_modules", "_parameters", "_buffers", "_trainer"):
                continue
            full = f"{prefix}.{name}" if prefix else name
            items = list(value) if isinstance(value, (list, tuple)) and len(value) < 100 else [value]
            for item in items:
                inner = item if isinstance(item, nn.Module) else getattr(item, "module", None)
                if isinstance(inner, nn.Module) and inner is not module and not isinstance(item, Trainer):
                    yield full if inner is item else f"{full}.module", inner
                elif isinstance(item, dict) and item and all(
                    isinstance(k, str) and isinstance(v, Tensor) for k, v in item.items()
                ):  # fmt: skip
                    yield full, item


def _tensors(state: Any) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)] if isinstance(state, Mapping) else []
