"""Lines for standard error from a process that runs a script, and what is left in its streams at the end.

Not by `print`: many scripts put a function of their own in its place, as `setup_for_distributed` of torchvision's
references does, so that only rank 0 prints. What another rank has to say would be lost, a traceback too, since the
module `traceback` prints.
"""

from __future__ import annotations

import contextlib
import sys

# Whatever a stream raises: the script may have closed it, its reader may be gone, it may be None, or something of the
# script's own without one of these methods. No line is worth a run.


def say(text: str) -> None:
    """Write `text` and the end of a line, at once."""
    with contextlib.suppress(Exception):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def flush_streams() -> None:
    """Write out what waits in standard output and standard error, before the process ends without Python's own way."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
