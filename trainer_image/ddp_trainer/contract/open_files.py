"""What a script has written to files that it never closed: Python writes it out when it destroys them, at the very end,
which a process that ends by `os._exit` does not reach.
"""

from __future__ import annotations

import contextlib
import gc
import io
import sys
from collections.abc import Iterable
from typing import Any, Final

_TEXT, _CODEC, _BUFFER = range(3)
"""Text is written through a codec such as gzip, if there is one, into a buffer."""

_WRITTEN_AT_THE_END: Final = {
    "h5py._hl.files": "File",
    "pyarrow.parquet.core": "ParquetWriter",
    "shelve": "Shelf",
    "tarfile": "TarFile",
    "zipfile": "ZipFile",
}
"""Classes that are no files themselves, and write what makes one readable when they are closed."""


_kept: list[Any] = []


def keep_archives() -> None:
    """Before objects are destructed, in whatever order: an archive is closed after its parts, by `write_out`."""
    gc.unfreeze()
    _kept[:] = _archives(gc.get_objects())


def write_out(*, is_last: bool) -> None:
    """Write all of it, as far as that can be done; raises nothing. An archive or a compressed file has its end, and is
    closed, once nothing else runs (`is_last`).
    """
    gc.unfreeze()  # objects that are frozen are not listed
    objects = gc.get_objects()
    archives = _archives(objects) if is_last else []
    _close(archives)
    files = _of_kinds(objects, (io.IOBase,))
    for file in sorted(files, key=_layer):
        # closed already, half made, not for writing, or its reader is gone
        with contextlib.suppress(Exception):
            if is_last and _layer(file) == _CODEC:
                file.close()
            else:
                file.flush()
    _close(archives)  # a part that was open has kept its zip file open


def _close(archives: Iterable[Any]) -> None:
    for archive in archives:
        with contextlib.suppress(Exception):
            archive.close()


def _archives(objects: list[Any]) -> list[Any]:
    classes = tuple(
        getattr(sys.modules[module], name)
        for module, name in _WRITTEN_AT_THE_END.items()
        if hasattr(sys.modules.get(module), name)
    )
    return _of_kinds(objects, classes)


def _of_kinds(objects: list[Any], classes: tuple[type, ...]) -> list[Any]:
    # a million objects have a thousand types, and an abstract class is slow to ask
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, classes)}
    return [found for found in objects if type(found) in kinds]


def _layer(file: io.IOBase) -> int:
    if issubclass(type(file), io.TextIOBase):
        return _TEXT
    return _BUFFER if type(file).__module__ == "_io" else _CODEC
