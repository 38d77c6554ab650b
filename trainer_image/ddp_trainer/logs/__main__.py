"""Print the losses of a run, one JSON object a line and step, merged from all attempts.

python -m ddp_trainer.logs DIR              the loss of each step
python -m ddp_trainer.logs --epochs DIR     the figures of each epoch: mean training loss, validation

DIR is the job's log directory, such as /mnt/shared/logs/digits.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ddp_trainer.logs.losses import FOLDER, merged_losses, read_epochs


def main(argv: Sequence[str] | None = None) -> int:
    """Print them; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ddp_trainer.logs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--epochs", action="store_true", help="the figures of each epoch instead of each step")
    options = parser.parse_args(argv)
    directory = options.directory
    if not (directory / FOLDER).is_dir():
        print(f"there is no {directory / FOLDER}: name the job's, such as /mnt/shared/logs/digits", file=sys.stderr)
        return 2
    try:
        for line in read_epochs(directory) if options.epochs else merged_losses(directory):
            print(json.dumps(line))
        sys.stdout.flush()
    except BrokenPipeError:  # a reader such as `head` has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
