"""A second run of a module that FSDP shards: the private state that it must put back."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import final

from lightning_amp._compat import _sharding
from lightning_amp._compat._names import FSDPStrategy, ModelParallelStrategy, Trainer

_ABSENT: Any = object()


def is_sharded(trainer: Trainer) -> bool:
    """Return whether the strategy shards modules, so that all ranks must run each step together."""
    return isinstance(trainer.strategy, (ModelParallelStrategy, FSDPStrategy))


def tensor_parallel_size(trainer: Trainer) -> int:
    """Return how many ranks compute with the same batch, each with a part of the weights."""
    strategy = trainer.strategy
    return strategy.device_mesh["tensor_parallel"].size() if isinstance(strategy, ModelParallelStrategy) else 1


def replace(undo: ExitStack, owner: Any, **attributes: Any) -> None:
    """Set attributes, or remove those that shall be `_ABSENT`, until `undo` closes.

    It leaves out attributes that the object does not have, or only shows, in this version of torch.
    """
    for name, value in attributes.items():
        if value is _ABSENT or _can_set(owner, name):
            undo.callback(_set, owner, name, getattr(owner, name, _ABSENT))
            _set(owner, name, value)


def _can_set(owner: Any, name: str) -> bool:
    return hasattr(owner, name) and getattr(getattr(type(owner), name, None), "fset", owner) is not None


def _set(owner: Any, name: str, value: Any) -> None:
    if value is _ABSENT:
        vars(owner).pop(name, None)
    else:
        setattr(owner, name, value)


class NotNowError(RuntimeError):
    """A second run is not possible at this time, but may be possible later. Remove with `Fsdp1`."""


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

    @contextmanager
    def set_aside(self) -> Generator[None]:
        """Reshard, and restore the state of the units at the end, also after a run that raised an exception.

        Raises:
            NotNowError: Within an accumulation, while FSDP1 keeps whole gradients.
        """
        from torch.distributed.fsdp._runtime_utils import _unshard

        for _, handle in self._units:
            flat = handle.flat_param
            if handle.uses_sharded_strategy and flat.grad is not None and flat.grad.shape != flat._local_shard.shape:
                raise NotNowError("FSDP1 keeps the gradients of an accumulation in a form that cannot be set aside")
        with ExitStack() as aside:
            for unit, handle in self._units:
                if self._is_gathered(handle):
                    aside.callback(_unshard, unit, handle, unit._unshard_stream, unit._pre_unshard_stream)
            self.reshard()
            for unit, handle in self._units:
                replace(aside, handle, _post_forward_index=None, _needs_pre_backward_unshard=False)
                replace(aside, unit._exec_order_data, handles_post_forward_order=[])
                # The outermost unit keeps what it gathered in a forward, until a backward. Like FSDP2, it does not
                # gather again while it has this memory.
                gathered = ("_full_param_padded", "_full_prec_full_param_padded")
                held = {name: getattr(handle.flat_param, name, None) for name in gathered}
                empty = {name: _without_memory(tensor) for name, tensor in held.items() if tensor is not None}
                replace(aside, handle.flat_param, grad=None, **empty)
            aside.callback(self.settle)
            yield

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

        with ExitStack() as in_half:
            for unit in self._all:
                if unit._is_root is None:  # before the first forward, which allocates the memory to gather into
                    _lazy_init(unit, unit)
                replace(in_half, unit, mixed_precision=MixedPrecision())
            for _, handle in self._units:
                own, flat = handle._orig_param_dtype, handle.flat_param
                if handle._uses_param_mixed_precision and handle.uses_sharded_strategy:
                    replace(in_half, flat, _full_param_padded=flat._full_prec_full_param_padded)
                replace(in_half, handle, _fwd_bwd_param_dtype=own, _reduce_dtype=own)
            in_half.callback(self.settle)
            yield

    def parts_in_use(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Return nothing: the end of :meth:`set_aside` gathers from the shards."""
        return ()

    @property
    def num_shards(self) -> int:
        """Return over how many ranks a parameter is sharded; further ranks have replicas."""
        unit, handle = self._units[0]
        return unit.process_group.size() if handle.uses_sharded_strategy else 1


