"""`Spec`: one training, before it runs. It travels to another process by value."""

from __future__ import annotations

import importlib.machinery
import inspect
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from typing_extensions import final

from lightning_amp._arguments import require
from lightning_amp._compat import _names
from lightning_amp._compat._names import FSDPStrategy, LightningDataModule, LightningModule, Precision
from lightning_amp._text import literal
from lightning_amp.casting import parse_precision
from lightning_amp.compare._run import CONTROL, Margin
from lightning_amp.precision import AmpPrecision, FSDPAmpPrecision
from lightning_amp.tracing import fp32_switches


@final
@dataclass(frozen=True)
class Spec:
    """One arm, and with a seed, factories and a folder one training of it.

    Attributes:
        label: The label of the arm.
        source: Its plugin, or the arguments from which another process makes the plugin.
        seed: The seed.
        moved: Whether the initial weights are moved in their last bit, as for the control.
        make_module: Makes the LightningModule.
        make_data: Makes the LightningDataModule.
        trainer_kwargs: The arguments of the Trainer.
        folder: Where the training writes its files.
        margins: Metrics that the first validation has to log.

    """

    label: str
    source: Any
    seed: int = 0
    moved: bool = False
    make_module: Callable[[], LightningModule] | None = None
    make_data: Callable[[], LightningDataModule] | None = None
    trainer_kwargs: Mapping[str, Any] = field(default_factory=dict)
    folder: str = ""
    margins: Mapping[str, Margin] = field(default_factory=dict)

    @property
    def description(self) -> str:
        """Return the line of code that makes the plugin."""
        if not isinstance(self.source, Mapping):
            return literal(self.source)
        arguments = [literal(v) if name == "precision" else f"{name}={literal(v)}" for name, v in self.source.items()]
        return f"AmpPrecision({', '.join(arguments)})"

    def plugin(self, strategy: Any = "auto") -> Any:
        """Return the plugin; for FSDP, make the plugin that FSDP accepts from the same arguments."""
        if not isinstance(self.source, Mapping):
            return self.source
        sharded = isinstance(strategy, FSDPStrategy) or (isinstance(strategy, str) and strategy.startswith("fsdp"))
        return (FSDPAmpPrecision if sharded else AmpPrecision)(**self.source)


def parse_arms(precisions: Any, strategy: Any = "auto") -> dict[str, Spec]:
    """Return the arms by label, in their order.

    Raises:
        ValueError: If there is no arm, if two have the same label, or if one is not a precision, a plugin or arguments
            of `AmpPrecision`.

    """
    rule = "a sequence of precisions, or a mapping from labels to them"
    kinds = (str, bytes, set, frozenset, Precision)
    fine = isinstance(precisions, Iterable) and not isinstance(precisions, kinds)
    require(fine, "precisions", rule, precisions, "Write a list: `['fp32', 'bf16']`.")
    is_mapping = isinstance(precisions, Mapping)
    labelled = precisions.items() if is_mapping else [(_label(value), value) for value in precisions]
    require(bool(labelled), "precisions", f"{rule}, at least one", precisions)
    arms: dict[str, Spec] = {}
    for label, value in labelled:
        fine = isinstance(label, str) and label.strip() not in ("", CONTROL)
        require(fine, "precisions", f"labelled by texts other than {CONTROL!r}", label)
        if label in arms:
            advice = "a mapping gives each arm a label: `{'bf16, head in fp32': dict(precision='bf16', ...)}`"
            raise ValueError(f"`precisions` must have different labels, got {label!r} twice; {advice}.")
        arms[label] = make_arm(f"precisions[{label!r}]", label, value, strategy)
        check_travels(f"precisions[{label!r}]", arms[label], "Pass the arguments of `AmpPrecision` as a dict.")
    return arms


def _label(value: object) -> str:
    simple = isinstance(value, (str, int, torch.dtype)) and not isinstance(value, bool)
    advice = "Give a plugin or arguments a label: `precisions={'fp32': 'fp32', 'mine': plugin}`."
    require(simple, "precisions", "names if it is a sequence", value, advice)
    return str(value)


def make_arm(name: str, label: str, value: Any, strategy: Any = "auto") -> Spec:
    """Return an arm whose plugin was made once, so that a mistake raises an error before anything runs.

    Raises:
        ValueError: If the argument `name` is not a precision, a plugin or arguments of `AmpPrecision`.

    """
    if isinstance(value, type) and issubclass(value, Precision):
        raise ValueError(f"`{name}` must be a plugin, got the class {value.__name__}. Make one of it.")
    source = dict(value) if isinstance(value, Mapping) else value
    spec = Spec(label, source if isinstance(source, (dict, Precision)) else {"precision": parse_precision(value, name)})
    try:
        spec.plugin(strategy)
    except TypeError as error:
        text = str(error).replace("__init__() ", "").replace("AmpPrecision.", "").partition(". Did you mean")[0]
        legal = ", ".join(f"`{name}`" for name in inspect.signature(AmpPrecision).parameters)
        raise ValueError(f"`{name}`: {text}. The arguments of `AmpPrecision` are {legal}.") from error
    except ValueError as error:
        raise ValueError(f"`{name}`: {error}") from error
    return spec


