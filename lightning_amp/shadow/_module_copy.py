"""Copy modules and batches, so that user code can run twice without an effect on the originals.

`copy.deepcopy` does the work. Its memo has the objects that a copy shares, and the modules. These are copied attribute
by attribute, because `copy.deepcopy` of a real LightningModule fails on the first open file or generator. An attribute
that cannot be copied becomes an object that raises when it is used.
"""

from __future__ import annotations

import copy
import functools
import io
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler
from typing_extensions import final

from lightning_amp._compat import _modules, _sharding
from lightning_amp._compat._names import Callback, LightningDataModule, LightningModule
from lightning_amp.numerics import HALF_DTYPES
from lightning_amp.shadow._failures import in_one_line, is_out_of_memory
from lightning_amp.shadow._fsdp import shared_internals
from lightning_amp.shadow._views import NOTHING, View

# Objects that a step only reads, and whose copies would be large, useless or impossible.
_SHARED: tuple[type, ...] = (
    *(type(threading.Lock()), type(threading.RLock()), types.ModuleType),
    *(Callback, DataLoader, Dataset, LightningDataModule, Sampler),
    *(torch.Event, torch.Stream, torch.cuda.Event, torch.cuda.Stream, torch.mps.Event),
    *((torch.distributed.ProcessGroup, DeviceMesh) if torch.distributed.is_available() else ()),
)
_ATOMS: tuple[type, ...] = (bool, int, float, str, type(None), types.FunctionType)
_DEPTH, _DEPTH_OF_BATCHES = 3, 10
"""How deep the items and attributes of a module's attribute, or of a batch, are looked into."""
_EMPTY = object()

Attributes = dict[nn.Module, dict[str, Any]]
"""The attributes of each module, by name."""


@final
class NotCopiedError(RuntimeError):
    """A copy of a module used an object that could not be copied."""


@final
class NotCopied:
    """Stands in a copy for an object that cannot be copied, and raises when it is used."""

    def __init__(self, path: str, reason: str) -> None:
        vars(self)["message"] = f"`{path}` cannot be copied ({reason}), so a copy of the module must not use it"

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise NotCopiedError(vars(self)["message"])

    __getattr__ = __setattr__ = __call__ = __iter__ = __next__ = __len__ = __bool__ = _refuse
    __getitem__ = __setitem__ = __contains__ = __enter__ = __exit__ = _refuse

    def __deepcopy__(self, memo: dict[int, Any]) -> NotCopied:
        return self


def copy_module(module: LightningModule, memo: dict[int, Any], *, upcast: bool = False) -> LightningModule:
    """Copy a module.

    Parameters (without gradients and hooks), buffers, metric states, lists and other attributes are copied deeply.
    Parts that are compiled in the module are not compiled in the copy. Bound methods and closures that refer to the
    module (a forward hook that appends to `self.features`) refer to the copy. Data sets, loaders, callbacks and hooks
    that cannot be copied are shared. Other objects that cannot be copied raise when the copy uses them, and so do
    methods of optimizers and LR schedulers. Steps of LR schedulers do nothing.

    Args:
        module: The module; unchanged.
        memo: The memo of `copy.deepcopy`: by `id`, the object that replaces another, for example the trainer.
        upcast: Turn half-precision parameters and buffers into float32, for a run in fp32.
    """
    # The copy is made outside of inference mode, so that its buffers are ordinary tensors. A step may turn inference
    # mode off to take gradients.
    with torch.inference_mode(False), torch.no_grad():
        copier = _Copier(memo, upcast)
        copier.find(module, type(module).__name__)
        copier.copy_modules()
        return copy.deepcopy(module, memo)  # which is in the memo, unless its class copies itself


def copy_attributes(module: nn.Module, model: nn.Module, memo: dict[int, Any], *, in_fp32: bool = False) -> Attributes:
    """Copy the attributes of all modules inside of a module, for an exchange: modules and parameters stay the same.

    Args:
        module: The module; unchanged.
        model: The module, or the unit of FSDP1 around it.
        memo: As for :func:`copy_module`.
        in_fp32: Turn half-precision buffers into float32.
    """
    shared = [*module.modules(), *module.parameters(), *shared_internals(model)]
    memo.update({id(one): one for one in shared})
    with torch.inference_mode(False), torch.no_grad():
        copier = _Copier(memo, in_fp32)
        copier.find(module, type(module).__name__)
        own = [one for one in module.modules() if not _sharding.is_wrapper(one)]
        copier.copy_modules()
        copies = {one: {**copier.attributes(one, vars(one)), **_modules.UNCOMPILED} for one in own}
        for attributes in copies.values():
            rebind_functions(attributes, memo)
    return copies


