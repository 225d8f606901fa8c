"""Run the user's step a second time without side effects: on a copy, with its own random numbers and loggers."""

from lightning_amp.shadow._batches import Batches, BatchWindow, KeptBatch, giving, keep_batches
from lightning_amp.shadow._evaluation_pass import EvaluationPass, Precision, Stage
from lightning_amp.shadow._failures import Failure, in_one_line, is_out_of_memory
from lightning_amp.shadow._fsdp import is_sharded, shard_of, shards_of_gathered, tensor_parallel_size
from lightning_amp.shadow._gradient_sample import GradientSampler, RowsBy, precision_of
from lightning_amp.shadow._module_copy import copy_batch
from lightning_amp.shadow._output_comparison import OutputComparison
from lightning_amp.shadow._paired_evaluation import PairedEvaluation
from lightning_amp.shadow._private_fit import (
    own_data,
    own_module,
    private_trainer,
    remove_callbacks,
    require_unsharded,
    run_private_fit,
)
from lightning_amp.shadow._ranks import OtherRankFailedError, gather, together
from lightning_amp.shadow._surroundings import device_of_trainer, unnoticed
from lightning_amp.shadow._training_pass import BOUNDARY, TrainingPass, matmul_flops

__all__ = [
    "BOUNDARY",
    "BatchWindow",
    "Batches",
    "EvaluationPass",
    "Failure",
    "GradientSampler",
    "KeptBatch",
    "OtherRankFailedError",
    "OutputComparison",
    "PairedEvaluation",
    "Precision",
    "RowsBy",
    "Stage",
    "TrainingPass",
    "copy_batch",
    "device_of_trainer",
    "gather",
    "giving",
    "in_one_line",
    "is_out_of_memory",
    "is_sharded",
    "keep_batches",
    "matmul_flops",
    "own_data",
    "own_module",
    "precision_of",
    "private_trainer",
    "remove_callbacks",
    "require_unsharded",
    "run_private_fit",
    "shard_of",
    "shards_of_gathered",
    "tensor_parallel_size",
    "together",
    "unnoticed",
]
