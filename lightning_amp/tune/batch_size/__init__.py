"""Find the largest batch that fits. Read `_find_batch_size.py` first."""
