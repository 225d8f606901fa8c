"""Does a `tolerance` name metrics that exist? Asked when a sanity check or a comparison has shown which do."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from types import CodeType

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_amp.reports import LOADER_SUFFIX
from lightning_amp.shadow import Stage


def why_not_logged(
    names: Iterable[str], logged: Iterable[str], module: LightningModule, stage: Stage, *, sanity: bool
) -> str | None:
    """Tell a user which metrics that `tolerance` names are not logged; `None` if all are.

    One tolerance serves validation and test. If the module has both steps, a name with "test" in it is test's.

    A metric may be left out of the sanity check, or depend on values that it did not see. So there a name stays in
    doubt if the module's code writes it out, and all do if that code asks for `sanity_checking`. One that was logged
    for each loader (`<name>/dataloader_idx_0`) is not in doubt.
    """
    if is_overridden("validation_step" if stage == "test" else "test_step", module):
        names = [name for name in names if ("test" in name.lower()) == (stage == "test")]
    available = sorted(logged)
    unknown = sorted(set(names).difference(available))
    if sanity and unknown:
        words = set(_words(module))
        per_loader = {known.partition(LOADER_SUFFIX)[0] for known in available}
        unknown = [name for name in unknown if name not in words or name in per_loader]
        if "sanity_checking" in words:
            unknown = []
    if not unknown:
        return None
    text = f"`tolerance` names metrics that {stage} does not log: {unknown}. Choose from {available}"
    later = "; for one that is logged only later, `num_sanity_val_steps=0` leaves this check to the first comparison"
    return text + later if sanity else text


def _words(module: LightningModule) -> Iterator[str]:
    """Yield names and strings in the code of a module's class and its bases, short of Lightning's own."""
    for cls in type(module).__mro__:
        if cls is LightningModule:
            return
        for value in vars(cls).values():
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if inspect.isfunction(function):
                yield from _words_of_code(inspect.unwrap(function).__code__)


def _words_of_code(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    waiting = list(code.co_consts)
    while waiting:
        constant = waiting.pop()
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, (tuple, frozenset)):  # the keys of a dictionary
            waiting.extend(constant)
        elif isinstance(constant, CodeType):
            yield from _words_of_code(constant)
