"""All uses of private names of torch and Lightning. Read `_torch.py` first.

Each entry says why there is no public way, names the upstream thread if there is one, and says when to remove it.
Ruff's rule SLF001 (`make lint`) allows private names in no other file, except for those listed in `pyproject.toml`.
"""
