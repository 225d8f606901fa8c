"""What is refused before anything runs, and what can only be refused once a run has logged its metrics."""

from __future__ import annotations

import difflib
import inspect
import os
import pickle
import re
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer

from lightning_amp._arguments import is_number, require, require_count
from lightning_amp._text import named
from lightning_amp.compare._directions import direction_of
from lightning_amp.compare._plan import Margin
from lightning_amp.compare._run import ArmRun

IN_AN_ARM = "LIGHTNING_AMP_ARM"
"""Set in the process of an arm."""


def check_place(name: str) -> None:
    """Refuse to train whole runs inside of one of them, or on several ranks at once.

    Args:
        name: Of the function that was called.

    Raises:
        RuntimeError: Saying what to write.

    """
    if os.environ.get(IN_AN_ARM):
        raise RuntimeError(
            f"`{name}` was called while the process of an arm imported this file. Put the call under"
            ' `if __name__ == "__main__":`, so that importing the file does not start it again.'
        )
    if int(os.environ.get("WORLD_SIZE", "1") or 1) > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
        raise RuntimeError(
            f"`{name}` runs in one process and starts those of each arm itself; this one was started by"
            " torchrun. Start it with `python`, and pass `trainer_kwargs=dict(devices=..., strategy=...)`."
        )


def check_trainer_kwargs(trainer_kwargs: object) -> dict[str, Any]:
    """Return the arguments of the Trainer.

    Raises:
        ValueError: If it knows one of them not, or if one is what is compared.

    """
    advice = "Write an arm for each plugin: `precisions={'fp32': 'fp32', 'mine': plugin}`."
    found = check_trainer_names(trainer_kwargs, "what is compared", advice)
    strategy = found.get("strategy")
    if isinstance(strategy, str) and re.search("_(spawn|fork|notebook)", strategy):
        raise ValueError(
            f"`trainer_kwargs['strategy']` must not be {strategy!r}, whose ranks keep what an arm finds to themselves."
            " Each arm has a process of its own already: use 'ddp'."
        )
    if found.get("fast_dev_run"):
        raise ValueError("`trainer_kwargs` must not have 'fast_dev_run': it logs nothing that could be compared. Use"
                         " 'max_steps', 'limit_train_batches' and 'limit_val_batches'.")  # fmt: skip
    try:
        pickle.dumps(found)
    except Exception as error:
        raise ValueError(
            f"`trainer_kwargs` cannot be sent to another process: {type(error).__name__}: {error}. Pass what can be"
            " pickled; an object that cannot may be made in the module's `configure_callbacks`."
        ) from error
    return found


def check_trainer_names(trainer_kwargs: object, instead: str, advice: str) -> dict[str, Any]:
    """Return the arguments of the Trainer, their names checked.

    Args:
        trainer_kwargs: As given.
        instead: Tells what `precision` and `plugins` are here.
        advice: Tells how to write them.

    Raises:
        ValueError: If it knows one of them not, or if one says the precision.

    """
    if trainer_kwargs is None:
        return {}
    fine = isinstance(trainer_kwargs, Mapping) and all(isinstance(name, str) for name in trainer_kwargs)
    require(fine, "trainer_kwargs", "a mapping of the Trainer's arguments", trainer_kwargs, none="or `None`")
    assert isinstance(trainer_kwargs, Mapping)
    found = dict(trainer_kwargs)
    for name in ("precision", "plugins"):
        if name in found:
            raise ValueError(f"`trainer_kwargs` must not have {name!r}, which is {instead}. {advice}")
    known = [name for name in inspect.signature(Trainer.__init__).parameters if name != "self"]
    for name in found:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            advice = f"Did you mean {close[0]!r}?" if close else f"It knows {known}."
            raise ValueError(f"`trainer_kwargs` must hold arguments of the Trainer, got {name!r}. {advice}")
    return found


def parse_margins(margins: object) -> dict[str, Margin]:
    """Return the margins by metric.

    Raises:
        ValueError: If one is neither a number from 0 on nor a direction with such a number.

    """
    if margins is None:
        return {}
    rule = 'a mapping from metrics to numbers, or to pairs such as `("min", 0.1)`'
    fine = isinstance(margins, Mapping) and all(isinstance(name, str) for name in margins)
    require(fine, "margins", rule, margins, "" if fine else "Write `margins={'val_loss': 0.01}`.", none="or `None`")
    assert isinstance(margins, Mapping)
    found: dict[str, Margin] = {}
    for name, value in margins.items():
        pair: Any = value if isinstance(value, (tuple, list)) and len(value) == 2 else (None, value)
        direction, number = pair
        legal = 'a finite number of 0 or more, or one with its better direction: `("min", 0.1)`, `("max", 0.1)`'
        fine = is_number(number) and number >= 0 and direction in (None, "min", "max")
        require(fine, f"margins[{name!r}]", legal, value)
        found[name] = Margin(float(number), direction)
    return found


def check_seeds(seed: object, num_seeds: object, control: object) -> None:
    """Refuse what are no seeds.

    Raises:
        ValueError: Saying what is legal.

    """
    require_count("num_seeds", num_seeds)
    require_count("seed", seed, 0)
    require(control is None or isinstance(control, bool), "control", "`True`, `False`", control, none="or `None`")
    assert isinstance(seed, int)
    assert isinstance(num_seeds, int)
    require(seed + num_seeds <= 2**32, "seed", "below 2**32, with all of `num_seeds`", seed)


def check_margins(margins: Mapping[str, Margin], run: ArmRun) -> None:
    """Refuse margins for what a finished run did not log, or whose better direction nobody knows.

    Raises:
        ValueError: Naming what it logged.

    """
    for name, margin in margins.items():
        if name not in run.curves:
            there = f"it logs {named(list(run.curves))}" if run.curves else "it logs nothing in validation"
            close = difflib.get_close_matches(name, run.curves, n=1)
            advice = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"`margins` must name metrics that the module logs in validation, got {name!r}; {there}.{advice}"
            )
        if name not in run.directions and margin.direction is None and direction_of(name) is None:
            raise ValueError(
                f"`margins[{name!r}]` must say which way {name!r} is better: neither torchmetrics nor its name does."
                f' Write `margins={{{name!r}: ("min", {margin.value:g})}}` if lower is better, else `("max",'
                f" {margin.value:g})`."
            )
