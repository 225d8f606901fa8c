"""Run the user's step a second time, unseen: on a copy, with its own random numbers and loggers."""

from lightning_amp.shadow._evaluation_pass import Stage
from lightning_amp.shadow._gradient_sample import take_sample
from lightning_amp.shadow._module_copy import is_out_of_memory
from lightning_amp.shadow._overflow_search import BatchWindow, Finding, find, packed_step, unpacked_step
from lightning_amp.shadow._paired_evaluation import PairedEvaluation, describe_failure
from lightning_amp.shadow._ranks import gather, gather_on_zero
from lightning_amp.shadow._training_pass import in_one_line

__all__ = [
    "BatchWindow",
    "Finding",
    "PairedEvaluation",
    "Stage",
    "describe_failure",
    "find",
    "gather",
    "gather_on_zero",
    "in_one_line",
    "is_out_of_memory",
    "packed_step",
    "take_sample",
    "unpacked_step",
]