def shared_internals(model: nn.Module) -> list[Any]:
    """Return objects of torch that the attributes of a sharded model refer to, and that must not be copied.

    Remove when FSDP2 keeps its state, and FSDP1 its views of freed memory, out of the attributes of modules.
    """
    from torch.distributed.fsdp import FSDPModule

    units: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    handles: list[Any] = [unit._handle for unit in model.modules() if _sharding.is_wrapper(unit)]
    flat = [handle.flat_param for handle in handles if handle is not None]
    views = [vars(info.module).get(info.param_name) for one in flat for info in one._param_infos]
    views += [vars(info.module).get(info.param_name) for one in flat for info in one._shared_param_infos]
    return [*(unit._get_fsdp_state() for unit in units), *(view for view in views if view is not None)]


@final
class Fsdp2:
    """The units that `fully_shard` made inside of a module. Without any, each method does nothing.

    FSDP2 keeps, for the length of a forward and a backward, which units are gathered, in which order they ran, and
    gradients that it has not reduced yet. Its public names reset some of this, but save nothing. Remove when a second
    run of a module is a public feature of FSDP2.

    Args:
        module: The module; between two steps.
    """

    def __init__(self, module: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        self._units: list[Any] = [m for m in module.modules() if isinstance(m, FSDPModule)]
        self._states: list[Any] = list(dict.fromkeys(unit._get_fsdp_state() for unit in self._units))
        self._groups: list[Any] = [group for state in self._states for group in _sharding.param_groups(state)]
        self._params: list[Any] = [param for group in self._groups for param in group.fsdp_params]
        self._whole: list[tuple[Any, nn.Parameter, bool]] = []

    def reshard(self) -> None:
        """Register the shards as the parameters of their modules, and free what was gathered."""
        for group in self._groups:
            group._to_sharded()

    @contextmanager
    def set_aside(self) -> Generator[None]:
        """Reshard, and restore the state of the units at the end, also after a run that raised an exception.

        Gathered weights are kept, too. FSDP2 gathers a weight only once until a backward, so the real run may use it
        for long. Changes to its shards, or to their `requires_grad`, have no effect until then.
        """
        gathered = [group for group in self._groups if group.is_unsharded]
        params = [param for group in gathered for param in group.fsdp_params]
        self._whole = [(p, p._unsharded_param, bool(p._unsharded_inner_tensors)) for p in params]
        with ExitStack() as aside:
            for _, whole, _ in self._whole:
                aside.callback(whole.requires_grad_, whole.requires_grad)
            for group in gathered:  # a hook that reads a parameter after the forward expects it gathered
                aside.callback(group._to_unsharded)
            for param in params:
                replace(aside, param, _unsharded_param=_ABSENT, all_gather_outputs=[], _unsharded_inner_tensors=[])
            self.reshard()
            for state in self._states:
                replace(aside, state._state_ctx, is_last_backward=True)
            for group in self._groups:
                replace(aside, group.comm_ctx, post_forward_order=[])
                replace(aside, group, _post_forward_indices=[], reduce_grads=True, all_reduce_grads=True)
                replace(aside, group, reshard_after_backward=True, _partial_reduce_output=None)
                replace(aside, group, _post_backward_pending=False, _partial_reduce_output_layout={})
            for param in self._params:
                replace(aside, param, unsharded_accumulated_grad=None)  # torch 2.15 only shows it
                replace(aside, getattr(param, "_unsharded_param", None), grad=None)
            aside.callback(self.settle)
            yield

    def parts_in_use(self) -> Generator[tuple[Tensor, Tensor]]:
        """Yield sharded parameters whose weights are set aside, each with this rank's part of these weights.

        A part has the values of the shard, and others where the shard has changed. This does not wait for the device.
        Values that a tensor subclass has converted are left out.
        """
        for param, whole, is_converted in self._whole:
            mesh, shard = param.mesh_info, _sharding.local(param.sharded_param.detach())
            parts = _sharding.local(whole.detach()).chunk(mesh.shard_mesh_size, param.fsdp_placement.dim)
            part = parts[mesh.shard_mesh_rank] if mesh.shard_mesh_rank < len(parts) else None
            if part is not None and part.shape == shard.shape and not is_converted:
                values = shard.to(part.device)
                yield param.sharded_param, torch.where(part == values.to(part.dtype), values, part.to(values.dtype))

    def settle(self) -> None:
        """Bring the units to their state between two steps: resharded, and without anything under way."""
        for state in self._states:
            roots = state._state_ctx
            roots.iter_forward_root, roots.post_backward_final_callback_queued = None, False
            state._training_state = type(state._training_state).IDLE
            getattr(state, "_modules_to_run_forward", set[Any]()).clear()
        for group in self._groups:
            if hasattr(group.comm_ctx, "post_forward_order"):  # not before the first forward
                group.finalize_backward()
                group.comm_ctx.post_forward_order.clear()
            group._training_state = type(group._training_state).IDLE
            group._post_backward_pending = False  # which torch has from 2.15 on
            group._to_sharded()
        for param in self._params:
            if _can_set(param, "unsharded_accumulated_grad"):
                param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None

    @property
    def casts(self) -> bool:
        """Return whether gathered parameters are in half precision, or a `MixedPrecisionPolicy` changes dtypes."""
        policies = [param.mp_policy for param in self._params] + [state._mp_policy for state in self._states]
        changes = any((p.param_dtype, p.reduce_dtype, p.output_dtype) != (None, None, None) for p in policies)
        return changes or any(map(_in_half, self._groups))

    @contextmanager
    def gathering_in_full(self) -> Generator[None]:
        """Gather parameters, and reduce their gradients, in their own dtype: set each `MixedPrecisionPolicy` aside.

        A unit with frozen parameters in half precision is gathered in float32.

        Call it while the units are resharded.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy

        plain = MixedPrecisionPolicy()
        upcast = MixedPrecisionPolicy(param_dtype=torch.float32, cast_forward_inputs=False)
        with ExitStack() as gathering:
            for state in self._states:
                replace(gathering, state, _mp_policy=plain)
            for group in self._groups:
                gathering.callback(group._init_mp_dtypes)
                policy = upcast if _in_half(group) else plain
                replace(gathering, group, mp_policy=policy)  # up to torch 2.14
                for param in group.fsdp_params:
                    replace(gathering, param, mp_policy=policy, all_gather_outputs=[], _unsharded_param=_ABSENT)
                group._init_mp_dtypes()
            gathering.callback(self.settle)
            yield


def _in_half(group: Any) -> bool:
    return any(param.sharded_param.dtype in (torch.float16, torch.bfloat16) for param in group.fsdp_params)


def units_of(model: nn.Module) -> Fsdp1 | Fsdp2:
    """Return the units of a strategy's model. Remove when FSDP1 is removed from torch."""
    return Fsdp1(model) if any(map(_sharding.is_wrapper, model.modules())) else Fsdp2(model)


def shards_of_gathered(module: nn.Module) -> dict[int, Tensor]:
    """Return the shards of the parameters that FSDP2 has gathered, by the `id` of the gathered ones.

    Remove with `Fsdp2`.
    """
    params = Fsdp2(module)._params
    return {id(p._unsharded_param): p.sharded_param for p in params if hasattr(p, "_unsharded_param")}


def shard_of(tensor: Tensor) -> str:
    """Describe which part of a sharded tensor this rank has; an empty text for a plain tensor."""
    if not _sharding.is_sharded(tensor):
        return ""
    mesh: Any = tensor.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
    placements: Any = tensor.placements  # pyright: ignore[reportAttributeAccessIssue]
    where = mesh.get_coordinate() or [0] * mesh.ndim
    names = mesh.mesh_dim_names or [str(dim) for dim in range(mesh.ndim)]
    parts = [
        f"shard {where[dim]} of {mesh.size(dim)} in mesh dimension `{names[dim]}`"
        for dim, placement in enumerate(placements)
        if _splits(placement) and mesh.size(dim) > 1
    ]
    return ", ".join(parts)


def counts_here(tensor: Tensor, model: nn.Module) -> bool:
    """Return whether this rank is the one that counts a parameter, so that each value is counted once over all ranks.

    A shard counts on each rank, its replicas only on the first. A parameter that is sharded on a part of the mesh has
    replicas on the parts beside it. A plain parameter of a sharded `model`, which each rank has whole, counts on the
    first one.
    """
    if not _sharding.is_sharded(tensor):
        units = units_of(model)
        return torch.distributed.get_rank() < (units.num_shards if isinstance(units, Fsdp1) else 1)
    mesh: Any = tensor.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
    where = mesh.get_coordinate() or [0] * mesh.ndim
    placements: Any = tensor.placements  # pyright: ignore[reportAttributeAccessIssue]
    is_first_part = bool((mesh.mesh == 0).any())
    return is_first_part and all(_splits(one) or i == 0 for one, i in zip(placements, where, strict=True))


def _splits(placement: Any) -> bool:
    # FSDP2 above tensor parallelism has a placement that is no `Shard` in newer versions of torch
    return not placement.is_replicate() and not placement.is_partial()
