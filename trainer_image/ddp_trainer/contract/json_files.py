"""Small JSON files that one process writes while another reads: whole or not there, never half.

They lie in memory that the script may fill up (/dev/shm, which data loaders use too). A file that has its memory
already is then overwritten where it is: a reader may for once find it half written, and takes that as not there.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_encode = json.JSONEncoder(allow_nan=False).encode
FULL = (errno.ENOSPC, errno.EDQUOT)


def write_json(path: Path, value: Mapping[str, Any], *, room: int = 0) -> None:
    """Replace `path` by `value` in one rename, making its directory first if need be.

    NaN and infinities become null: strict JSON, which /status must be, has no word for them. `room` is how many bytes
    the file is to have at least, for a later and longer value on a full file system. Raises OSError where even the
    memory of the file that is there does not do.
    """
    try:
        text = _encode(value)
    except ValueError:
        text = json.dumps(_finite(value))
    data = text.encode().ljust(room)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        try:
            _write(temporary, data)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(temporary, data)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.errno not in FULL or not _overwrite(path, data.rstrip()):
            raise


def reserve(path: Path, size: int) -> None:
    """Have memory for a file that is to be written later: blanks, which `read_json` takes as not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b" " * size)


def _write(path: Path, data: bytes) -> None:
    """As Path.write_bytes, in half the time: a rank does it every second, beside its steps."""
    with io.FileIO(path, "w") as file:
        left = memoryview(data)
        while left:
            left = left[file.write(left) :]


def _overwrite(path: Path, data: bytes) -> bool:
    """Write into the blocks that the file has; False if there are too few, or no file."""
    try:
        with path.open("r+b") as file:
            found = os.fstat(file.fileno())
            if len(data) > found.st_blocks * 512:
                return False
            file.write(data.ljust(found.st_size))
    except OSError:
        return False
    return True


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`, None where there is none or it is no object."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
