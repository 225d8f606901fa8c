"""What is noted of an operation and of memory."""

from __future__ import annotations

from lightning_amp.profiling._operations import Allocation, Operation
from lightning_amp.tracing import Place


def test_an_operation() -> None:
    place = Place("a.py", 1)
    operation = Operation("mm", "forward")
    operation.took(0.5)
    operation.multiplied("bfloat16", 10, (1, 2, 3), place)
    operation.convolved(channels_last=True)
    assert (operation.seconds, operation.dtype, operation.flops, operation.sizes) == (0.5, "bfloat16", 10, (1, 2, 3))
    assert operation.is_convolution
    assert operation.channels_last
    operation.casted(8, 5, None)
    assert (operation.cast_bytes, operation.cast_of, operation.place) == (8, 5, None)


def test_memory_that_is_freed() -> None:
    made = Allocation(1, 8, 2, 0)
    assert made.end is None
    made.freed(3)
    assert made.end == 3
