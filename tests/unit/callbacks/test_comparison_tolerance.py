"""The settings of `MetricComparison`, and wrong names in its tolerance."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import Tensor
from zoo.validated import Model, OnlyTest, WithTest, data, fit, make_trainer, values

from lightning_amp.callbacks._metric_comparison import MetricComparison

NAN, INF = math.nan, math.inf


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),
]


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"every_n_epochs": 0}, "`every_n_epochs` must be an integer of at least 1, got 0"),
        ({"every_n_epochs": 1.5}, "got 1.5"),
        ({"every_n_epochs": True}, "got True"),
        ({"limit_batches": 0}, r"`limit_batches` must be .*, got 0\."),
        ({"limit_batches": 1.5}, "got 1.5"),
        ({"limit_batches": 0.0}, "got 0.0"),
        ({"limit_batches": True}, "got True"),
        ({"limit_batches": NAN}, "got nan"),
        ({"tolerance": -0.1}, "`tolerance` must be .*, got -0.1"),
        ({"tolerance": "0.1"}, "got '0.1'"),
        ({"tolerance": {"acc": -1}}, "got {'acc': -1}"),
        ({"tolerance": {3: 1.0}}, "got {3: 1.0}"),
        ({"tolerance": NAN}, "got nan"),
        ({"on_exceed": "stop"}, "`on_exceed` must be .*, got 'stop'"),
    ],
)
def test_settings_are_checked(kwargs: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        MetricComparison(**kwargs)


def test_a_misspelt_name_is_found_in_the_sanity_check() -> None:
    module = Model()
    with pytest.raises(
        ValueError, match=r"\['val_los'\]\. Choose from .*'val_loss'\]; .*`num_sanity_val_steps=0`"
    ) as error:
        fit(MetricComparison(tolerance={"val_los": 0.1, "val_loss": 5.0}), module)
    assert module.global_step == 0
    assert "validation does not log" in str(error.value)


@pytest.mark.parametrize("loaders", [1, 2])
def test_the_advice_for_a_name_that_comes_later_is_right(loaders: int) -> None:
    class Last(Model):
        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx)
            if batch_idx == 3:
                self.log("_".join(["val", "last"]), 1.0)  # the name does not stand in the code

    name = "val_last" if loaders == 1 else "val_last/dataloader_idx_1"
    val = [data() for _ in range(loaders)]
    with pytest.raises(ValueError, match="`num_sanity_val_steps=0`"):
        make_trainer(MetricComparison(tolerance={name: 0.1})).fit(Last(), data(), val)
    make_trainer(MetricComparison(tolerance={name: 0.1}), num_sanity_val_steps=0).fit(Last(), data(), val)


@pytest.mark.parametrize("how", ["asks", "value", "batch", "keys"])
def test_a_name_that_the_sanity_check_does_not_log_yet(how: str) -> None:
    class Later(Model):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            if how == "asks" and not self.trainer.sanity_checking:
                self.log("_".join(["val", "later"]), 1.0)
            if how == "value" and self.current_epoch == 1:
                self.log("val_later", 1.0)
            if how == "batch" and batch_idx == 3:
                self.log("val_later", 1.0)

        def on_validation_epoch_end(self) -> None:
            if how == "keys" and self.global_step > 0:
                self.log_dict({"val_later": 1.0, "val_more": 2.0})

    comparison = MetricComparison(tolerance={"val_later": 0.1}, every_n_epochs=1)
    if how == "value":  # the first comparison raises: it does not log the name
        with pytest.raises(ValueError, match=r"\['val_later'\]\. Choose from .*'val_loss'\]$"):
            fit(comparison, Later())
        assert comparison.table is not None
    else:
        fit(comparison, Later())
        assert values(comparison, "val_later", "diff") == [0.0, 0.0]


def test_one_tolerance_for_validation_and_test() -> None:
    comparison = MetricComparison(tolerance={"val_loss": 5.0, "test_loss": 5.0})
    model = WithTest()
    trainer = fit(comparison, model)
    trainer.test(model, data(), verbose=False)
    wrong = MetricComparison(tolerance={"val_loss": 5.0, "test_los": 5.0})
    trainer = fit(wrong, model)
    with pytest.raises(ValueError, match=r"test does not log: \['test_los'\]\. Choose from"):
        trainer.test(model, data(), verbose=False)
    with pytest.raises(ValueError, match=r"test does not log: \['acc'\]"):
        make_trainer(MetricComparison(tolerance={"acc": 1.0})).test(OnlyTest(), data(), verbose=False)


def test_a_name_without_its_loader_is_found_in_the_sanity_check() -> None:
    class Loaders(Model):
        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx)

    module = Loaders()
    with pytest.raises(ValueError, match=r"\['val_loss'\]\. Choose from .*'val_loss/dataloader_idx_1'"):
        make_trainer(MetricComparison(tolerance={"val_loss": 1.0})).fit(module, data(), [data(), data()])
    assert module.global_step == 0
