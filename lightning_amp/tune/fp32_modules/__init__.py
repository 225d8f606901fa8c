"""Find the modules that must stay in fp32. Read `_find_fp32_modules.py` first."""
