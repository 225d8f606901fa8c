"""Every private name of torch or Lightning that this package touches, and why.

Each entry says why there is no public way, names the upstream thread if there is one, and the condition under which the
entry can go. `tests/contract/test_architecture.py` proves that no other file uses a private name.
"""
