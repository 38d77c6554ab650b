"""Folders of the volume are no packages, though a script that lies beside them could import them.

Python takes a folder without `__init__.py` for a namespace package. A script in the root of the volume would find
`datasets` there, and a library would take it for Hugging Face's package of that name.
"""

from __future__ import annotations

import sys
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
    SourcelessFileLoader,
)
from pathlib import Path
from types import ModuleType

from ddp_trainer.rank.work_folder import FOLDERS


class _VolumeFinder(FileFinder):
    """Finds what other finders find in a directory, except for namespace packages with the names of FOLDERS."""

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        found = super().find_spec(fullname, target)
        return None if found is not None and found.loader is None and fullname in FOLDERS else found


def hide_folders(volume: Path) -> None:
    """From now on the folders of `volume` are not imported in this process. What has an `__init__.py` still is."""
    for path in {str(volume), str(volume.resolve())}:
        sys.path_importer_cache[path] = _VolumeFinder(
            path,
            (ExtensionFileLoader, EXTENSION_SUFFIXES),
            (SourceFileLoader, SOURCE_SUFFIXES),
            (SourcelessFileLoader, BYTECODE_SUFFIXES),
        )
