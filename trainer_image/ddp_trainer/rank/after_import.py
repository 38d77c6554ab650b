"""What is done when a module is imported: torch takes seconds, and a script may never import it."""

from __future__ import annotations

import importlib.machinery
import multiprocessing.process
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any


def after_import(name: str, action: Callable[[], None]) -> Callable[[], None]:
    """Call `action` once the module `name` has been imported, now if it is. Returns what takes that back."""
    if name in sys.modules:
        action()
        return lambda: None
    return while_importing(name, partial(_then, action))


def while_importing(name: str, context: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    """Import the module `name` within such a context, unless it has been. Returns what takes that back."""
    if name in sys.modules:
        return lambda: None
    finder = _ImportedOnce(name, context)
    sys.meta_path.insert(0, finder)
    return finder.remove


@contextmanager
def _then(action: Callable[[], None]) -> Iterator[None]:
    yield
    action()


def after_import_in_all_processes(name: str, action: Callable[[], None]) -> None:
    """The same, also in each process that this one starts by multiprocessing from now on. One that is forked has what
    was done here, and does it again; for one that is spawned, `action` is pickled.
    """
    after_import(name, action)
    process = multiprocessing.process.BaseProcess
    start = process.start

    def start_with_action(self: Any) -> None:
        target = getattr(self, "_target", None)
        if target is not None and name in sys.modules:
            self._target = _WithAction(target, name, action)
        start(self)

    process.start = start_with_action  # type: ignore[method-assign]


class _WithAction:
    """The target of a process that may begin without anything that this one has imported."""

    def __init__(self, target: Callable[..., Any], name: str, action: Callable[[], None]) -> None:
        self._target, self._name, self._action = target, name, action

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        after_import(self._name, self._action)
        return self._target(*args, **kwargs)


class _ImportedOnce(MetaPathFinder):
    """Finds one module as the other finders do, and executes it within a context."""

    def __init__(self, name: str, context: Callable[[], AbstractContextManager[None]]) -> None:
        self._name = name
        self._context = context

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
            with self._context():
                execute(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def remove(self) -> None:
        """Leave imports alone from now on."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
