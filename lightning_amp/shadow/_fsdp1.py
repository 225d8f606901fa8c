"""A second run of a module that FSDP1 shards: the private state that it must put back. Read `_fsdp2.py` first."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import final

ABSENT: Any = object()


@final
class Replaced:
    """Attributes that have other values, or are absent, until :meth:`restore`. Remove with `Fsdp1` and `Fsdp2`."""

    def __init__(self) -> None:
        self._saved: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, **attributes: Any) -> None:
        """Set attributes of an object; remove those that shall be `ABSENT`.

        Raises:
            AttributeError: If the object has no attribute that is set.

        """
        for name, value in attributes.items():
            before = vars(owner).get(name, ABSENT) if value is ABSENT else getattr(owner, name)
            self._saved.append((owner, name, before))
            _set(owner, name, value)

    def replace_existing(self, owner: Any, **attributes: Any) -> None:
        """Set attributes, except those that the object does not have in this version of torch."""
        self.replace(owner, **{name: value for name, value in attributes.items() if hasattr(owner, name)})

    def restore(self) -> None:
        """Set all attributes to their earlier values, the latest first."""
        while self._saved:
            _set(*self._saved.pop())


def _set(owner: Any, name: str, value: Any) -> None:
    if value is ABSENT:
        vars(owner).pop(name, None)
    else:
        setattr(owner, name, value)


class NotNowError(RuntimeError):
    """A second run is not possible at this time, but may be possible later. Remove with `Fsdp1`."""


_GATHERED = ("_full_param_padded", "_full_prec_full_param_padded")
"""Attributes of a flat parameter of FSDP1 that hold gathered values. Remove with `Fsdp1`."""


def _without_memory(tensor: Tensor) -> Tensor:
    """Return a tensor of the same size and dtype whose memory is not allocated yet. Remove with `Fsdp1`."""
    empty = torch.empty_like(tensor)
    empty.untyped_storage().resize_(0)
    return empty


@final
class Fsdp1:
    """The units of `FullyShardedDataParallel`, with the methods of `Fsdp2`.

    Remove when FSDP1 is removed from torch.

    Args:
        root: The outermost unit.
    """

    def __init__(self, root: nn.Module) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel

        self._all: list[Any] = FullyShardedDataParallel.fsdp_modules(root)
        self._units = [(unit, unit._handle) for unit in self._all if unit._handle is not None]
        self._aside = Replaced()
        self._gathered: list[tuple[Any, Any]] = []

    def _is_gathered(self, handle: Any) -> bool:
        """Return whether the parameters of modules are views of what was gathered."""
        flat = handle.flat_param
        if not hasattr(flat, "_local_shard"):  # before the first forward
            return False
        return handle._skipped_use_sharded_views or flat.data_ptr() != flat._local_shard.data_ptr()

    def reshard(self) -> None:
        """Let the parameters of modules be views of this rank's shard."""
        from torch.distributed.fsdp._runtime_utils import _reshard

        for unit, handle in self._units:
            if self._is_gathered(handle):
                _reshard(unit, handle, handle.uses_sharded_strategy)

    def set_aside(self) -> None:
        """Reshard, and keep the state of the units until :meth:`put_back`.

        Raises:
            NotNowError: Within an accumulation, while FSDP1 keeps whole gradients.
        """
        for _, handle in self._units:
            flat = handle.flat_param
            if handle.uses_sharded_strategy and flat.grad is not None and flat.grad.shape != flat._local_shard.shape:
                raise NotNowError("FSDP1 keeps the gradients of an accumulation in a form that cannot be set aside")
        self._gathered = [(unit, handle) for unit, handle in self._units if self._is_gathered(handle)]
        self.reshard()
        for unit, handle in self._units:
            self._aside.replace(handle.flat_param, grad=None)
            self._aside.replace(handle, _post_forward_index=None, _needs_pre_backward_unshard=False)
            self._aside.replace(unit._exec_order_data, handles_post_forward_order=[])
            # The outermost unit keeps what it gathered in a forward, until a backward. Like FSDP2, it does not gather
            # again while it has this memory.
            for name in _GATHERED:
                if hasattr(handle.flat_param, name):
                    self._aside.replace(handle.flat_param, **{name: _without_memory(getattr(handle.flat_param, name))})

    def put_back(self) -> None:
        """Undo :meth:`set_aside`, also after a forward or a backward that raised an exception."""
        from torch.distributed.fsdp._runtime_utils import _unshard

        self.settle()
        self._aside.restore()
        for unit, handle in self._gathered:
            _unshard(unit, handle, unit._unshard_stream, unit._pre_unshard_stream)
        self._gathered = []

    def settle(self) -> None:
        """Bring the units to their state between two steps: resharded, and without anything under way."""
        for unit, handle in self._units:
            flat = handle.flat_param
            if hasattr(flat, "_post_backward_hook_state"):
                flat._post_backward_hook_state[-1].remove()
                del flat._post_backward_hook_state
            unit.training_state = type(unit.training_state).IDLE
            handle._training_state = type(handle._training_state).IDLE
            handle._ran_pre_backward_hook = handle._needs_pre_backward_unshard = handle._prefetched = False
            if unit._is_root:
                unit._post_backward_callback_queued = False
        self.reshard()
        for _, handle in self._units:
            if handle.uses_sharded_strategy and hasattr(handle.flat_param, "_full_param_padded"):
                handle._free_unsharded_flat_param()

    @property
    def casts(self) -> bool:
        """Return whether a unit gathers parameters, or reduces their gradients, in another dtype than their own."""
        return any(h._uses_param_mixed_precision or h._uses_reduce_mixed_precision for _, h in self._units)

    @contextmanager
    def gathering_in_full(self) -> Generator[None]:
        """Gather parameters, and reduce their gradients, in their own dtype: set each `MixedPrecision` aside.

        Call it while the units are resharded.
        """
        from torch.distributed.fsdp import MixedPrecision
        from torch.distributed.fsdp._runtime_utils import _lazy_init

        for unit in self._all:
            if unit._is_root is None:  # before the first forward, which allocates the memory to gather into
                _lazy_init(unit, unit)
        in_half = Replaced()
        try:
            for unit in self._all:
                in_half.replace(unit, mixed_precision=MixedPrecision())
            for _, handle in self._units:
                own, flat = handle._orig_param_dtype, handle.flat_param
                if handle._uses_param_mixed_precision and handle.uses_sharded_strategy:
                    in_half.replace(flat, _full_param_padded=flat._full_prec_full_param_padded)
                in_half.replace(handle, _fwd_bwd_param_dtype=own, _reduce_dtype=own)
            yield
        finally:
            self.settle()
            in_half.restore()

    def parts_in_use(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Return nothing: :meth:`put_back` gathers from the shards."""
        return ()

    @property
    def num_shards(self) -> int:
        """Return over how many ranks a parameter is sharded; further ranks have replicas."""
        unit, handle = self._units[0]
        return unit.process_group.size() if handle.uses_sharded_strategy else 1
