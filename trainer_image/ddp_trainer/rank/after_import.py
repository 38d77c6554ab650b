"""Calls that wait for a module to be imported: torch takes seconds, and a script may never import it."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType


def after_import(name: str, action: Callable[[], None]) -> Callable[[], None]:
    """Call `action` once the module `name` has been imported, now if it is. Returns what takes that back."""
    if name in sys.modules:
        action()
        return lambda: None
    finder = _ImportedOnce(name, action)
    sys.meta_path.insert(0, finder)
    return finder.remove


class _ImportedOnce(MetaPathFinder):
    """Finds one module as the other finders do, and calls `action` when it has been executed."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        # it may only be looked up, and be imported later: transformers asks so whether torch is there
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        finders = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((found for found in finders if found is not None), None)
        if spec is None or spec.loader is None:
            return spec
        loader, execute = spec.loader, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # the loader belongs to the module from now on, and answers for itself
            vars(loader).pop("exec_module", None)
            self.remove()
            execute(module)
            self._action()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def remove(self) -> None:
        """Leave imports alone from now on."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
