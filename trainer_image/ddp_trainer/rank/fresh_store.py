"""A store without the keys of ranks that have ended.

Plain torchrun keeps one store for all its restarts, and torch writes the addresses of all ranks under the same keys
each time: a rank that starts again may connect to one that has ended, and the restart hangs or fails. So the process
group of each start has a prefix of its own in the store. torchrun gives the ranks no number of that start: its agents
count the restarts of their own node only. Rank 0 therefore makes up a name, and answers the token that each of the
others has left. A token of an ended rank may be answered too; only one that runs confirms.
"""

from __future__ import annotations

import time
import uuid
from typing import Final

from torch._C._distributed_c10d import PrefixStore, Store

LOOK_SECONDS: Final = 0.02
_MOST_NAMED: Final = 16
"""Ranks in a message."""


def fresh_store(store: Store, rank: int, size: int, *, timeout_seconds: float) -> Store:
    """The part of `store` that only the `size` ranks of this start use. Every rank calls it.

    Raises TimeoutError on rank 0 if a rank does not come, and what the store raises on the others.
    """
    name = _name_start(store, size, timeout_seconds) if rank == 0 else _join_start(store, rank)
    return PrefixStore(name, store)


def _name_start(store: Store, size: int, timeout_seconds: float) -> str:
    name = uuid.uuid4().hex
    missing = list(range(1, size))
    deadline = time.monotonic() + timeout_seconds
    while True:
        for rank in missing:
            if store.check([_token_key(rank)]):
                store.set(_answer_key(store.get(_token_key(rank)).decode()), name)
        missing = [rank for rank in missing if not store.check([_confirmation_key(name, rank)])]
        if not missing:
            return name
        if time.monotonic() > deadline:
            more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
            raise TimeoutError(f"ranks {missing[:_MOST_NAMED]}{more} did not start within {timeout_seconds:g} s")
        time.sleep(LOOK_SECONDS)


def _join_start(store: Store, rank: int) -> str:
    token = uuid.uuid4().hex
    store.set(_token_key(rank), token)
    name: str = store.get(_answer_key(token)).decode()
    store.set(_confirmation_key(name, rank), "")
    return name


def _token_key(rank: int) -> str:
    return f"ddp_trainer/token/{rank}"


def _answer_key(token: str) -> str:
    return f"ddp_trainer/answer/{token}"


def _confirmation_key(name: str, rank: int) -> str:
    return f"ddp_trainer/confirmed/{name}/{rank}"