# -- by value ----------------------------------------------------------------------------------------------------------


def check_factory(argument: str, factory: Any, kind: type, *, travels: bool = True) -> None:
    """Refuse what is no factory, or if it `travels`, a factory that another process cannot call.

    Raises:
        ValueError: If the factory is refused. The message explains how to write it instead.

    """
    example = f"a {kind.__name__}, or a function without arguments that returns one"
    name = getattr(factory, "__name__", type(factory).__name__)
    if isinstance(factory, (LightningModule, LightningDataModule)):
        raise ValueError(
            f"`{argument}` must be {example}, got an object of {name}. Pass the class itself (`{name}`), or a function"
            f" that makes one{': each arm needs a new one, made after its seed was set' if travels else ''}."
        )
    if not callable(factory):
        raise ValueError(f"`{argument}` must be {example}, got {literal(factory)}.")
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise ValueError(
            f"`{argument}` must be callable without arguments; {name!r}: {error}. Write a function that passes them:"
            f" `lambda: {name}(...)`."
        ) from error
    if travels:
        check_travels(argument, factory, "Make what it holds inside of it.")


def check_travels(argument: str, value: Any, advice: str) -> None:
    """Refuse a value that cannot be pickled.

    Raises:
        ValueError: If it cannot. The message ends with `advice`.

    """
    try:
        dumps(value)
    except ModuleNotFoundError:
        raise
    except Exception as error:
        text = f"`{argument}` cannot be sent to another process: {type(error).__name__}: {error}."
        raise ValueError(f"{text} {advice}") from error


def dumps(value: Any, *factories: Any) -> bytes:
    """Pickle by value what another process cannot import: a script, a notebook, lambdas, a file loaded by hand.

    Raises:
        ModuleNotFoundError: Without cloudpickle.

    """
    try:
        import cloudpickle
    except ModuleNotFoundError as error:
        text = "Runs in other processes need cloudpickle, which is not installed. Run `pip install cloudpickle scipy`."
        raise ModuleNotFoundError(text) from error
    with ExitStack() as stack:
        for name in dict.fromkeys(map(_module_name, factories or [value])):
            module = sys.modules.get(name)
            if module is not None and name != "__main__" and not _can_be_imported(module):
                cloudpickle.register_pickle_by_value(module)
                stack.callback(cloudpickle.unregister_pickle_by_value, module)
        return cloudpickle.dumps(value)


def pack(spec: Spec) -> dict[str, Any]:
    """Return a training as plain data and bytes, with the settings of this process."""
    return {
        "label": spec.label,
        "seed": spec.seed,
        "folder": spec.folder,
        "spec": dumps(spec, spec.make_module, spec.make_data),
        "path": [entry or os.getcwd() for entry in sys.path],
        "settings": process_settings(),
        "versions": versions(),
        "host": platform.node(),
        "kind": _names.kind(),
    }


def versions() -> dict[str, str]:
    """Return the versions on which values and speeds depend."""
    packages = {name: metadata.version(name).partition("+")[0] for name in ("torch", _names.kind())}
    return {**packages, "lightning_amp": sys.modules["lightning_amp"].__version__}


def process_settings() -> dict[str, Any]:
    """Return the settings of this process that change the speed or the bits of torch: threads, TF32 and others.

    A script may set them at its top, so its runs need the same settings in other processes. The states of random
    generators are not included.
    """
    return {
        "num_threads": torch.get_num_threads(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "fp32_precision": [switch.fp32_precision for switch in fp32_switches()],
    }


def apply_settings(settings: Mapping[str, Any]) -> None:
    """Set the settings of another process."""
    if torch.get_num_threads() != settings["num_threads"]:
        torch.set_num_threads(settings["num_threads"])
    torch.set_default_dtype(getattr(torch, settings["default_dtype"]))
    torch.use_deterministic_algorithms(settings["deterministic"], warn_only=settings["deterministic_warn_only"])
    torch.backends.cudnn.benchmark = settings["cudnn_benchmark"]
    torch.backends.cudnn.deterministic = settings["cudnn_deterministic"]
    for switch, wanted in zip(fp32_switches(), settings["fp32_precision"], strict=True):
        if switch.fp32_precision != wanted:
            switch.fp32_precision = wanted


def _module_name(factory: Any) -> str:
    if isinstance(factory, partial):
        return _module_name(factory.func)
    return getattr(factory, "__module__", None) or type(factory).__module__


def _can_be_imported(module: ModuleType) -> bool:
    """Return whether a process with the same `sys.path` imports this module, and no other one, by its name."""
    file, (parent, _, _) = getattr(module, "__file__", None), module.__name__.rpartition(".")
    try:
        paths = list(sys.modules[parent].__path__) if parent else None
        spec = importlib.machinery.PathFinder.find_spec(module.__name__, paths)
    except (KeyError, AttributeError, ImportError, ValueError):
        return False
    return file is None or (spec is not None and spec.origin is not None and Path(spec.origin).samefile(file))
