"""Every name that this package takes from Lightning, and the choice of where from. No other file imports Lightning.

Lightning ships its classes twice: in `lightning`, and in `pytorch_lightning` with `lightning_fabric`. A Trainer of one
kind refuses plugins of the other. So a process has one kind, which is chosen once: by
`import lightning_amp.pytorch_lightning`, or else as `lightning` when the first name is imported from here.
"""

# pyright: reportUnusedImport=false

from __future__ import annotations

import importlib
import inspect
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal

Kind = Literal["lightning", "pytorch_lightning"]

if TYPE_CHECKING:
    from lightning.fabric.plugins.precision import Precision as FabricPrecision
    from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, callbacks, seed_everything
    from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
    from lightning.pytorch.callbacks import (
        BaseFinetuning,
        BatchSizeFinder,
        Checkpoint,
        EarlyStopping,
        LearningRateFinder,
        LearningRateMonitor,
        ModelCheckpoint,
        ModelSummary,
        ProgressBar,
        StochasticWeightAveraging,
        Timer,
    )
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
    from lightning.pytorch.core.optimizer import LightningOptimizer, do_nothing_closure
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.plugins import FSDPPrecision, MixedPrecision, Precision
    from lightning.pytorch.profilers import PyTorchProfiler
    from lightning.pytorch.strategies import (
        DDPStrategy,
        DeepSpeedStrategy,
        FSDPStrategy,
        ModelParallelStrategy,
        SingleDeviceStrategy,
        SingleDeviceXLAStrategy,
        XLAStrategy,
    )
    from lightning.pytorch.trainer import call
    from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.tuner.lr_finder import _LRCallback
    from lightning.pytorch.utilities import CombinedLoader, GradClipAlgorithmType
    from lightning.pytorch.utilities.data import extract_batch_size
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr, lightning_setattr
    from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

# The same names at run time, by the module of `lightning` that has them.
_NAMES = {
    "fabric.utilities.device_dtype_mixin": "_DeviceDtypeModuleMixin",
    "pytorch": "Callback LightningDataModule LightningModule Trainer callbacks seed_everything",
    "pytorch.accelerators": "Accelerator AcceleratorRegistry",
    "pytorch.callbacks": "BaseFinetuning BatchSizeFinder Checkpoint EarlyStopping LearningRateFinder"
    " LearningRateMonitor ModelCheckpoint ModelSummary ProgressBar StochasticWeightAveraging Timer",
    "pytorch.cli": "LightningArgumentParser LightningCLI",
    "pytorch.core.optimizer": "LightningOptimizer do_nothing_closure",
    "pytorch.loggers.logger": "DummyLogger",
    "pytorch.plugins": "FSDPPrecision MixedPrecision Precision",
    "pytorch.profilers": "PyTorchProfiler",
    "pytorch.strategies": "DDPStrategy DeepSpeedStrategy FSDPStrategy ModelParallelStrategy SingleDeviceStrategy"
    " SingleDeviceXLAStrategy XLAStrategy",
    "pytorch.trainer": "call",
    "pytorch.trainer.connectors.logger_connector.logger_connector": "_LoggerConnector",
    "pytorch.trainer.connectors.logger_connector.result": "_ResultCollection",
    "pytorch.trainer.states": "TrainerFn",
    "pytorch.tuner.lr_finder": "_LRCallback",
    "pytorch.utilities": "CombinedLoader GradClipAlgorithmType",
    "pytorch.utilities.data": "extract_batch_size",
    "pytorch.utilities.model_helpers": "is_overridden",
    "pytorch.utilities.parsing": "lightning_getattr lightning_hasattr lightning_setattr",
    "pytorch.utilities.rank_zero": "rank_zero_info rank_zero_only rank_zero_warn",
    "pytorch.utilities.signature_utils": "is_param_in_hook_signature",
}
_PLACES = {name: (module, name) for module, names in _NAMES.items() for name in names.split()}
_PLACES["FabricPrecision"] = ("fabric.plugins.precision", "Precision")