def copy_batch(batch: Any, *, upcast: bool = False) -> Any:
    """Copy a batch, so that edits of the copy do not reach it. This takes the memory of one batch.

    Of a view, only its own values are copied, not its whole storage.

    Args:
        batch: The batch; unchanged.
        upcast: Turn half-precision tensors into float32, for a step in fp32. Outside of autocast, an operation of a
            float32 weight and a bfloat16 input raises an error.
    """
    copier = _Copier({}, upcast)
    copier.look_into(batch, "batch", -_DEPTH_OF_BATCHES)
    result = copier.copied(batch, "batch")
    return result() if type(result) is NotCopied else result


@final
class _Copier:
    """One copy in progress."""

    def __init__(self, memo: dict[int, Any], upcast: bool) -> None:
        self._memo, self._upcast = memo, upcast
        self._paths: dict[nn.Module, str] = {}
        self._seen: set[int] = set()  # containers and other objects

    def find(self, module: nn.Module, path: str) -> None:
        """Find all modules that a module refers to, and enter its tensors and what the copy shares into the memo."""
        if module in self._paths:
            return
        self._paths[module] = path
        for parameter in module.parameters(recurse=isinstance(module, torch.jit.ScriptModule)):
            self._enter(parameter)
        for buffer in module.buffers(recurse=False) if self._upcast else ():
            if buffer.dtype in HALF_DTYPES:
                self._enter(buffer)
        if not isinstance(module, torch.jit.ScriptModule):
            for name, child in module.named_children():
                self.find(child, f"{path}.{name}")
            for name, value in vars(module).items():
                self.look_into(value, f"{path}.{name}")

    def _enter(self, tensor: Tensor) -> None:
        """Enter a copy of a tensor into the memo: of a view only its own values, and without its graph."""
        if id(tensor) in self._memo:
            return
        values = tensor.detach()
        own = values.float() if self._upcast and tensor.dtype in HALF_DTYPES else values.clone()
        if isinstance(tensor, nn.Parameter):
            own = nn.Parameter(own, tensor.requires_grad)
            vars(own).update(vars(tensor))  # attributes such as `no_weight_decay`
        self._memo[id(tensor)] = own.requires_grad_(tensor.requires_grad and tensor.is_leaf)

    def look_into(self, value: Any, path: str, depth: int = 0) -> None:
        """Do the same for a value, its items and its attributes."""
        cls = type(value)
        if cls in _ATOMS or id(value) in self._memo or id(value) in self._seen:
            return
        if cls in weakref.ProxyTypes or isinstance(value, _SHARED):
            self._memo[id(value)] = value
        elif isinstance(value, (LRScheduler, torch.optim.Optimizer)):
            self._memo[id(value)] = read_only(value, path)
        elif isinstance(value, nn.Module):  # users keep a large frozen teacher in a list, out of `parameters()`
            self.find(value, path)
        elif isinstance(value, torch.jit.ScriptFunction):
            self._memo[id(value)] = _script_copy(value)
        elif isinstance(value, Tensor):
            self._enter(value)
        elif depth < _DEPTH and not isinstance(value, type):
            self._seen.add(id(value))
            items = value
            if not isinstance(value, (list, tuple, set, deque)):
                items = (value if isinstance(value, Mapping) else getattr(value, "__dict__", {})).values()
            for item in list(items):
                self.look_into(item, path, depth + 1)

    def copied(self, value: Any, path: str) -> Any:
        """Copy a value deeply. A :class:`NotCopied` stands for a value that cannot be copied."""
        known = len(self._memo)
        try:
            return copy.deepcopy(value, self._memo)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            for key in list(self._memo)[known:]:  # half-filled objects, which a second reference would use
                del self._memo[key]
            own = "if sharing it is harmless, give its class a `__deepcopy__` method that returns `self`"
            return NotCopied(path, f"{in_one_line(error)}; {own}")  # not in the memo: functions keep the original

    def copy_modules(self) -> None:
        """Copy the modules that were found, and enter the copies into the memo, children first."""
        memo, copies = self._memo, dict[nn.Module, Any]()
        for module in reversed([one for one in self._paths if id(one) not in memo]):
            cls = type(module)
            if (inner := _modules.uncompiled_module(module)) is not None and id(inner) in memo:
                memo[id(module)] = memo[id(inner)]
            elif isinstance(module, torch.jit.ScriptModule):
                memo[id(module)] = _script_copy(module)
            elif not _copies_itself(cls):
                copies[module] = memo[id(module)] = cls.__new__(cls)
        for module, own in copies.items():
            own.__setstate__(self.attributes(module, _uncompiled_state(_state_of(module))))
            if isinstance(own, LightningModule):
                own._metric_attributes = None  # a cache by ids of the original's metrics; remove when copies lack it
        for own in copies.values():
            rebind_functions(vars(own), memo)

    def attributes(self, module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """Copy the attributes of one module. Hooks that cannot be copied are shared."""
        copies: dict[str, Any] = {}
        for name, item in state.items():
            path = f"{self._paths[module]}.{name}"
            if name.endswith("_hooks") and isinstance(item, dict):
                copies[name] = type(item)()
                for key, hook in item.items():
                    own = self.copied(hook, path)
                    copies[name][key] = hook if type(own) is NotCopied else own
            else:
                copies[name] = self.copied(item, path)
        return copies


def read_only(value: Any, path: str, **attributes: Any) -> View:
    """Return a view of an optimizer or LR scheduler, whose settings can be read.

    Methods raise, except those among the attributes. The step of a scheduler does nothing: no gradient depends on it.
    """
    refused: Any = NotCopied(path, "its methods move the real weights or learning rates")
    if hasattr(value, "param_groups"):
        own: dict[str, Any] = {"param_groups": [{**group, "params": refused} for group in value.param_groups]}
    else:
        own = {"step": NOTHING, "get_last_lr": getattr(value, "get_last_lr", NOTHING)}
        if "optimizer" not in attributes and hasattr(value, "optimizer"):
            own["optimizer"] = read_only(value.optimizer, path)
    return View(value, calls=refused, **{**own, **attributes})


def _copies_itself(cls: Any) -> bool:
    is_plain = cls.__reduce_ex__ is object.__reduce_ex__ and cls.__reduce__ is object.__reduce__
    return hasattr(cls, "__deepcopy__") or not is_plain


def _script_copy(script: Any) -> Any:
    """Copy a script with its code, because a run of shared code would count towards TorchScript's optimization."""
    file = io.BytesIO()
    torch.jit.save(script, file)
    file.seek(0)
    result = torch.jit.load(file)
    if isinstance(script, nn.Module):
        for own, real in zip(result.parameters(), script.parameters(), strict=True):
            own.requires_grad_(real.requires_grad)
    return result


def _state_of(module: nn.Module) -> dict[str, Any]:
    # `object.__getstate__` exists from Python 3.11 on
    get_state: Callable[[], dict[str, Any]] | None = getattr(module, "__getstate__", None)
    return vars(module) if get_state is None else get_state()


def rebind_functions(attributes: dict[str, Any], memo: dict[int, Any]) -> None:
    """Make functions among the attributes of a copy, above all its hooks, close over copies.

    `copy.deepcopy` does not copy functions, so a hook `lambda *_: self.seen.append(1)` would write to the original.

    Args:
        attributes: The attributes, by name; changed in place.
        memo: The memo of `copy.deepcopy`: by `id`, the object that replaces another in the copy.
    """
    for values in (attributes, *(item for item in attributes.values() if isinstance(item, dict))):
        for key, item in list(values.items()):
            if isinstance(item, (types.FunctionType, functools.partial)):
                values[key] = _rebound(item, memo, set())


def _rebound(item: Any, memo: dict[int, Any], outer: set[int]) -> Any:
    if id(item) in memo:
        return memo[id(item)]
    if isinstance(item, types.MethodType):  # `torch.compile(self.encode)` closes over a bound method
        owner = _rebound(item.__self__, memo, outer)
        return item if owner is item.__self__ else types.MethodType(item.__func__, owner)
    if isinstance(item, functools.partial):
        args, keywords = ([_rebound(one, memo, outer) for one in each] for each in (item.args, item.keywords.values()))
        return functools.partial(
            _rebound(item.func, memo, outer), *args, **dict(zip(item.keywords, keywords, strict=True))
        )
    if not isinstance(item, types.FunctionType) or id(item) in outer:  # a function may close over itself
        return item
    contents = [_contents(cell) for cell in item.__closure__ or ()]
    own = [_rebound(content, memo, outer | {id(item)}) for content in contents]
    if all(new is old for new, old in zip(own, contents, strict=True)):
        return item
    cells = tuple(
        cell if new is old else types.CellType(new)
        for cell, new, old in zip(item.__closure__ or (), own, contents, strict=True)
    )
    result = types.FunctionType(item.__code__, item.__globals__, item.__name__, item.__defaults__, cells)
    result.__kwdefaults__ = item.__kwdefaults__
    vars(result).update(vars(item))
    return result


def _contents(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the variable is assigned later, or never
        return _EMPTY


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
