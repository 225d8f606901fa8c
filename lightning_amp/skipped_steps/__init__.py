"""Who must not notice a skipped step: schedules, averaged weights, normalisation statistics."""

from lightning_amp.skipped_steps._named_buffers import Place, checked_buffer_rules, matching_places
from lightning_amp.skipped_steps._protection import SkipProtection

__all__ = ["Place", "SkipProtection", "checked_buffer_rules", "matching_places"]
