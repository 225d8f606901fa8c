"""What all ranks have to agree on."""

from __future__ import annotations

import torch
from torch import Tensor


def all_reduce_max(flags: Tensor, device: torch.device) -> None:
    """Each element becomes its maximum over all ranks, in place.

    Args:
        flags: Of any shape. A rank without gradients, or with those that FSDP keeps on the CPU, has them there.
        device: What the process group communicates on.

    """
    there = flags if flags.device.type == device.type else flags.to(device)
    torch.distributed.all_reduce(there, op=torch.distributed.ReduceOp.MAX)
    if there is not flags:
        flags.copy_(there)
