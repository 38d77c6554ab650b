"""Only rank 0 of the newest view renames a snapshot, whatever a process that was cut off believes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp_trainer.live.membership import Membership
from ddp_trainer.live.register import Register
from ddp_trainer.live.views import Member, View
from ddp_trainer.snapshots.trust.errors import SnapshotError
from ddp_trainer.snapshots.trust.fence import Fence
from ddp_trainer.snapshots.trust.manifest import FileEntry, Manifest
from ddp_trainer.snapshots.trust.store import SnapshotStore

OTHER = Member("other", 1, 0, "127.0.0.1", 1)


@pytest.fixture
def views(tmp_path: Path) -> Path:
    return tmp_path / "views"


@pytest.fixture
def first(views: Path) -> Iterator[Membership]:
    """Rank 0 of view 0, with another rank beside it."""
    membership = Membership(Register(views), node_rank=0, local_rank=0, host="127.0.0.1", least=1, timeout_seconds=60.0)
    propose(views, 0, membership.own, OTHER)
    yield membership
    membership.stop()


def propose(views: Path, number: int, *members: Member) -> None:
    Register(views).propose(View(number, members, members[0].id, "127.0.0.1", 1))


def save(membership: Membership, directory: Path, meanwhile: Callable[[], None]) -> bool:
    """Whether a snapshot of step 7 is there once this process was done, if `meanwhile` happens while it writes."""
    fence = Fence.acquire(directory, created=1, attempt=0, uid="u", check_view=membership.check_leads)
    store = SnapshotStore(directory, keep=1, fence=fence)

    def write(folder: Path) -> dict[str, FileEntry]:
        files = {"model.safetensors": store.disk.create(folder / "model.safetensors", [b"weights"])}
        meanwhile()
        return files

    try:
        store.save(write, Manifest("digits", "u", 0, 7, 0, 56, 2, "ddp", 8, 1763703999.0), expected_bytes=7)
    except SnapshotError:
        assert not list(directory.glob(".*7*")), "a temporary folder was left"
        return False
    return store.path(7).exists()


def test_rank_0_saves(first: Membership, tmp_path: Path) -> None:
    assert save(first, tmp_path, lambda: None)


def test_rank_0_saves_although_another_rank_is_lost_meanwhile(first: Membership, views: Path, tmp_path: Path) -> None:
    assert save(first, tmp_path, lambda: propose(views, 1, first.own))


def test_an_old_rank_0_without_which_the_others_went_on_renames_nothing(
    first: Membership, views: Path, tmp_path: Path
) -> None:
    assert not save(first, tmp_path, lambda: propose(views, 1, OTHER))


def test_a_rank_0_that_has_become_rank_1_renames_nothing(first: Membership, views: Path, tmp_path: Path) -> None:
    newer = Member("newer", 0, 0, "127.0.0.1", 1)
    assert not save(first, tmp_path, lambda: propose(views, 1, newer, first.own))


def test_a_rank_0_that_cannot_read_the_views_renames_nothing(first: Membership, views: Path, tmp_path: Path) -> None:
    assert not save(first, tmp_path, lambda: shutil.rmtree(views))
