"""List the events of one optimizer step, for every precision and for automatic and manual optimization.

The documentation shows this list, and a test compares it with a recorded step. With a fused optimizer, and no hook that
reads gradients in between, unscale, check, clip and step touch each gradient twice instead of four times. The result is
the same within rounding (`scaling/_steps.py`).
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Event(NamedTuple):
    """An event, and the state that user code can rely on while it happens."""

    name: str
    about: str


EVENTS: Final = (
    Event("training_step", "under autocast; automatic: in the closure; manual: your own code, closures included"),
    Event("on_before_backward", "gets the loss that `training_step` returned"),
    Event("scale the loss", "gradients of earlier backwards are brought to the same scale"),
    Event("backward", "autocast is off"),
    Event("on_after_backward", "gradients are still scaled here"),
    Event("unscale", "once; earlier if `clip_gradients` or `unscale_` needs true gradients"),
    Event(
        "check finite",
        "one flag per optimizer, on the device; a flag that `unscale_` or clipping by value set stays set",
    ),
    Event("on_before_optimizer_step", "callbacks, then the module: true gradients, fused optimizers included"),
    Event("check again", "if a hook may have changed gradients"),
    Event("clip", "`configure_gradient_clipping`, on true gradients; your own is followed by another check"),
    Event("step or skip", "`optimizer.step` runs with a closure that did all of the above, as in fp32"),
    Event("record", "as references to scalars on the device, which are read back in blocks"),
    Event(
        "update the scale",
        "at the end of the batch, once for all optimizers; earlier, but only downwards, if many steps overflow",
    ),
)
