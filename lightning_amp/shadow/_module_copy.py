"""Copy modules and batches, so that user code can run twice without an effect on the originals.

`copy.deepcopy` of a real LightningModule fails on the first lock, open file or generator, and it copies the trainer and
the data sets. The copies here are made piece by piece. An object that cannot be copied is replaced by one that raises
when it is used, except in hooks: see `_not_copied.py`.
"""

from __future__ import annotations

import copy
import functools
import io
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler
from typing_extensions import final

from lightning_amp._compat import _modules, _sharding
from lightning_amp.numerics import HALF_DTYPES
from lightning_amp.shadow._failures import is_out_of_memory
from lightning_amp.shadow._fsdp2 import shared_internals
from lightning_amp.shadow._not_copied import NotCopied, Permission
from lightning_amp.shadow._rebinding import MAPPINGS, rebind_closures

_LOCKS: tuple[type, ...] = (type(threading.Lock()), type(threading.RLock()))

# Classes of objects that a step only reads, and whose copies would be large or useless.
_SHARED: tuple[type, ...] = (
    *_LOCKS,
    Callback,
    DataLoader,
    Dataset,
    LightningDataModule,
    LRScheduler,
    Sampler,
    torch.optim.Optimizer,
    torch.Event,
    torch.Stream,
    torch.cuda.Event,
    torch.cuda.Stream,
    torch.mps.Event,
)

Attributes = dict[nn.Module, dict[str, Any]]
"""The attributes of each module, by name."""

_ATOMS: tuple[type, ...] = (bool, int, float, str, type(None))
_CONTAINERS: tuple[type, ...] = (list, tuple, set, deque)


def copy_module(module: LightningModule, memo: dict[int, Any], *, upcast: bool = False) -> LightningModule:
    """Copy a module.

    Parameters (without gradients and hooks), buffers, metric states, lists and other attributes are copied deeply.
    Parts that are compiled in the module are not compiled in the copy. Bound methods and closures that refer to the
    module (a forward hook that appends to `self.features`) refer to the copy. Data sets, loaders, optimizers and
    callbacks that the module holds are shared. Objects that cannot be copied are shared, but only hooks of the copy may
    use them.

    Args:
        module: The module; unchanged.
        memo: The memo of `copy.deepcopy`: by `id`, the object that replaces another, for example the trainer.
        upcast: Turn half-precision parameters and buffers into float32, for a run in fp32.
    """
    copier = _Copier(memo, upcast)
    # The copy is made outside of inference mode, so that its buffers are ordinary tensors. A step may turn inference
    # mode off to take gradients.
    with torch.inference_mode(False), torch.no_grad():
        copier.share(module)
        result = copier.module(module, type(module).__name__)
        copier.bind([vars(copied) for copied in copier.modules])
    _forget_metric_names(result)
    return cast(LightningModule, result)


def copy_attributes(module: nn.Module, model: nn.Module, memo: dict[int, Any], *, in_fp32: bool = False) -> Attributes:
    """Copy the attributes of all modules inside of a module, for an exchange: modules and parameters stay the same.

    Args:
        module: The module; unchanged.
        model: The module, or the unit of FSDP1 around it.
        memo: As for :func:`copy_module`.
        in_fp32: Turn half-precision buffers into float32.
    """
    copier = _Copier(memo, in_fp32)
    named = [(name, one) for name, one in module.named_modules() if not _sharding.is_wrapper(one)]
    shared = [*module.modules(), *module.parameters(), *shared_internals(model)]
    memo.update({id(one): one for one in shared})
    with torch.inference_mode(False), torch.no_grad():
        copier.share(module)
        own = {one: copier.attributes(one, _modules.plain_name(name) or type(module).__name__) for name, one in named}
        copier.bind(list(own.values()))
    return own


def copy_batch(batch: Any, *, upcast: bool = False) -> Any:
    """Copy a batch, so that edits of the copy do not reach it. This takes the memory of one batch.

    Args:
        batch: The batch; unchanged.
        upcast: Turn half-precision tensors into float32, for a step in fp32. Outside of autocast, an operation of a
            float32 weight and a bfloat16 input raises an error.
    """
    result = _Copier({}).batch(batch)
    return _upcast(result, {}) if upcast else result


def _upcast(value: Any, memo: dict[int, tuple[Any, Any]]) -> Any:
    """Turn half-precision tensors into float32; lists, dictionaries and objects are changed in place."""
    if id(value) in memo:
        return memo[id(value)][1]
    result = value
    memo[id(value)] = (value, value)  # the first entry keeps the id from being reused
    if isinstance(value, Tensor):
        if value.dtype in HALF_DTYPES:
            result = value.detach().float().requires_grad_(value.requires_grad)
    elif isinstance(value, tuple):
        items = [_upcast(item, memo) for item in value]
        if any(new is not old for new, old in zip(items, value, strict=True)):
            result = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    elif isinstance(value, list):
        value[:] = [_upcast(item, memo) for item in value]
    elif isinstance(value, dict):
        for key, item in list(value.items()):  # not by `update`, because Hugging Face classes refuse it
            value[key] = _upcast(item, memo)
    elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module, NotCopied)):
        vars(value).update({name: _upcast(item, memo) for name, item in vars(value).items()})
    memo[id(value)] = (value, result)
    return result


