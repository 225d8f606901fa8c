"""The memory of a recorded step by kind, and its peak."""

from __future__ import annotations

from typing import Any

import torch
from support import Toy

from lightning_amp.advice._memory import memory
from lightning_amp.advice._record import Allocation, Loss, Operation, Recording
from lightning_amp.measure import BACKWARD, FORWARD, OPTIMIZER


def recorded(*allocations: Allocation, losses: Any = ()) -> Recording:
    return Recording((Operation("mm", FORWARD),) * 10, allocations, tuple(losses))


def made(num_bytes: int, begin: int, end: int | None, part: str = FORWARD, **changes: Any) -> Allocation:
    return Allocation(**{"pointer": begin, "numel": num_bytes // 4, **changes}, num_bytes=num_bytes, begin=begin,
                      end=end, part=part)  # fmt: skip


def trained() -> tuple[Any, Any]:
    module = Toy(torch.optim.Adam)
    optimizer: Any = module.configure_optimizers()
    module.loss(torch.ones(2, 8)).backward()
    optimizer.step()
    return module, [optimizer]


def test_parts_add_up_to_the_peak() -> None:
    module, optimizers = trained()
    size = 4 * sum(p.numel() for p in module.parameters())
    grad = module.net[0].weight.grad
    step = recorded(
        made(100, -1, 2),  # gradients of the step before
        made(1000, 0, 8),
        made(400, 1, 8, numel=30),
        made(70, 2, 3, is_cast=True),
        made(4000, 4, None, BACKWARD, pointer=grad.untyped_storage().data_ptr()),
        made(500, 9, None, OPTIMIZER),
        losses=[Loss(3, 10)],
    )
    found = memory(step, module, optimizers)
    assert (found.weights, found.states) == (size, 2 * size + 4 * 4)  # each parameter has a count of its steps
    assert (found.gradients, found.activations, found.logits, found.casts) == (4000, 1000, 400, 0)
    assert found.temporaries == 0
    assert found.peak == found.weights + found.states + 5400
    assert found.of_batch == 1470  # not at the peak


def test_what_the_optimizer_makes_in_its_step() -> None:
    module, optimizers = trained()
    found = memory(recorded(made(10, 0, 3), made(500, 5, 7, OPTIMIZER)), module, optimizers)
    assert (found.temporaries, found.activations, found.of_batch) == (500, 0, 10)


def test_a_step_without_allocations() -> None:
    module, optimizers = trained()
    found = memory(recorded(), module, optimizers)
    assert found.peak == found.weights + found.states
