"""What each module gives out in mixed precision, beside what it gives out in fp32."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import final, override

from lightning_amp._compat import _modules
from lightning_amp._containers import tensors_in
from lightning_amp.casting import MethodOverride, is_metric
from lightning_amp.numerics import output_sums


@final
@dataclass(slots=True)
class OutputCall:
    """One call of one module, or of one operation.

    Attributes:
        name: Qualified name of the module.
        kind: Its class.
        inputs: Copies of what went in, if asked for.
        outputs: Copies of what came out.
        sums: Of each output against fp32, see :func:`~lightning_amp.numerics.output_sums`: [number, 6].
        input_sums: The same of the inputs.
        num_values: Of the outputs.

    """

    name: str
    kind: str
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    sums: Tensor | None = None
    input_sums: Tensor | None = None
    num_values: int = 0

    def take(self, values: Any) -> None:
        """Keep what goes in."""
        self.inputs = _copies(values, decisions=True)

    def give(self, output: Any) -> None:
        """Keep what comes out."""
        self.outputs = _copies(output)

    def compare(self, reference: OutputCall) -> None:
        """Compare with the same call in fp32."""
        self.num_values = sum(tensor.numel() for tensor in self.outputs)
        self.sums = _compared(reference.outputs, self.outputs)
        self.input_sums = _compared(reference.inputs, self.inputs)

    def free(self) -> None:
        """Forget the copies."""
        self.inputs, self.outputs = [], []


@final
class OutputComparison:
    """Watches the modules inside a module: first in fp32, then in mixed precision.

    What `torch.compile` or TorchScript compiled is not looked into, for that would change it; in a shadow nothing is
    compiled.

    Args:
        inputs: Also compare what goes into the modules.

    Attributes:
        calls: Of the mixed-precision side, in the order in which they ended, with the reference's outputs.
        unseen: Names of what is compiled.

    Cost: copies of all outputs of one step in fp32, until the other step ends.

    """

    def __init__(self, *, inputs: bool = False) -> None:
        self.calls: list[tuple[OutputCall, OutputCall]] = []
        self.unseen: list[str] = []
        self.running: list[str] = []
        self._inputs = inputs
        self._reference: dict[str, list[OutputCall]] = {}
        self._seen: dict[str, int] = {}
        self._in_order: list[OutputCall] = []

    @contextmanager
    def recording(self, root: nn.Module) -> Generator[None]:
        """Keep what comes out, in fp32."""
        with self._watching(root, reference=True):
            yield

    @contextmanager
    def comparing(self, root: nn.Module) -> Generator[None]:
        """Compare what comes out with what was kept."""
        with self._watching(root, reference=False):
            yield

    @contextmanager
    def naming(self, root: nn.Module) -> Generator[None]:
        """Only know in `running` which modules are running, outermost first."""
        with self._watching(root, reference=None):
            yield

    def again(self) -> None:
        """Begin to compare another run with the same reference."""
        self._seen.clear()
        self.calls = []

    def forget(self) -> None:
        """Free what was kept, before the next batch."""
        self.again()
        self._reference.clear()
        self._in_order.clear()

    @property
    def reference(self) -> list[OutputCall]:
        """Return the calls in fp32, in the order in which they ended."""
        return list(self._in_order)

    @contextmanager
    def _watching(self, root: nn.Module, *, reference: bool | None) -> Generator[None]:
        watched = [_Watched(module, name, self, reference) for name, module in self._modules(root)]
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
            if module in closed:
                continue
            if module is not root and is_metric(module):
                closed.update(module.modules())
            elif _modules.is_compiled(module):
                closed.update(module.modules())
                self.unseen.append(name or type(module).__name__)
            elif type(module).forward is not nn.Module.forward:
                yield name, module

    @torch.no_grad()
    def took(self, call: OutputCall, values: Any) -> None:
        """Keep what goes into a module."""
        if self._inputs:
            call.take(values)

    @torch.no_grad()
    def gave(self, call: OutputCall, output: Any, *, reference: bool) -> None:
        """Keep, or compare, what came out of a module."""
        call.give(output)
        if reference:
            self._reference.setdefault(call.name, []).append(call)
            self._in_order.append(call)
            return
        number = self._seen.get(call.name, 0)
        self._seen[call.name] = number + 1
        known = self._reference.get(call.name, [])
        if number < len(known):
            call.compare(known[number])
            if not self._inputs:
                call.free()
                known[number].free()
            self.calls.append((call, known[number]))


def _copies(values: Any, *, decisions: bool = False) -> list[Tensor]:
    """Return copies of the floating-point tensors; with `decisions` those of indices and masks, too."""
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


@final
class _Watched(MethodOverride):
    """The `forward` of a module that says what went in and came out.

    In the place of `forward` and not in a hook: torch's own transformer layers take another path where there are
    hooks, and the run would not be the same.
    """

    def __init__(self, owner: nn.Module, name: str, comparison: OutputComparison, reference: bool | None) -> None:
        super().__init__(owner, "forward")
        self._name_of_module, self._comparison, self._reference = name, comparison, reference

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.inner(*args, **kwargs)
        call = OutputCall(self._name_of_module, type(self.owner).__name__)
        if self._reference is not None:
            self._comparison.took(call, [args, kwargs])
        self._comparison.running.append(call.name)
        try:
            output = self.inner(*args, **kwargs)
        finally:
            if self._comparison.running:
                self._comparison.running.pop()
        if self._reference is not None:
            self._comparison.gave(call, output, reference=self._reference)
        return output
