"""Report modules that `fp32_modules` matches and that never ran."""

from __future__ import annotations

from lightning_amp import _messages
from lightning_amp._text import named
from lightning_amp.casting import Fp32Modules


def report_idle(fp32_modules: Fp32Modules) -> None:
    """Warn at the end of a fit of rules that had no effect; log idle modules of other rules."""
    idle, is_whole_rule = fp32_modules.idle()
    if idle:
        (_messages.warn if is_whole_rule else _messages.info)(
            f"lightning_amp: `fp32_modules` has no effect on {named(idle)}: the `forward` there never ran in this fit."
            " Other methods of a module, and uses of its weight by other code, are not in fp32. Call the module itself,"
            " match the modules inside or around it whose `forward` runs, or put that code into"
            " `with lightning_amp.precision.fp32_region():`."
        )
