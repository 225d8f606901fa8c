"""Compare the outputs of each module in mixed precision with its outputs in fp32."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import final, override

from lightning_amp._compat import _modules, _sharding
from lightning_amp._compat._names import Trainer
from lightning_amp._containers import tensors_in
from lightning_amp.casting import MethodOverride, Overrides, is_metric
from lightning_amp.findings import ModuleSums
from lightning_amp.numerics import output_sums
from lightning_amp.shadow._ranks import gather


@final
class OutputComparison:
    """Watches the modules inside a module, first in fp32, then in mixed precision, batch after batch.

    It keeps sums for each module, on the device, however many batches there are. Compiled parts (`torch.compile`,
    TorchScript) are not watched, because watching would change them. In a shadow, only TorchScript parts are still
    compiled.

    Args:
        inputs: Also compare the inputs of the modules.

    Cost: copies of all outputs of one step in fp32, and with `inputs` of all inputs, until the other step ends.

    """

    def __init__(self, *, inputs: bool = False) -> None:
        self.inputs = inputs
        self._sums: dict[str, ModuleSums] = {}
        self._reference: defaultdict[str, deque[tuple[list[Tensor], list[Tensor]]]] = defaultdict(deque)

    def recording(self, root: nn.Module) -> AbstractContextManager[None]:
        """Keep the outputs of the run in fp32."""
        self._reference.clear()
        return Overrides(_Watched(module, name, self, compare=False) for name, module in self._modules(root))

    @contextmanager
    def comparing(self, root: nn.Module) -> Generator[None]:
        """Compare the outputs with the kept outputs, and free these."""
        try:
            with Overrides(_Watched(module, name, self, compare=True) for name, module in self._modules(root)):
                yield
        finally:
            self._reference.clear()

    def sums_of_all_ranks(self, trainer: Trainer) -> dict[str, ModuleSums]:
        """Return the sums of each module, in the order in which the modules ran. All ranks must call.

        This waits for the device.
        """
        mine = [(name, s._replace(inputs=s.inputs.cpu(), outputs=s.outputs.cpu())) for name, s in self._sums.items()]
        total: dict[str, ModuleSums] = {}
        for name, one in (pair for rank in gather(trainer, mine) for pair in rank):
            total[name] = total[name].plus(one) if name in total else one
        return total

    def _modules(self, root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        closed = set[nn.Module]()
        for full_name, module in root.named_modules():
            name = _modules.plain_name(full_name)
            if module in closed or _sharding.is_wrapper(module):
                continue
            if (module is not root and is_metric(module)) or _modules.is_compiled(module):
                closed.update(module.modules())
            elif type(module).forward is not nn.Module.forward:
                yield name, module

    @torch.no_grad()
    def add(self, name: str, kind: str, inputs: list[Tensor], output: Any, *, compare: bool) -> None:
        """Keep a call, or compare it with the same call in fp32."""
        outputs = [tensor for tensor in _copies(output) if tensor.is_floating_point()]
        if not compare:
            self._reference[name].append((inputs, outputs))
        elif self._reference[name]:
            fp32_inputs, fp32_outputs = self._reference[name].popleft()
            sums = _compared(fp32_outputs, outputs)
            if len(sums):
                one = ModuleSums(kind, 1, sum(t.numel() for t in outputs), _compared(fp32_inputs, inputs), sums)
                self._sums[name] = self._sums[name].plus(one) if name in self._sums else one


def _copies(values: Any) -> list[Tensor]:
    with _modules.outside_transforms():
        found = [_modules.behind_transforms(t) for _, t in tensors_in(values)]
        return [t.detach().clone() for t in found if t.layout is torch.strided and not t.is_complex()]


def _compared(reference: list[Tensor], values: list[Tensor]) -> Tensor:
    """Return the sums of each pair, [number, 6]; none where they do not match. An index that differs counts as NaN."""
    if not reference or [t.shape for t in reference] != [t.shape for t in values]:
        return torch.zeros(0, 6)
    with _modules.outside_transforms():
        sums = [output_sums(r, v) for r, v in zip(reference, values, strict=True)]
        for i, (r, v) in enumerate(zip(reference, values, strict=True)):
            if not r.is_floating_point():
                sums[i] = torch.where((r != v).any(), torch.nan, sums[i])
        return torch.stack(sums)


@final
class _Watched(MethodOverride):
    """The `forward` of a module, which reports its inputs and outputs.

    It replaces `forward` instead of being a hook: torch's own transformer layers compute in another way if they have
    hooks, and the results would differ.
    """

    def __init__(self, owner: nn.Module, module_name: str, comparison: OutputComparison, *, compare: bool) -> None:
        super().__init__(owner, "forward")
        self._module_name, self._comparison, self._compare = module_name, comparison, compare

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.inner(*args, **kwargs)
        inputs, kind = list[Tensor](), type(self.owner).__name__
        with suppress(Exception):  # a tensor that cannot be looked at is left out; the user's module goes on
            inputs = _copies([args, kwargs]) if self._comparison.inputs else inputs  # indices and masks, too
        output = self.inner(*args, **kwargs)
        with suppress(Exception):
            self._comparison.add(self._module_name, kind, inputs, output, compare=self._compare)
        return output
