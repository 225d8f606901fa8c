"""Which way a metric is better, by its name."""

from __future__ import annotations

import re

from lightning_amp.comparison._statistics import Direction

_LOWER = {
    "bce", "bpb", "bpc", "brier", "ce", "cer", "ece", "entropy", "err", "error", "errors", "fid", "fvd", "kl",
    "kld", "lpips", "loss", "losses", "mae", "mape", "mse", "msle", "nll", "nrmse", "perplexity", "ppl", "rmse",
    "rmsle", "wer",
}  # fmt: skip
_HIGHER = {
    "acc", "accuracy", "ap", "auc", "auprc", "auroc", "bleu", "dice", "f1", "fbeta", "iou", "jaccard", "kappa", "mcc",
    "miou", "mrr", "ndcg", "psnr", "r2", "recall", "return", "reward", "rouge", "rouge1", "rouge2", "rougel", "ssim",
    "top1", "top5",
}  # fmt: skip
_TURNS_AROUND = {"neg", "negative", "minus", "inverse", "inv", "one"}  # "neg_mse", "one_minus_auc"
_WORD = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*|\d+")


def direction_of(name: str) -> Direction | None:
    """Return which way a metric of this name is better; `None` if its words do not say, or contradict each other."""
    words = {word.lower() for word in _WORD.findall(name.partition("/dataloader_idx_")[0])}
    lower, higher = bool(words & _LOWER), bool(words & _HIGHER)
    if lower == higher or words & _TURNS_AROUND:
        return None
    return "min" if lower else "max"
