"""Guess from a metric's name whether small or large values are better."""

from __future__ import annotations

import re
from itertools import pairwise

from lightning_amp.compare._stats import Direction

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
