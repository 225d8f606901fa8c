"""Compare the outputs of each module in mixed precision with its outputs in fp32."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from typing_extensions import final, override

from lightning_amp._compat import _modules, _sharding
from lightning_amp._containers import tensors_in
from lightning_amp.casting import MethodOverride, is_metric
from lightning_amp.findings import ModuleRow
from lightning_amp.numerics import fidelity, output_sums
from lightning_amp.shadow._ranks import gather


@final
@dataclass(frozen=True, slots=True)
class OutputCall:
    """One call of one module."""

    name: str
    kind: str  # class of the module
    inputs: list[Tensor]  # copies, if the comparison keeps them
    outputs: list[Tensor]  # copies, until they are compared
    sums: Tensor | None = None  # each output compared with fp32, see `numerics.output_sums`: [number, 6]
    input_sums: Tensor | None = None  # each input compared with fp32: [number, 6]
    num_values: int = 0  # in the outputs


@final
class OutputComparison:
    """Watches the modules inside a module, first in fp32, then in mixed precision.

    Compiled parts (`torch.compile`, TorchScript) are not watched, because watching would change them. In a shadow, only
    TorchScript parts are still compiled.

    Args:
        inputs: Also compare the inputs of the modules, and keep all copies.

    Cost: copies of all outputs of one step in fp32, until the other step ends.

    """

    def __init__(self, *, inputs: bool = False) -> None:
        # in mixed precision and fp32, in the order in which they ended
        self.calls: list[tuple[OutputCall, OutputCall]] = []
        self.reference: list[OutputCall] = []  # in fp32, in the order in which they ended
        self.unseen: list[str] = []  # names of compiled modules
        self.running: list[str] = []  # names of the modules that are running now, outermost first
        self._inputs = inputs
        self._by_name: dict[str, list[OutputCall]] = {}
        self._num_compared: Counter[str] = Counter()

    def recording(self, root: nn.Module) -> AbstractContextManager[None]:
        """Keep the outputs of the run in fp32."""
        return self._watching(root, "record")

    def comparing(self, root: nn.Module) -> AbstractContextManager[None]:
        """Compare the outputs with the kept outputs."""
        return self._watching(root, "compare")

    def naming(self, root: nn.Module) -> AbstractContextManager[None]:
        """Only update `running`, without comparing."""
        return self._watching(root, "name")

    def again(self) -> None:
        """Begin to compare another run with the same reference."""
        self._num_compared.clear()
        self.calls = []

    def forget(self) -> None:
        """Free all copies, before the next batch."""
        self.again()
        self._by_name.clear()
        self.reference = []

    @contextmanager
    def _watching(self, root: nn.Module, mode: Mode) -> Generator[None]:
        watched = [_Watched(module, name, self, mode) for name, module in self._modules(root)]
        for one in watched:
            one.install()
        try:
            yield
        finally:
            for one in watched:
                one.restore()
            self.running.clear()

    def _modules(self, root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        self.unseen, closed = [], set[nn.Module]()
        for full_name, module in root.named_modules():
            name = _modules.plain_name(full_name)
            if module in closed or _sharding.is_wrapper(module):
                continue
            if module is not root and is_metric(module):
                closed.update(module.modules())
            elif _modules.is_compiled(module):
                closed.update(module.modules())
                self.unseen.append(name or type(module).__name__)
            elif type(module).forward is not nn.Module.forward:
                yield name, module

    @torch.no_grad()
    def inputs_of(self, args: Any, kwargs: Any) -> list[Tensor]:
        """Return copies of the inputs of a call, if they are compared."""
        return _copies([args, kwargs], decisions=True) if self._inputs else []

    @torch.no_grad()
    def add(self, name: str, kind: str, inputs: list[Tensor], output: Any, *, compare: bool) -> None:
        """Keep a call, or compare it with the same call in fp32."""
        outputs = _copies(output)
        if not compare:
            call = OutputCall(name, kind, inputs, outputs)
            self._by_name.setdefault(name, []).append(call)
            self.reference.append(call)
            return
        number = self._num_compared[name]
        self._num_compared[name] += 1
        recorded = self._by_name.get(name, [])
        if number >= len(recorded):
            return
        fp32_call = recorded[number]
        sums, input_sums = _compared(fp32_call.outputs, outputs), _compared(fp32_call.inputs, inputs)
        num_values = sum(tensor.numel() for tensor in outputs)
        if not self._inputs:
            outputs = []
            fp32_call.outputs.clear()
        self.calls.append((OutputCall(name, kind, inputs, outputs, sums, input_sums, num_values), fp32_call))


def _copies(values: Any, *, decisions: bool = False) -> list[Tensor]:
    """Return copies of the floating-point tensors; with `decisions` also of indices and masks."""
    with _modules.outside_transforms():
        found = [_modules.behind_transforms(t) for _, t in tensors_in(values)]
        dense = [t.detach().clone() for t in found if t.layout is torch.strided and not t.is_complex()]
        return [t for t in dense if decisions or t.is_floating_point()]


def _compared(reference: list[Tensor], values: list[Tensor]) -> Tensor | None:
    """Return the sums of each pair, [number, 6]; `None` where they do not match."""
    if not reference or [t.shape for t in reference] != [t.shape for t in values]:
        return None
    with _modules.outside_transforms():
        return torch.stack([output_sums(r, v) for r, v in zip(reference, values, strict=True)])


Mode = Literal["record", "compare", "name"]


@final
class _Watched(MethodOverride):
    """The `forward` of a module, which reports its inputs and outputs.

    It replaces `forward` instead of being a hook: torch's own transformer layers compute in another way if they have
    hooks, and the results would differ.
    """

    def __init__(self, owner: nn.Module, module_name: str, comparison: OutputComparison, mode: Mode) -> None:
        super().__init__(owner, "forward")
        self._module_name, self._comparison, self._mode = module_name, comparison, mode

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.inner(*args, **kwargs)
        comparison, running = self._comparison, self._comparison.running
        inputs = comparison.inputs_of(args, kwargs)
        running.append(self._module_name)
        try:
            output = self.inner(*args, **kwargs)
        finally:
            if running:
                running.pop()
        if self._mode != "name":
            kind = type(self.owner).__name__
            comparison.add(self._module_name, kind, inputs, output, compare=self._mode == "compare")
        return output


@final
class OutputTotals:
    """Adds up the comparisons of each module over the batches of an evaluation, on the device."""

    def __init__(self) -> None:
        self._totals: dict[str, _Total] = {}

    def add(self, outputs: OutputComparison) -> None:
        """Add the calls of one batch."""
        for call, _ in outputs.calls:
            if call.sums is not None:
                _add(self._totals, call.name, (call.kind, 1, call.num_values, call.sums.sum(0)))

    def rows(self, trainer: Trainer) -> list[ModuleRow]:
        """Return a row for each module, over all ranks. All must call. This waits for the device."""
        sums = torch.stack([total[3] for total in self._totals.values()]).cpu() if self._totals else torch.zeros(0, 6)
        own = [(name, *total[:3], row) for (name, total), row in zip(self._totals.items(), sums, strict=True)]
        totals: dict[str, _Total] = {}
        for name, kind, calls, values, row in (one for rank in gather(trainer, own) for one in rank):
            _add(totals, name, (kind, calls, values, row))
        return [_row(trainer, name, *total) for name, total in totals.items()]


_Total = tuple[str, int, int, Tensor]
"""Class of a module, number of calls, number of values, sums."""


def _add(totals: dict[str, _Total], name: str, more: _Total) -> None:
    kind, calls, values, sums = more
    if name in totals:
        kind, calls, values = totals[name][0], calls + totals[name][1], values + totals[name][2]
        sums = totals[name][3] + sums
    totals[name] = kind, calls, values, sums


def _row(trainer: Trainer, name: str, kind: str, calls: int, values: int, sums: Tensor) -> ModuleRow:
    sqnr_db, cosine = (float(value) for value in fidelity(sums[:3]))
    varying = float(fidelity(sums[3:])[0])
    rms = math.sqrt(float(sums[0]) / max(values, 1))
    return ModuleRow(trainer.current_epoch, trainer.global_step, name, kind, calls, sqnr_db, varying, cosine, rms)
