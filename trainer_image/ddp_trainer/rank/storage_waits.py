"""Which threads wait for a volume or for data, and so for no other rank.

They use no processor meanwhile, like one in a collective that nothing wakes: live recovery has to tell them apart.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_waiting: set[int] = set()


@contextmanager
def storage_awaited() -> Iterator[None]:
    """Around what may wait for a volume or for data, and has no collective in it."""
    thread = threading.get_ident()
    if thread in _waiting:  # the outermost ends the wait
        yield
        return
    _waiting.add(thread)
    try:
        yield
    finally:
        _waiting.remove(thread)


@contextmanager
def collectives() -> Iterator[None]:
    """Around collectives inside of `storage_awaited`."""
    thread = threading.get_ident()
    if thread not in _waiting:
        yield
        return
    _waiting.remove(thread)
    try:
        yield
    finally:
        _waiting.add(thread)


def awaits_storage(thread: int) -> bool:
    """Whether the thread with this identifier does. From any thread."""
    return thread in _waiting
