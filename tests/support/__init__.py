"""What the tests share: a quiet Trainer, small models, injected overflow, and comparisons with fp32."""

from zoo.toy import FEATURES, Toy, assert_same, attributes, batches, weights

from support.devices import DEVICE, CountReads, ForbidSync, flags_on_a_device, run_scenarios, set_sync_mode
from support.plugins import STOCK_CACHES_CASTS, StockWithoutAutocast, WithoutAutocast, scaled_fp32, stock, stock_fp32
from support.poison import Poison, Recorder
from support.trainers import fit, quiet_trainer

__all__ = [
    "DEVICE",
    "FEATURES",
    "STOCK_CACHES_CASTS",
    "CountReads",
    "ForbidSync",
    "Poison",
    "Recorder",
    "StockWithoutAutocast",
    "Toy",
    "WithoutAutocast",
    "assert_same",
    "attributes",
    "batches",
    "fit",
    "flags_on_a_device",
    "quiet_trainer",
    "run_scenarios",
    "scaled_fp32",
    "set_sync_mode",
    "stock",
    "stock_fp32",
    "weights",
]
