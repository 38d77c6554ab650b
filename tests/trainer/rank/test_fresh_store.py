"""What ranks of a start find in a store that also has what ranks of former starts left there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore, Store

from ddp_trainer.rank import fresh_store as module
from ddp_trainer.rank.fresh_store import fresh_store

RANKS = 3


def started(store: Store, ranks: range = range(RANKS)) -> list[Store]:
    """What each of these ranks gets, which start at the same time."""
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(lambda rank: fresh_store(store, rank, RANKS, timeout_seconds=30), ranks))


def test_the_ranks_of_a_start_share_their_keys_with_each_other_and_with_no_other_start() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=30))
    starts = [started(store) for _ in range(3)]
    for number, start in enumerate(starts):
        start[0].set("address", str(number))
    found = [[rank.get("address") for rank in start] for start in starts]
    assert found == [[str(number).encode()] * RANKS for number in range(3)]


def test_of_many_ranks_that_do_not_come_few_are_named() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2, .*, 15, 16\] and 1007 more did not start within 0 s"):
        fresh_store(HashStore(), 0, 1024, timeout_seconds=0.0)


def test_a_rank_that_ended_before_it_was_answered_is_not_taken_for_one_that_runs() -> None:
    store = HashStore()
    store.set(module._token_key(1), "of a rank that was killed")
    store.set(module._token_key(2), "of another")
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] did not start within 0.1 s"):
        fresh_store(store, 0, RANKS, timeout_seconds=0.1)
    first, *others = started(store)
    first.set("address", "here")
    assert [other.get("address") for other in others] == [b"here", b"here"]
