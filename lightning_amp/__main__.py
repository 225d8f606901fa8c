"""`python -m lightning_amp`, which is the command `lightning-amp`."""

import sys

from lightning_amp.cli import main

if __name__ == "__main__":
    sys.exit(main())
