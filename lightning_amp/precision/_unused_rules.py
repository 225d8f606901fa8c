"""Report modules that `fp32_modules` matches and that never ran."""

from __future__ import annotations

from lightning_amp import _messages
from lightning_amp._text import named
from lightning_amp.casting import Fp32Modules


def warn_of_idle(fp32_modules: Fp32Modules) -> None:
    """Warn at the end of a fit of modules on which the rules had no effect, if that is known."""
    if idle := fp32_modules.idle():
        _messages.warn(
            f"lightning_amp: `fp32_modules` had no effect on {named(idle)}, because the `forward` there never ran in"
            " this fit. Other methods of a module, and uses of its weight by other code, are not in fp32. Match the"
            " module whose `forward` contains that code, or put it into"
            " `with lightning_amp.precision.fp32_region():`."
        )