@final
class _Copier:
    """One deep copy in progress."""

    def __init__(self, memo: dict[int, Any], upcast: bool = False) -> None:
        self.memo, self.upcast = memo, upcast
        self.permission = Permission()
        self.refused = False
        self.modules: list[nn.Module] = []
        self.searched: set[int] = set()
        self.shared = (*_SHARED, *_process_group_types())

    def share(self, module: nn.Module) -> None:
        """Enter the parameters of the copy into the memo, and the objects that it shares with the module."""
        for parameter in module.parameters():
            if id(parameter) not in self.memo:
                upcast = self.upcast and parameter.dtype in HALF_DTYPES
                values = parameter.detach().float() if upcast else parameter.detach().clone()
                self.memo[id(parameter)] = own = nn.Parameter(values, parameter.requires_grad)
                vars(own).update(vars(parameter))  # attributes such as `no_weight_decay`
        for buffer in module.buffers() if self.upcast else ():
            if buffer.dtype in HALF_DTYPES:
                self.memo[id(buffer)] = buffer.detach().float()
        submodules = list(module.modules())
        self.searched.update(id(submodule) for submodule in submodules)
        for submodule in submodules:
            for value in vars(submodule).values():
                self._share(value, depth=0)

    def _share(self, value: Any, depth: int) -> None:
        cls = type(value)
        if cls in _ATOMS or cls is nn.Parameter or cls in weakref.ProxyTypes or id(value) in self.searched:
            return
        if cls in MAPPINGS or cls in _CONTAINERS:
            if depth < 3:
                for item in value.values() if cls in MAPPINGS else value:
                    self._share(item, depth + 1)
        elif isinstance(value, nn.Module):
            # Modules in a plain list: users keep a large frozen teacher out of `parameters()` in this way.
            self.share(value)
        elif isinstance(value, torch.jit.ScriptFunction):
            self.memo[id(value)] = _script_copy(value)
        elif isinstance(value, self.shared):
            self.memo.setdefault(id(value), value)

    def module(self, module: nn.Module, path: str) -> nn.Module:
        """Copy one module attribute by attribute, its children first."""
        if id(module) in self.memo:
            return self.memo[id(module)]
        if (inner := _modules.uncompiled_module(module)) is not None:
            result = self.memo[id(module)] = self.module(inner, path)
            return result
        cls = type(module)
        if isinstance(module, torch.jit.ScriptModule):
            result = self.memo[id(module)] = _script_copy(module)
            for own, real in zip(result.parameters(), module.parameters(), strict=True):
                own.requires_grad_(real.requires_grad)
            return result
        if hasattr(cls, "__deepcopy__") or _reduces(cls):
            for name, child in module.named_children():
                self.module(child, f"{path}.{name}")
            result = copy.deepcopy(module, self.memo)
        else:
            # before the children, because these may refer to the module
            result = self.memo[id(module)] = cls.__new__(cls)
            for reference in weakref.getweakrefs(module):
                if type(reference) in weakref.ProxyTypes:  # `deepcopy` would copy the target of the reference again
                    self.memo[id(reference)] = weakref.proxy(result)
            for name, child in module.named_children():
                self.module(child, f"{path}.{name}")
            state = _uncompiled_state(_state_of(module))
            result.__setstate__({name: self.value(item, f"{path}.{name}") for name, item in state.items()})
        self.modules.append(result)
        return result

    def attributes(self, module: nn.Module, path: str) -> dict[str, Any]:
        """Copy the attributes of one module, without its submodules and parameters; its copies are not compiled."""
        copies: dict[str, Any] = {}
        for name, item in vars(module).items():
            registered = name in ("_parameters", "_modules") or name.endswith("_hooks")
            copies[name] = copy.copy(item) if registered else self.value(item, f"{path}.{name}")
        return {**copies, **_modules.UNCOMPILED}

    def bind(self, modules: list[dict[str, Any]]) -> None:
        """Let hooks and functions among the attributes of copies refer to the copies."""
        rebind_closures(modules, self.memo)
        if self.refused:
            self.permission.grant_to_hooks(modules)

    def value(self, value: Any, path: str) -> Any:
        """Copy deeply; if that fails, copy piece by piece."""
        cls = type(value)
        if cls in _ATOMS:
            return value
        if cls in (dict, OrderedDict) and not value and id(value) not in self.memo:
            # A module has ten empty dictionaries for hooks, and `copy.deepcopy` of them takes three times as long.
            self.memo[id(value)] = result = cls()
            return result
        known = len(self.memo)
        try:
            return copy.deepcopy(value, self.memo)
        except Exception as error:
            if is_out_of_memory(error):
                raise
        # A failed copy leaves half-filled objects in the memo. A second reference would then reuse them.
        for key in list(self.memo)[known:]:
            del self.memo[key]
        return self.piecewise(value, path)

    def piecewise(self, value: Any, path: str) -> Any:
        """Copy the parts of an object that cannot be copied as a whole."""
        cls = type(value)
        if id(value) in self.memo:
            return self.memo[id(value)]
        if cls in weakref.ProxyTypes:
            result = value
        elif isinstance(value, Tensor):  # a tensor with an autograd graph
            result = value.detach().clone()
        elif isinstance(value, nn.Module):
            return self.module(value, path)
        elif isinstance(value, (*_LOCKS, types.ModuleType)):
            result = value
        elif cls in MAPPINGS:
            result = self.memo[id(value)] = copy.copy(value)
            for key, item in value.items():
                result[key] = self.value(item, f"{path}[{key!r}]")
        elif cls in (list, deque):
            result = self.memo[id(value)] = copy.copy(value)
            for i, item in enumerate(value):
                result[i] = self.value(item, f"{path}[{i}]")
        elif cls in (tuple, set):
            result = cls(self.value(item, f"{path}[...]") for item in value)
        elif isinstance(value, types.MethodType):
            result = types.MethodType(value.__func__, self.value(value.__self__, path))
        elif cls is functools.partial:
            keywords = {key: self.value(item, f"{path}({key}=)") for key, item in value.keywords.items()}
            args = (self.value(item, f"{path}(...)") for item in value.args)
            result = functools.partial(self.value(value.func, path), *args, **keywords)
        elif hasattr(value, "__dict__") and not _from_stdlib(cls) and not _reduces(cls):
            result = self.memo[id(value)] = object.__new__(cls)
            for name, item in _state_of(value).items():
                vars(result)[name] = self.value(item, f"{path}.{name}")
        else:
            # The replacement does not enter the memo, so that closures of hooks keep the original.
            self.refused = True
            return NotCopied(path, value, self.permission)
        self.memo[id(value)] = result
        return result

    def batch(self, value: Any) -> Any:
        """Copy containers and tensors; for a view, copy only its own values, not its whole storage."""
        if id(value) in self.memo:
            return self.memo[id(value)]
        if isinstance(value, Tensor):
            result: Any = value.detach().clone().requires_grad_(value.requires_grad)
        elif type(value) in (list, tuple):
            result = type(value)(self.batch(item) for item in value)
        elif type(value) in (dict, OrderedDict):
            result = type(value)((key, self.batch(item)) for key, item in value.items())
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            try:
                result = type(value)(*(self.batch(item) for item in value))
            except TypeError:  # a named tuple with its own constructor
                result = self.value(value, "batch")
        else:
            result = self.value(value, "batch")
        self.memo[id(value)] = result
        return result


