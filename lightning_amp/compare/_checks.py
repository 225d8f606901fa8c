"""Refuse wrong arguments before anything runs, and wrong margins as soon as a run has logged its metrics."""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from lightning_amp._arguments import is_number, require
from lightning_amp._compat._names import Trainer
from lightning_amp._text import named
from lightning_amp.compare._process import IN_AN_ARM
from lightning_amp.compare._run import Margin
from lightning_amp.compare._spec import check_travels
from lightning_amp.compare._stats import Direction


def check_place(name: str) -> None:
    """Refuse a call of the function `name` in the process of an arm, or on several ranks at once.

    Raises:
        RuntimeError: If the call is refused. The message explains what to write.

    """
    if os.environ.get(IN_AN_ARM):
        raise RuntimeError(
            f"`{name}` was called while the process of an arm imported this file. Put the call under"
            ' `if __name__ == "__main__":`, so that importing the file does not start it again.'
        )
    if int(os.environ.get("WORLD_SIZE", "1") or 1) > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
        raise RuntimeError(
            f"`{name}` runs in one process and starts the processes of each arm itself; this one was started by"
            " torchrun. Start it with `python`, and pass `trainer_kwargs=dict(devices=..., strategy=...)`."
        )


def check_trainer_kwargs(trainer_kwargs: object) -> dict[str, Any]:
    """Return the arguments of the Trainer.

    Raises:
        ValueError: If one of them is not an argument of the Trainer, or if an arm cannot run with it.

    """
    advice = "Name it in `precisions`, which also takes plugins with a label."
    found = check_trainer_names(trainer_kwargs, "what is compared", advice)
    strategy = found.get("strategy")
    if isinstance(strategy, str) and re.search("_(spawn|fork|notebook)", strategy):
        raise ValueError(
            f"`trainer_kwargs['strategy']` must not be {strategy!r}, whose ranks keep the results of an arm to"
            " themselves. Each arm has a process of its own already: use 'ddp'."
        )
    if found.get("fast_dev_run"):
        raise ValueError(
            "`trainer_kwargs` must not have 'fast_dev_run': it logs nothing that could be compared. Use 'max_steps',"
            " 'limit_train_batches' and 'limit_val_batches'."
        )
    check_travels("trainer_kwargs", found, "Make such objects in the module's `configure_callbacks`.")
    return found


def check_trainer_names(trainer_kwargs: Any, instead: str, advice: str) -> dict[str, Any]:
    """Return the arguments of the Trainer, after checking their names.

    Args:
        trainer_kwargs: The user's argument.
        instead: The role of `precision` and `plugins` here: "what is compared".
        advice: Words that explain how to write them.

    Raises:
        ValueError: If one of them is not an argument of the Trainer, or if one sets the precision.

    """
    if trainer_kwargs is None:
        return {}
    fine = isinstance(trainer_kwargs, Mapping) and all(isinstance(name, str) for name in trainer_kwargs)
    require(fine, "trainer_kwargs", "a mapping of the Trainer's arguments", trainer_kwargs, none="or `None`")
    known = [name for name in inspect.signature(Trainer.__init__).parameters if name != "self"]
    for name in trainer_kwargs:
        if name in ("precision", "plugins"):
            raise ValueError(f"`trainer_kwargs` must not have {name!r}, which is {instead}. {advice}")
        if name not in known:
            advice = _meant(name, known) or f" It knows {known}."
            raise ValueError(f"`trainer_kwargs` must hold arguments of the Trainer, got {name!r}.{advice}")
    return dict(trainer_kwargs)


def parse_margins(margins: Any) -> dict[str, Margin]:
    """Return the margins by metric.

    Raises:
        ValueError: If one is neither a number of 0 or more nor a direction with such a number.

    """
    if margins is None:
        return {}
    rule = 'a mapping from metrics to numbers, or to pairs such as `("min", 0.1)`'
    fine = isinstance(margins, Mapping) and all(isinstance(name, str) for name in margins)
    require(fine, "margins", rule, margins, "" if fine else "Write `margins={'val_loss': 0.01}`.", none="or `None`")
    rule = 'a finite number of 0 or more, or one with its better direction: `("min", 0.1)`, `("max", 0.1)`'
    found: dict[str, Margin] = {}
    for name, value in margins.items():
        pair: Any = value if isinstance(value, (tuple, list)) and len(value) == 2 else (None, value)
        direction, number = pair
        fine = is_number(number) and number >= 0 and direction in (None, "min", "max")
        require(fine, f"margins[{name!r}]", rule, value)
        found[name] = Margin(float(number), direction)
    return found


