"""Names that projects log. A wrong direction would turn a verdict around; an unknown direction asks the user."""

from __future__ import annotations

import pytest

from lightning_amp.compare._checks import direction_of

LOWER = """
val_loss val/loss valid-loss loss Loss VAL_LOSS valLoss val.loss val_loss_epoch val_loss/dataloader_idx_1 loss2
val_ce ce_loss bce_with_logits CrossEntropyLoss val/cross_entropy xent nn.MSELoss
dice_loss val/DiceLoss loss_iou loss_giou ssim_loss reward_loss
mse val_MSE val/rmse MeanSquaredError mean_absolute_error mae MAE val_mape smape rmsle
SymmetricMeanAbsolutePercentageError
eval_WER val/cer WordErrorRate test_eer err1 val_error top5_error val_top1_err max_calibration_error ece
brier perplexity val_ppl val/nll log_loss bits_per_byte_bpb bpd kl KLDivergence FID val/lpips fvd crps regret val_cost
val_fpr d_loss word_error_rate/dataloader_idx_0
"""
LOWER_WITH_SPACES = ["val loss", "Validation Loss", "top-5 error", "mean squared error"]
HIGHER = """
acc val/acc val_acc_epoch Accuracy MulticlassAccuracy balanced_accuracy acc1 acc@5 top1 top_5 top-1 val/top5_acc
best_acc valid_f1_macro F1 f1_score BinaryF1Score FBetaScore val_fbeta f-score
val_mAP mAP50 mAP50-95 val/AP average_precision BinaryAveragePrecision precision val_precision recall Recall@5
sensitivity specificity auc val_auroc ROC-AUC roc_auc pr_auc AUPRC MulticlassAUROC
mIoU val/mIoU IoU mean_iou jaccard JaccardIndex dice DiceScore val_dsc
bleu BLEU4 sacrebleu rougeL rougeLsum rouge1 rouge_l meteor chrf exact_match
mrr ndcg@10 NDCG r2 R2Score r_2 PearsonCorrCoef spearman MatthewsCorrCoef mcc CohenKappa kappa
psnr SSIM MultiScaleSSIM val_si_sdr pesq stoi mean_reward episode_return eval/success_rate win_rate c_index nmi ari
one_shot_acc val_acc/dataloader_idx_1 weighted_f1 mota hota idf1
"""
HIGHER_WITH_SPACES = ["Top 5 Accuracy", "Mean IoU", "Dice Coefficient"]
UNKNOWN = """
x thing metric val_metric score val_score similarity elbo l1 val_norm lr step epoch samples temperature entropy
policy_entropy NegativePredictiveValue hr@10 rewards/rejected
loss_acc acc_loss accuracy_vs_loss recall_error
neg_mse neg_mean_squared_error negative_loss inv_loss one_minus_auc minus_loss -loss -val_loss 1-auc 1-dice
loss_scale loss_weight kl_weight loss_coef acc_std loss_std loss_var best_threshold f1_threshold acc_gap acc_drop
acc_diff val/acc_head_loss_ce loss_ratio acc_time time_to_accuracy delta_loss
/dataloader_idx_0 損失
"""


@pytest.mark.parametrize("name", [*LOWER.split(), *LOWER_WITH_SPACES])
def test_lower_is_better(name: str) -> None:
    assert direction_of(name) == "min"


@pytest.mark.parametrize("name", [*HIGHER.split(), *HIGHER_WITH_SPACES])
def test_higher_is_better(name: str) -> None:
    assert direction_of(name) == "max"


@pytest.mark.parametrize("name", [*UNKNOWN.split(), "", "1 - dice", " "])
def test_unknown_rather_than_wrong(name: str) -> None:
    assert direction_of(name) is None


def test_words_are_whole() -> None:
    """No word is found inside of another."""
    names = "gloss glossary accumulated caper recurrence diceroll wereabouts replacement lossless"
    assert [name for name in names.split() if direction_of(name) is not None] == []
