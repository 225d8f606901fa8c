"""All uses of private names of torch and Lightning. Read `_torch.py` first.

Each entry says why there is no public way, names the upstream thread if there is one, and says when to remove it.
`tests/contract/test_private_names.py` proves that no other file uses a private name.
"""