_KINDS: dict[str, Kind] = {"lightning": "lightning"}
_KINDS.update(dict.fromkeys(("pytorch_lightning", "lightning_fabric"), "pytorch_lightning"))
"""The kind of each top-level package."""

_IMPORT = {"lightning": "from lightning_amp import", "pytorch_lightning": "from lightning_amp.pytorch_lightning import"}

_chosen: Kind | None = None

if not TYPE_CHECKING:  # else a misspelt name would pass as one of these

    def __getattr__(name: str) -> Any:
        """Import a name of Lightning on first use: its command line and its tuner are rarely needed."""
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, theirs = _PLACES[name]
        path = f"lightning.{module}"
        if kind() == "pytorch_lightning":
            path = module.replace("pytorch", "pytorch_lightning").replace("fabric", "lightning_fabric")
        value = globals()[name] = getattr(importlib.import_module(path), theirs)
        return value


# Remove when Lightning ships its classes once; so with all that follows.
def kind() -> Kind:
    """Return the kind of this process, which is chosen now if it was not."""
    return _chosen or use("lightning")


# Remove with `kind`.
def use(wanted: Kind) -> Kind:
    """Choose the kind of this process, and return it.

    Raises:
        ImportError: If the process has the other kind, or if `pytorch_lightning` is missing or of another version.

    """
    global _chosen  # noqa: PLW0603
    if _chosen not in (None, wanted):
        ours, theirs = (f"`{how} ...` for `{kind}`" for kind, how in _IMPORT.items())
        raise ImportError(
            f"This process already uses `lightning_amp` with `{_chosen}`, and one process can use it with one kind of"
            f" Trainer: write {ours}, or {theirs}, in all files, before other imports of `lightning_amp`."
        )
    if _chosen is None and wanted == "pytorch_lightning":
        _require_pytorch_lightning()
    _chosen = wanted
    return wanted


def _require_pytorch_lightning() -> None:
    names = ("pytorch-lightning", "lightning")
    here, wanted = (next((d.version for d in metadata.distributions(name=name)), None) for name in names)
    if here is None or here != (wanted or here):
        raise ImportError(
            f"`lightning_amp.pytorch_lightning` needs `pytorch_lightning` of the same version as `lightning`, which is"
            f" {wanted}; it is {here or 'not installed'}. Run `pip install pytorch-lightning=={wanted}`, or write"
            f" `{_IMPORT['lightning']} ...` and use a Trainer of `lightning`."
        )


# Remove with `kind`.
def kind_of(owner: type) -> Kind | None:
    """Return the kind of a class by its bases; `None` for a class that is not Lightning's."""
    tops = (base.__module__.partition(".")[0] for base in owner.__mro__)
    return next((_KINDS[top] for top in tops if top in _KINDS), None)


# Remove with `kind`.
def require_kind(other: object, name: str = "...") -> None:
    """Raise a `TypeError` if a Trainer or a module is of the other kind. It says how to import our class `name`."""
    _require(kind_of(type(other)), name)


def _require(theirs: Kind | None, name: str) -> None:
    if theirs not in (None, kind()):
        raise TypeError(
            f"`lightning_amp` was imported for `{kind()}`, but this Trainer, Fabric or module is of `{theirs}`: write"
            f" `{_IMPORT[theirs]} {name}`."
        )


# Remove with `kind`.
def require_kind_of_caller(plugin: object) -> None:
    """Do as `require_kind` if a Trainer or a Fabric called the `__str__` or `__bool__` that calls this.

    They check the type of a plugin before they use it. They write one of the other kind into their message. They drop
    one that a strategy brings, after they have asked whether there is one. Nothing else of ours is called.
    """
    asked = getattr(inspect.currentframe(), "f_back", None)  # a frame that refers to itself waits for the collector
    caller = asked and asked.f_back
    module = caller.f_globals.get("__name__", "") if caller else ""
    if module.endswith("connector"):
        _require(_KINDS.get(module.partition(".")[0]), type(plugin).__name__)
