"""Everything that only a GPU can show, collected by one command. See `__main__.py`."""
