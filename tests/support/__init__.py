"""Helpers of all tests: a quiet Trainer, small models, injected overflow, and comparisons with fp32."""

from zoo.toy import FEATURES, Manual, Toy, assert_finite, assert_same, attributes, batches, weights, with_batch_norm

from support.callbacks import Poison, Recorder, Records, all_of_ours
from support.devices import DEVICE, CountReads, ForbidSync, flags_on_a_device, set_sync_mode
from support.plugins import STOCK_CACHES_CASTS, StockWithoutAutocast, WithoutAutocast, scaled_fp32, stock, stock_fp32
from support.trainers import assert_as_fp32, evaluate, fit, quiet_trainer

__all__ = [
    "DEVICE",
    "FEATURES",
    "STOCK_CACHES_CASTS",
    "CountReads",
    "ForbidSync",
    "Manual",
    "Poison",
    "Recorder",
    "Records",
    "StockWithoutAutocast",
    "Toy",
    "WithoutAutocast",
    "all_of_ours",
    "assert_as_fp32",
    "assert_finite",
    "assert_same",
    "attributes",
    "batches",
    "evaluate",
    "fit",
    "flags_on_a_device",
    "quiet_trainer",
    "scaled_fp32",
    "set_sync_mode",
    "stock",
    "stock_fp32",
    "weights",
    "with_batch_norm",
]
