"""Helpers of all tests: a quiet Trainer, small models, injected overflow, and comparisons with fp32."""
# pyright: reportUnusedImport=false

from zoo.toy import FEATURES, Manual, Toy, assert_finite, assert_same, attributes, batches, weights, with_batch_norm

from support.callbacks import Poison, Recorder, Records, all_of_ours
from support.devices import DEVICE, CountReads, ForbidSync, flags_on_a_device, set_sync_mode
from support.plugins import STOCK_CACHES_CASTS, WithoutAutocast, scaled_fp32, stock, stock_fp32
from support.trainers import assert_as_fp32, evaluate, fit, quiet_trainer
