"""Nobody notices what ran: the process is left as it was found, and says nothing."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Generator
from contextlib import contextmanager

import torch

from lightning_amp.tracing import fp32_switches, paired_random

_LOGGERS = ("lightning.pytorch", "lightning.fabric", "lightning_amp")


@contextmanager
def unnoticed(device: torch.device) -> Generator[None]:
    """Leave the caller's process as it was found: random generators, seed of Lightning, settings of torch, loggers.

    Inside, Lightning and this package say nothing, warnings are not shown, and `device` is the current one.
    """
    environment = dict(os.environ)
    precisions = [(switch, switch.fp32_precision) for switch in fp32_switches()]
    matmul = _matmul_precision()
    anomaly, cudnn = torch.is_anomaly_enabled(), torch.backends.cudnn.deterministic
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    threads, dtype, benchmark = torch.get_num_threads(), torch.get_default_dtype(), torch.backends.cudnn.benchmark
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        for name in _LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)
        with (
            warnings.catch_warnings(),
            paired_random(device.type),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.accelerator.device_index(None if device.type == "cpu" else device.index),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        if matmul is not None and _matmul_precision() != matmul:
            torch.set_float32_matmul_precision(matmul)
        for switch, precision in precisions:
            if switch.fp32_precision != precision:
                switch.fp32_precision = precision
        torch.autograd.set_detect_anomaly(anomaly)
        torch.backends.cudnn.deterministic = cudnn
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.backends.cudnn.benchmark = benchmark
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def _matmul_precision() -> str | None:
    """Return what `set_float32_matmul_precision` set; torch does not tell where a newer switch was used as well."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
