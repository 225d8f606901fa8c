"""Run the command `lightning-amp` by `python -m lightning_amp`."""

import sys

from lightning_amp.cli import main

if __name__ == "__main__":
    sys.exit(main())
