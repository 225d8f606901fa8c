"""Lightning's averaged weights. With Lightning 2.5, which has none, substitutes that average nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks

__all__ = ["EMAWeightAveraging", "WeightAveraging", "needs_averages"]

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
elif hasattr(callbacks, "WeightAveraging"):
    EMAWeightAveraging, WeightAveraging = callbacks.EMAWeightAveraging, callbacks.WeightAveraging
else:

    class WeightAveraging(L.Callback):
        def __init__(self, **_: Any) -> None:
            self._average_model = torch.nn.Identity()

        def should_update(self, **_: Any) -> bool:
            return True

    EMAWeightAveraging = WeightAveraging

needs_averages = pytest.mark.skipif(
    not hasattr(callbacks, "WeightAveraging"), reason="Lightning 2.5 has no WeightAveraging"
)
