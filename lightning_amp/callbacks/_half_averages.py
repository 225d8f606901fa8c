"""Find averages that are kept in half precision, where small updates round to zero."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from typing_extensions import final

from lightning_amp._compat import _modules
from lightning_amp.numerics import HALF_DTYPES

_FEWEST_WRITES = 3  # weights that are loaded once are not an average
_LARGEST = 2**20  # the number of values in the tensor that stands for a copy
Verdict = Literal["waits", "average", "copy"]
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@final
class HalfCopy:
    """A half-precision copy of a trained module, or of its parameters."""

    def __init__(self, name: str, of: str, pairs: Sequence[tuple[Any, Tensor]]) -> None:
        self.name, self._of = name, of
        # One pair of tensors stands for all, because an average writes all parameters.
        size = [(min(t.numel(), _LARGEST), -t.numel()) for _, t in pairs]
        self._read, self._trained = pairs[size.index(max(size))]
        copied = self._read()
        self._dtype = copied.dtype
        self._state = _state(copied)
        self._before = self._trained.detach().clone()
        self._values = copied.detach().to(self._before.device, copy=True)
        self._num_writes, self._looks_at = 0, _FEWEST_WRITES

    @torch.no_grad()
    def verdict(self) -> Verdict:
        """Return `"waits"` before a write, `"average"`, or `"copy"` if the trained values are copied unchanged."""
        copied = self._read()
        if not isinstance(copied, Tensor) or copied.shape != self._trained.shape or copied.dtype != self._dtype:
            return "copy"
        verdict: Verdict = "waits"
        state = _state(copied)
        if state != self._state:
            self._state = state
            self._num_writes += 1
            if self._num_writes == self._looks_at:
                self._looks_at *= 2
                verdict = self._look(copied)
        self._before.copy_(self._trained)  # does not wait; in the next batch these values may be copied
        return verdict

    def _look(self, copied: Tensor) -> Verdict:
        now = self._trained.detach()
        copied = copied.to(now.device)  # some averages are on the host
        same = torch.stack([(copied == t.to(copied.dtype)).float().mean() for t in (now, self._before)]).max()
        moved = (now.to(copied.dtype) != self._values).float().mean()
        same_share, moved_share = torch.stack([same, moved]).tolist()
        if moved_share == 0:  # the trained values have not moved enough to distinguish a copy from an average
            return "waits"
        return "copy" if same_share > 1 - 0.2 * moved_share else "average"

    @property
    def message(self) -> str:
        """Write the warning."""
        bits = {torch.bfloat16: "1/512", torch.float16: "1/4,096"}[self._dtype]
        short = _NAMES[self._dtype]
        return (
            f"`{self.name}` is a copy of {self._of} in {short}, and an average is written into it. An update by less"
            f" than {bits} of a value rounds to zero, so that the average (nearly) stops. Keep it in float32:"
            f" `{self.name}.float()`, before the fit; autocast runs its forward in half precision all the same."
        )


def _state(tensor: Tensor) -> tuple[int, int]:
    return 0 if tensor.is_inference() else _modules.version(tensor), tensor.data_ptr()


def half_copies(trainer: Trainer, module: LightningModule) -> Iterator[HalfCopy]:
    """Iterate over half-precision modules that are not trained and have the shapes of a trained module."""
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
                    yield HalfCopy(".".join(filter(None, (name, inner))), twin[0], pairs)
        else:
            own = {n: p for n, p in module.named_parameters() if id(p) in trained}
            pairs = [
                (lambda holder=holder, n=n: holder.get(n), own[n])
                for n, value in holder.items()
                if n in own and value.dtype in HALF_DTYPES and own[n].dtype not in HALF_DTYPES
                and value.shape == own[n].shape
            ]  # fmt: skip
            if pairs and len(pairs) == len(holder):
                yield HalfCopy(name, "the parameters", pairs)


def _signature(module: nn.Module) -> tuple[Any, ...]:
    return tuple((name, tuple(p.shape)) for name, p in module.named_parameters() if not is_lazy(p))


def _holders(trainer: Trainer, module: LightningModule) -> Iterator[tuple[str, Any]]:
    """Iterate over objects that may hold an average: the module, its attributes, and attributes of callbacks."""
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
