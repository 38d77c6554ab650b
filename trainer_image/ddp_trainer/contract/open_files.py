"""What a script has written to files that it never closed: Python writes it out when it destroys them, at the very end,
which a process that ends by `os._exit` does not reach.
"""

from __future__ import annotations

import contextlib
import gc
import io

_TEXT, _CODEC, _BUFFER = range(3)
"""Text is written through a codec such as gzip, if there is one, into a buffer."""


def write_out(*, is_last: bool) -> None:
    """Write all of it, as far as that can be done; raises nothing. A compressed file has its end, and is closed, once
    nothing else runs (`is_last`).
    """
    gc.unfreeze()  # objects that are frozen are not listed
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, io.IOBase)}  # of a million objects
    files = [found for found in objects if type(found) in kinds]
    for file in sorted(files, key=_layer):
        # closed already, half made, not for writing, or its reader is gone
        with contextlib.suppress(Exception):
            if is_last and _layer(file) == _CODEC:
                file.close()
            else:
                file.flush()


def _layer(file: io.IOBase) -> int:
    if issubclass(type(file), io.TextIOBase):
        return _TEXT
    return _BUFFER if type(file).__module__ == "_io" else _CODEC
