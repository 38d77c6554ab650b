"""Lines for standard error from a process that runs a script.

Not by `print`: many scripts put a function of their own in its place, as `setup_for_distributed` of torchvision's
references does, so that only rank 0 prints. What another rank has to say would be lost, a traceback too, since the
module `traceback` prints.
"""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Write `text` and the end of a line, at once."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
