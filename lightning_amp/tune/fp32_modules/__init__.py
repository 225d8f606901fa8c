"""Which modules must stay in fp32. Read `_find_fp32_modules.py` first."""