def wrong_margin(margins: Mapping[str, Margin], logged: Iterable[str], directions: Iterable[str]) -> str:
    """Return what is wrong with margins for a module's metrics; empty if all can be judged.

    Args:
        margins: The margins.
        logged: The metrics that a validation logged.
        directions: The metrics whose better direction torchmetrics knows.

    """
    logged, directions = list(logged), list(directions)
    for name, margin in margins.items():
        if name not in logged:
            there = f"it logs {named(logged)}" if logged else "it logs nothing in validation"
            rule = "`margins` must name metrics that the module logs in its first validation"
            return f"{rule}, got {name!r}; {there}.{_meant(name, logged)}"
        if name not in directions and margin.direction is None and direction_of(name) is None:
            return (
                f"`margins[{name!r}]` must say which way {name!r} is better: neither torchmetrics nor its name does."
                f' Write `("min", {margin.value:g})` if lower is better, else `("max", {margin.value:g})`.'
            )
    return ""


def _meant(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


# -- the better direction of a metric, by its name ---------------------------------------------------------------------

_LOWER = {
    "bce", "bpb", "bpc", "bpd", "brier", "ce", "cer", "cost", "crossentropy", "crps", "ece", "eer", "epe", "err",
    "error", "errors", "fad", "fid", "fnr", "fpr", "fvd", "kid", "kl", "kld", "logloss", "loss", "losses", "lpips",
    "mae", "mape", "mase", "mpjpe", "mse", "msle", "niqe", "nll", "nmse", "nrmse", "perplexity", "ppl", "regret",
    "rmsd", "rmse", "rmsle", "smape", "wape", "wer", "wmape", "xent",
}  # fmt: skip
_HIGHER = {
    "acc", "accuracy", "ami", "ap", "ari", "auc", "aucpr", "aucroc", "aupr", "auprc", "auroc", "bertscore", "bleu",
    "chrf", "cider", "cindex", "dice", "dsc", "exactmatch", "f1", "f2", "fbeta", "fmeasure", "fscore", "gleu", "hota",
    "idf1", "iou", "jaccard", "kappa", "lddt", "matthews", "mcc", "meteor", "miou", "mota", "mrr", "ndcg", "nmi",
    "pearson", "pesq", "prauc", "precision", "psnr", "r2", "recall", "return", "reward", "rocauc", "rouge", "sacrebleu",
    "sdr", "sensitivity", "sisdr", "spearman", "specificity", "ssim", "stoi", "successrate", "tnr", "top1", "top3",
    "top5", "top10", "tpr", "winrate",
}  # fmt: skip
_MADE_A_LOSS = {"dice", "iou", "jaccard", "kappa", "psnr", "reward", "sdr", "sisdr", "ssim"}
"""Metrics whose name is also used for a loss made from them: "dice_loss"."""

_MADE_AN_ERROR = {"top1", "top3", "top5", "top10"}  # "top5_error"
_TURNS_AROUND = {"neg", "negative", "minus", "inverse", "inv"}  # "neg_mse", "one_minus_auc"
_ANOTHER_QUANTITY = {
    "change", "delta", "diff", "drop", "gap", "improvement", "losscoef", "lossscale", "ratio", "std", "threshold",
    "time", "var", "variance", "weight",
}  # fmt: skip
"""Words that turn the name of a metric into the name of another quantity: "loss_scale", "f1_threshold", "acc_std"."""

_WORD = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*|\d+")
_MINUS = re.compile(r"^-|(?<![A-Za-z0-9.])1 ?- ?(?=[A-Za-z])")  # "-loss", "1-auc"


def direction_of(name: str) -> Direction | None:
    """Return the better direction of a metric with this name; `None` if its words do not agree on one."""
    name = name.partition("/dataloader_idx_")[0]
    words = _words(name)
    if words & (_TURNS_AROUND | _ANOTHER_QUANTITY) or _MINUS.search(name):
        return None
    lower, higher = words & _LOWER, words & _HIGHER
    if "loss" in lower:
        higher -= _MADE_A_LOSS
    if lower & {"err", "error"}:
        higher -= _MADE_AN_ERROR
    if bool(lower) == bool(higher):
        return None
    return "min" if lower else "max"


def _words(name: str) -> set[str]:
    """Return the words of a name, also without their last digits ("acc1"), and neighbours joined ("top_1", "IoU")."""
    words = [word.lower() for word in _WORD.findall(name)]
    bare = [word.rstrip("0123456789") for word in words]
    return {*words, *bare, *(first + second for first, second in pairwise(words))}
