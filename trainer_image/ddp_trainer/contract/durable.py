"""What outlives a power cut of the node."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def make_durable(path: Path) -> None:
    """The names in a folder, or the bytes of a file that was written before, outlive a power cut. Raises OSError, also
    for a link.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE file systems cannot sync a folder; their renames are synchronous.
        if not (path.is_dir() and error.errno in {errno.EINVAL, errno.ENOTSUP}):
            raise
    finally:
        os.close(descriptor)
