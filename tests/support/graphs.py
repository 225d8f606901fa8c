"""Run a step in a CUDA graph, or in a substitute for one on the pretended device."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import pretended
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import final, override
from zoo.toy import FEATURES, Toy


@final
class Capturing(Callback):
    """Has the pretended device refuse, during a batch, operations that no CUDA graph can capture."""

    def __init__(self, first: int = 3) -> None:
        self.first = first

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pretended.core().set_capturing(batch_idx >= self.first)

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        pretended.core().set_capturing(False)

    @override
    def on_exception(self, *args: Any) -> None:
        pretended.core().set_capturing(False)


@final
class CudaGraph:
    """A CUDA graph on the stream of training."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    @contextlib.contextmanager
    def capture(self) -> Generator[None, None, None]:
        with torch.cuda.graph(self._graph, stream=torch.cuda.current_stream()):
            yield

    def replay(self) -> None:
        self._graph.replay()


@final
class RecordedGraph(TorchDispatchMode):
    """A substitute for a graph. It notes each operation of a step, and runs it again on the same memory.

    Unlike in a graph, the operations also run while they are captured. So the first replay does nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self._has_run = True

    @contextlib.contextmanager
    def capture(self) -> Generator[None, None, None]:
        pretended.core().set_capturing(True)
        try:
            with self:
                yield
        finally:
            pretended.core().set_capturing(False)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        if self._has_run:
            self._has_run = False
            return
        for func, args, kwargs, out in self._calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():  # neither in place nor a view
                    old.copy_(new)


class InGraph(Toy):
    """Runs some batches in a graph, from the loss to the update of the loss scale.

    The first column of a batch multiplies its loss. A large factor makes gradients overflow, an infinite one the loss.

    Args:
        optimizer: Makes an optimizer that can be captured.
        plan: A letter for each batch: `e` for a step without a graph, `g` for one in the graph. The first `g` captures.
        graph: The class of the graph; `None` for no graph.

    """

    def __init__(self, optimizer: Any, plan: str, graph: type[CudaGraph | RecordedGraph] | None) -> None:
        layers = (nn.Linear(FEATURES - 1, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))
        super().__init__(optimizer, nn.Sequential(*layers))
        self.plan, self.kind = plan, graph
        self.graph: CudaGraph | RecordedGraph | None = None
        self.batch: Tensor | None = None
        self.replays = False

    @override
    def transfer_batch_to_device(self, batch: Tensor, device: torch.device, dataloader_idx: int) -> Tensor:
        """Copy each batch into the same memory, from which the graph reads."""
        if self.batch is None:
            self.batch = batch.to(device)
        return self.batch.copy_(batch)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.replays:
            return None
        inputs = batch[:, 1:]
        return nn.functional.mse_loss(self.net(inputs).float(), inputs.sum(1, keepdim=True)) * batch[0, 0]

    @override
    def optimizer_step(self, epoch: Any, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        step = super().optimizer_step
        if self.kind is None or self.plan[batch_idx] == "e":
            step(epoch, batch_idx, optimizer, optimizer_closure)
            return
        if self.graph is None:
            optimizer.zero_grad()  # the graph allocates its own gradients
            self.graph = self.kind()
            with self.graph.capture():
                step(epoch, batch_idx, optimizer, optimizer_closure)
        else:
            self.replays = True
            optimizer_closure()  # Lightning asks for it
            self.replays = False
        self.graph.replay()


def factors_first(count: int, factors: dict[int, float], size: int = 4) -> list[Tensor]:
    """Return batches for `InGraph`, with these factors of their losses. Other factors are 1."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(size, FEATURES, generator=generator) for _ in range(count)]
    for i, batch in enumerate(batches):
        batch[:, 0] = factors.get(i, 1.0)
    return batches
