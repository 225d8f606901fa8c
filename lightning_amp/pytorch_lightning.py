"""The names of `lightning_amp` for `pytorch_lightning` and `lightning_fabric`, instead of `lightning`.

::

    import pytorch_lightning as pl
    from lightning_amp.pytorch_lightning import AmpPrecision, ScaleMonitor

    trainer = pl.Trainer(plugins=[AmpPrecision("bf16")], callbacks=[ScaleMonitor()])

Lightning ships each class twice, and a Trainer of one package refuses plugins of the other. A process can use
lightning_amp with one of them. So import this module before any other name of ours, and import all public names from
it. The rooms stay where they are: `from lightning_amp.precision import scaled_grad`.

Raises:
    ImportError: If this process already uses lightning_amp with `lightning`, or if `pytorch_lightning` is missing or
        has another version than `lightning`.

"""

from typing import TYPE_CHECKING, Any

from lightning_amp import __all__, __version__, _load  # noqa: F401
from lightning_amp._compat import _names

if TYPE_CHECKING:
    from lightning_amp import *  # noqa: F403

_names.use("pytorch_lightning")


def __getattr__(name: str) -> Any:
    """Import a public name or a folder on first use, as `lightning_amp` does."""
    value = globals()[name] = _load(name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
