"""Trains a policy: `python train.py +recipe=gsm8k max_staleness=4`; `python train.py --help` says what else."""

import sys

from async_rl.main import main

if __name__ == "__main__":
    sys.exit(main())
