"""A second run of a module that FSDP2 shards: the private state that it must put back."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import final

from lightning_amp._compat import _sharding
from lightning_amp.shadow._fsdp1 import ABSENT, Fsdp1, Replaced


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
        self._aside = Replaced()
        self._gathered: list[Any] = []
        self._whole: list[tuple[Any, nn.Parameter, bool, bool]] = []

    def reshard(self) -> None:
        """Register the shards as the parameters of their modules, and free what was gathered."""
        for group in self._groups:
            group._to_sharded()

    def set_aside(self) -> None:
        """Reshard, and keep the state of the units until :meth:`put_back`.

        Gathered weights are kept, too. FSDP2 gathers a weight only once until a backward, so the real run may use it
        for long. Changes to its shards, or to their `requires_grad`, have no effect until then.
        """
        self._gathered = [group for group in self._groups if group.is_unsharded]
        for param in (param for group in self._gathered for param in group.fsdp_params):
            whole, is_converted = param._unsharded_param, bool(param._unsharded_inner_tensors)
            self._whole.append((param, whole, whole.requires_grad, is_converted))
            self._aside.replace(param, _unsharded_param=ABSENT, all_gather_outputs=[], _unsharded_inner_tensors=[])
        self.reshard()
        for comm in {id(group.comm_ctx): group.comm_ctx for group in self._groups}.values():
            self._aside.replace_existing(comm, post_forward_order=[])
        for roots in {id(state._state_ctx): state._state_ctx for state in self._states}.values():
            self._aside.replace_existing(roots, is_last_backward=True)
        for group in self._groups:
            self._aside.replace_existing(group, _post_forward_indices=[], reduce_grads=True, all_reduce_grads=True)
            self._aside.replace_existing(group, reshard_after_backward=True, _partial_reduce_output=None)
        for param in self._params:
            self._aside.replace_existing(param, unsharded_accumulated_grad=None)
            if hasattr(param, "_unsharded_param"):
                self._aside.replace_existing(param._unsharded_param, grad=None)

    def put_back(self) -> None:
        """Undo :meth:`set_aside`, also after a forward or a backward that raised an exception."""
        self.settle()
        self._aside.restore()
        for group in self._gathered:  # a hook that reads a parameter after the forward expects it gathered
            group._to_unsharded()
        for _, whole, is_trained, _ in self._whole:
            whole.requires_grad_(is_trained)
        self._gathered, self._whole = [], []

    def parts_in_use(self) -> Generator[tuple[Tensor, Tensor]]:
        """Yield sharded parameters whose weights are set aside, each with this rank's part of these weights.

        A part has the values of the shard, and others where the shard has changed. This does not wait for the device.
        Values that a tensor subclass has converted are left out.
        """
        for param, whole, _, is_converted in self._whole:
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
        comms = {id(group.comm_ctx): (group.comm_ctx, group.device_handle) for group in self._groups}
        for comm, device in comms.values():
            reduced = getattr(comm, "reduce_scatter_states", ())
            for pending in (getattr(comm, "all_gather_state", None), *reduced):
                _wait_for(device, getattr(pending, "event", None))
            for event in getattr(comm, "_last_post_reduce_events", {}).values():
                _wait_for(device, event)
            for held in (reduced, getattr(comm, "_last_post_reduce_events", ()), comm.post_forward_order):
                if held:
                    held.clear()
            comm.all_gather_state = None
        for group in self._groups:
            result, group._all_gather_result = group._all_gather_result, None
            work = getattr(result, "all_gather_work", None)
            if work is not None and hasattr(work, "wait"):
                work.wait()
            for event in (getattr(result, "all_gather_event", None), group._post_reduce_event):
                _wait_for(group.device_handle, event)
            group._post_reduce_event = None
            group._post_forward_indices.clear()
            group._training_state = type(group._training_state).IDLE
            group._to_sharded()
        for param in self._params:
            param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None

    @property
    def casts(self) -> bool:
        """Return whether gathered parameters are in half precision, or a `MixedPrecisionPolicy` changes dtypes."""
        policies = [owner.mp_policy for owner in self._groups] + [state._mp_policy for state in self._states]
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
        gathering = Replaced()
        try:
            for state in self._states:
                gathering.replace(state, _mp_policy=plain)
            for group in self._groups:
                gathering.replace(group, mp_policy=upcast if _in_half(group) else plain)
                for param in group.fsdp_params:
                    gathering.replace(param, all_gather_outputs=[], _unsharded_param=ABSENT)
                group._init_mp_dtypes()
            yield
        finally:
            self.settle()
            gathering.restore()
            for group in self._groups:
                group._init_mp_dtypes()


def _wait_for(device: Any, event: Any) -> None:
    """Let the current stream wait for an event; on the CPU there is nothing to wait for. Remove with `Fsdp2`."""
    if event is not None and hasattr(stream := device.current_stream(), "wait_event"):
        stream.wait_event(event)


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
