"""The headline table: six well-known models, in fp32, Lightning's mixed precision and ours. See `__main__.py`."""
