"""One optimizer step as a list of events, for every precision and for automatic and manual optimization.

The documentation shows this list, and a test records a step and compares. Where nobody looks in between and the
optimizer is fused, unscale, check, clip and step touch each gradient twice instead of four times; the result is the
same within rounding (`scaling/_steps.py`).
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Event(NamedTuple):
    """What happens, and what can be relied on while it does."""

    name: str
    about: str


EVENTS: Final = (
    Event("training_step", "under autocast; automatic: in the closure; manual: your own code, closures included"),
    Event("on_before_backward", "gets the loss that `training_step` returned"),
    Event("scale the loss", "gradients that are still there from before are carried to the same scale"),
    Event("backward", "autocast is off"),
    Event("on_after_backward", "gradients are still scaled here"),
    Event("unscale", "once; earlier if `clip_gradients` or `unscale_` asks for true gradients"),
    Event("check finite", "one flag per optimizer, on the device; what `unscale_` or clipping by value found stays"),
    Event("on_before_optimizer_step", "callbacks, then the module: true gradients, fused optimizers included"),
    Event("check again", "where a hook may have changed them"),
    Event("clip", "`configure_gradient_clipping`, on true gradients; your own is followed by another check"),
    Event("step or skip", "`optimizer.step` runs with a closure that did all of the above, as in fp32"),
    Event("record", "references to scalars of the device, read back in blocks"),
    Event(
        "update the scale", "at the end of the batch, once for all; sooner, but only downwards, if many steps overflow"
    ),
)
