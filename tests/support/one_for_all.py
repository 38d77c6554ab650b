"""What the workers of one test run have in common: the first that needs it starts it, and ends it after the last."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def one_for_all(folder: Path, name: str, start: Callable[[], AbstractContextManager[Any]]) -> Iterator[Any]:
    """What `start` yields, a JSON value, in the worker that comes first; the others get the same value.

    It ends with the block of the first, once those of the others have ended. `folder` is the same for all workers.
    """
    found = folder / f"{name}.json"
    with (folder / f"{name}.start").open("w") as starting, (folder / f"{name}.users").open("w") as users:
        fcntl.flock(starting, fcntl.LOCK_EX)
        if found.exists():
            fcntl.flock(users, fcntl.LOCK_SH)
            fcntl.flock(starting, fcntl.LOCK_UN)
            yield json.loads(found.read_text())
            return
        with start() as value:
            found.write_text(json.dumps(value))
            fcntl.flock(starting, fcntl.LOCK_UN)
            try:
                yield value
            finally:
                fcntl.flock(starting, fcntl.LOCK_EX)  # a worker that comes now starts it anew
                found.unlink()
                fcntl.flock(users, fcntl.LOCK_EX)


class Turns:
    """Blocks of all workers that share a file: some run alone, others beside each other."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._is_alone = False

    def alone(self) -> AbstractContextManager[None]:
        """Wait until no other worker is in a block, and keep them waiting. May be nested."""
        return self._locked(fcntl.LOCK_EX)

    def beside_others(self) -> AbstractContextManager[None]:
        """Wait until no other worker is alone. Within a block of `alone` that is no wait."""
        return self._locked(fcntl.LOCK_SH)

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        if self._is_alone:
            yield
            return
        with self._file.open("w") as lock:
            fcntl.flock(lock, how)
            self._is_alone = how == fcntl.LOCK_EX
            try:
                yield
            finally:
                self._is_alone = False
