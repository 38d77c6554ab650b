"""A volume on which one file cannot be read just now."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest


def is_unreadable(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """From now on, the volume answers with EIO where this file is read."""
    read = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path == file:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
