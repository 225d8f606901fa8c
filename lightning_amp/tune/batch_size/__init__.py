"""Which batch size is the largest that fits. Read `_find_batch_size.py` first."""
