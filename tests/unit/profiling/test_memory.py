"""Where memory is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from support import Toy

from lightning_amp.measure import BACKWARD, FORWARD, OPTIMIZER
from lightning_amp.profiling._memory import largest_loss, memory, optimizer_facts
from lightning_amp.profiling._operations import Allocation, Loss


def recorded(*allocations: Allocation, losses: Any = (), operations: int = 10) -> Any:
    return SimpleNamespace(allocations=list(allocations), losses=list(losses), operations=[None] * operations)


def made(num_bytes: int, begin: int, end: int | None, part: str = FORWARD, **changes: Any) -> Allocation:
    return Allocation(**{"pointer": begin, "numel": num_bytes // 4, **changes}, num_bytes=num_bytes, begin=begin,
                      end=end, part=part)  # fmt: skip


def trained() -> tuple[Any, Any]:
    module = Toy(torch.optim.Adam)
    optimizer: Any = module.configure_optimizers()
    module.loss(torch.ones(2, 8)).backward()
    optimizer.step()
    return module, SimpleNamespace(optimizers=[optimizer])


def test_parts_add_up_to_the_peak() -> None:
    module, trainer = trained()
    size = 4 * sum(p.numel() for p in module.parameters())
    grad = module.net[0].weight.grad
    recorder = recorded(
        made(100, -1, 2),  # gradients of the step before
        made(1000, 0, 8),
        made(400, 1, 8, numel=30),
        made(70, 2, 3, is_cast=True),
        made(4000, 4, None, BACKWARD, pointer=grad.untyped_storage().data_ptr()),
        made(500, 9, None, OPTIMIZER),
        losses=[Loss(3, 10, torch.float32)],
    )
    found = memory(recorder, trainer, module)
    assert (found.weights, found.states) == (size, 2 * size + 4 * 4)  # each parameter has a count of its steps
    assert (found.gradients, found.activations, found.logits, found.casts) == (4000, 1000, 400, 0)
    assert found.temporaries == 0
    assert found.peak == found.weights + found.states + 5400
    assert found.of_batch == 1470  # not at the peak


def test_what_the_optimizer_makes_in_its_step() -> None:
    module, trainer = trained()
    found = memory(recorded(made(10, 0, 3), made(500, 5, 7, OPTIMIZER)), trainer, module)
    assert (found.temporaries, found.activations, found.of_batch) == (500, 0, 10)


def test_a_step_without_allocations() -> None:
    module, trainer = trained()
    found = memory(recorded(), trainer, module)
    assert found.peak == found.weights + found.states


def test_the_largest_loss_counts() -> None:
    assert largest_loss(recorded()) is None
    losses = [Loss(3, 10, torch.float32), Loss(3, 100, torch.float32), Loss(5, 10, torch.float32)]
    assert largest_loss(recorded(losses=losses)) == (3, 100)


def test_optimizers() -> None:
    module, trainer = trained()
    (facts,) = optimizer_facts(trainer)
    assert (facts.name, facts.fused, facts.can_fuse) == ("Adam", False, True)
    assert facts.num_parameters == sum(p.numel() for p in module.parameters())
    assert 8 <= facts.bytes_per_parameter < 8.2
    (fused,) = optimizer_facts(SimpleNamespace(optimizers=[torch.optim.SGD(module.parameters(), fused=True)]))
    assert (fused.fused, fused.can_fuse, fused.bytes_per_parameter) == (True, False, 0.0)
