"""Which precision to use: whole runs side by side, and what may be concluded from them."""
