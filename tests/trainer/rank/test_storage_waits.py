"""Which threads wait for a volume or for data."""

from __future__ import annotations

import threading

import pytest

from ddp_trainer.rank.storage_waits import awaits_storage, collectives, storage_awaited


def here() -> bool:
    return awaits_storage(threading.get_ident())


def test_a_wait_within_another_does_not_end_it() -> None:
    assert not here()
    with storage_awaited():
        with storage_awaited():
            assert here()
        assert here()
    assert not here()


def test_in_a_collective_it_waits_for_other_ranks() -> None:
    with storage_awaited():
        with collectives():
            assert not here()
            with storage_awaited():
                assert here()
            with collectives():
                assert not here()
            assert not here()
        assert here()
    with collectives():
        assert not here()
    assert not here()


def test_a_wait_that_fails_is_over() -> None:
    with pytest.raises(OSError, match="stale"), storage_awaited():
        raise OSError("stale file handle")
    assert not here()


def test_a_wait_is_that_of_its_thread_alone() -> None:
    is_inside, may_end = threading.Event(), threading.Event()

    @storage_awaited()
    def read() -> None:
        is_inside.set()
        may_end.wait()

    thread = threading.Thread(target=read)
    thread.start()
    is_inside.wait()
    found = here(), awaits_storage(thread.ident or 0)
    may_end.set()
    thread.join()
    assert found == (False, True)
    assert not awaits_storage(thread.ident or 0)