def _script_copy(script: Any) -> Any:
    """Copy a script with its code, because a run of shared code would count towards TorchScript's optimization."""
    file = io.BytesIO()
    torch.jit.save(script, file)
    file.seek(0)
    return torch.jit.load(file)


def _state_of(value: object) -> dict[str, Any]:
    # `object.__getstate__` exists from Python 3.11 on, and does not always return a dictionary.
    get_state: Callable[[], Any] | None = getattr(value, "__getstate__", None)
    state = get_state() if get_state is not None else None
    return dict(cast(Mapping[str, Any], state)) if isinstance(state, dict) else dict(vars(value))


def _reduces(cls: type) -> bool:
    """Return whether a class defines how it is pickled."""
    return cls.__reduce_ex__ is not object.__reduce_ex__ or cls.__reduce__ is not object.__reduce__


def _from_stdlib(cls: type) -> bool:
    """Return whether a class is, or derives from, one of the standard library (thread, queue, file, ...).

    These must not be copied piece by piece: a copied queue without the thread that empties it blocks its writer.
    """
    bases = [base for base in cls.__mro__ if base is not object]
    return issubclass(cls, Iterator) or any(
        base.__module__.partition(".")[0] in sys.stdlib_module_names and base.__module__ not in ("abc", "typing")
        for base in bases
    )


def _process_group_types() -> tuple[type, ...]:
    if not torch.distributed.is_available():
        return ()
    from torch.distributed.device_mesh import DeviceMesh

    return (torch.distributed.ProcessGroup, DeviceMesh)


# Remove when Lightning drops the cache in copies.
def _forget_metric_names(module: Any) -> None:
    """Drop a copied module's cache of metric names, whose keys are the ids of the original's metrics."""
    from lightning.pytorch import LightningModule

    for child in module.modules():
        if isinstance(child, LightningModule):
            child._metric_attributes = None


def _uncompiled_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a module without the changes of `torch.compile(LightningModule)`.

    Lightning stores compiled functions, bound to the original module, as attributes that hide the methods. Remove when
    `to_uncompiled` works on attributes, rather than on the module itself.
    """
    context = state.get("_compiler_ctx")
    if not context:
        return state
    state = dict(state, _compiler_ctx=None)
    for name in ("forward", "training_step", "validation_step", "test_step", "predict_step"):
        state[name] = context[f"original_{name}"]
    return state
