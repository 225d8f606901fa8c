"""Run the user's step a second time, unseen: on a copy, with its own random numbers and loggers."""

from lightning_amp.shadow._batch_window import BatchWindow
from lightning_amp.shadow._evaluation_pass import EvaluationPass, Stage
from lightning_amp.shadow._failures import Failure, in_one_line, is_out_of_memory
from lightning_amp.shadow._gradient_sample import Sample, take_sample
from lightning_amp.shadow._gradient_trials import GradientTrials
from lightning_amp.shadow._matmul_flops import matmul_flops
from lightning_amp.shadow._module_copy import copy_batch
from lightning_amp.shadow._overflow_search import Finding, find
from lightning_amp.shadow._paired_evaluation import PairedEvaluation
from lightning_amp.shadow._private_fit import (
    PRIVATE_CALLBACKS,
    own_data,
    own_module,
    private_trainer,
    remove_callbacks,
    run_private_fit,
)
from lightning_amp.shadow._ranks import Lockstep, OtherRankFailedError, gather, gather_on_zero
from lightning_amp.shadow._second_look import SecondLook
from lightning_amp.shadow._step_bundle import packed_step, unpacked_step
from lightning_amp.shadow._step_watch import LossyDerivative
from lightning_amp.shadow._surroundings import device_of_trainer, unnoticed
from lightning_amp.shadow._training_pass import TrainingPass

__all__ = [
    "PRIVATE_CALLBACKS",
    "BatchWindow",
    "EvaluationPass",
    "Failure",
    "Finding",
    "GradientTrials",
    "Lockstep",
    "LossyDerivative",
    "OtherRankFailedError",
    "PairedEvaluation",
    "Sample",
    "SecondLook",
    "Stage",
    "TrainingPass",
    "copy_batch",
    "device_of_trainer",
    "find",
    "gather",
    "gather_on_zero",
    "in_one_line",
    "is_out_of_memory",
    "matmul_flops",
    "own_data",
    "own_module",
    "packed_step",
    "private_trainer",
    "remove_callbacks",
    "run_private_fit",
    "take_sample",
    "unnoticed",
    "unpacked_step",
]
