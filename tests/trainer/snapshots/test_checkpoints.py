"""Checkpoints that a program writes itself, with two real ranks: whole and verified, or not there."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from tests.support.starting import starts_processes
from tests.trainer.snapshots.under_torchrun import of_both_ranks, torchrun

from ddp_trainer.snapshots.checkpoints import Checkpoints, _unfinished, share_out
from ddp_trainer.snapshots.trust.disk import is_cached
from ddp_trainer.snapshots.trust.errors import SnapshotError
from ddp_trainer.snapshots.values import Identity, Progress, SnapshotEvent

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
@starts_processes
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the two ranks left their volumes and what they saw."""
    out = tmp_path_factory.mktemp("checkpoints")
    torchrun(2, "checkpoint_ranks.py", out)
    return out


@pytest.fixture(scope="module")
@starts_processes
def seen(out: Path) -> list[dict[str, Any]]:
    return of_both_ranks(out)


def test_what_all_ranks_wrote_is_one_verified_checkpoint_and_each_file_was_summed_once(seen: Any) -> None:
    first, second = (ranks["what_all_ranks_wrote_is_one_checkpoint"] for ranks in seen)
    files = ["parts/rank-0.pt", "parts/rank-1.pt"]
    for rank, result in enumerate((first, second)):
        assert (result["before"], result["found"], result["files"]) == (None, "checkpoint-000000000003", files)
        assert result["loaded"] == {"rank": rank, "step": 3}
    assert sorted(first["summed"] + second["summed"]) == files
    assert len(first["summed"]) == 1, "ranks of one node share the work"
    assert first["events"] == [["saved", 3]]


def test_an_exception_in_one_block_reaches_all_ranks_commits_nothing_and_the_next_checkpoint_works(seen: Any) -> None:
    first, second = (ranks["an_exception_in_the_block_of_one_rank"] for ranks in seen)
    assert second["error"] == ["ValueError", "the disk of this node is broken"]
    kind, message = first["error"]
    assert kind == "SnapshotError"
    assert "step 2 was not committed: rank 1: ValueError: the disk of this node is broken" in message
    assert first["left"] == ["checkpoint-000000000001"]
    assert first["then"] == second["then"] == "checkpoint-000000000004"
    assert first["events"] == ["saved", "failed", "saved"]


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_the_newest_on_every_rank(seen: Any) -> None:
    first, second = (ranks["a_damaged_file"] for ranks in seen)
    assert first["found"] == second["found"] == "checkpoint-000000000001"
    assert first["names"] == ["checkpoint-000000000001", "checkpoint-000000000002.corrupt"]
    assert first["events"][-1] == ["set_aside", 2]


def test_an_attempt_that_was_replaced_commits_nothing_and_stops_on_every_rank(seen: Any) -> None:
    for ranks in seen:
        result = ranks["an_attempt_that_was_replaced"]
        for error in (result["during"], result["after"], result["asking"]):
            assert error[0] == "FencedError", result
        assert [name for name in result["names"] if not name.startswith(".tmp-")] == ["checkpoint-000000000001"]


def test_checkpoints_and_snapshots_of_one_job_are_retained_side_by_side(seen: Any) -> None:
    result = seen[0]["checkpoints_and_snapshots_are_kept_side_by_side"]
    assert result["kept"] == [f"checkpoint-{step:012d}" for step in (40, 50)] + [
        f"step-{step:012d}" for step in (3, 4, 5)
    ]
    assert result["newest"] == "checkpoint-000000000050"
    assert ".tmp-step-000000000009-0-1" in result["left"], "a snapshot that is being written is not a leftover"


def test_a_rank_that_reads_other_files_than_rank_0_stops_all_and_sets_nothing_aside(seen: Any) -> None:
    for ranks in seen:
        result = ranks["a_rank_that_reads_otherwise_sets_nothing_aside"]
        kind, message = result["error"]
        assert kind == "SnapshotError"
        assert "rank 1 reads" in message
        assert "a volume that all nodes share" in message
        assert result["names"] == ["checkpoint-000000000001"]


def test_a_block_that_cannot_be_a_checkpoint_says_why_and_leaves_nothing(seen: Any) -> None:
    for ranks in seen:
        empty, ours, link, twice, dcp, thread = (
            error[1] for error in ranks["blocks_that_cannot_be_committed"]["errors"]
        )
        assert "wrote no file into the folder" in empty
        assert "manifest.json is a name of ours" in ours
        assert "model.pt is a link or no plain file" in link
        assert "the checkpoint of step 1 is still open" in twice
        assert "there is __0_0.distcp and no .metadata beside it" in dcp
        assert "0.pt has changed after the block, so something still writes into the folder" in thread
        assert ranks["blocks_that_cannot_be_committed"]["names"] == []


def test_what_dcp_saved_is_loaded_by_dcp(seen: Any) -> None:
    results = [ranks["what_dcp_saved_is_loaded_by_dcp"] for ranks in seen]
    assert [result["local"] for result in results] == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
    assert all(result["files"] == 3 for result in results)  # .metadata and a file a rank


@pytest.mark.parametrize(
    ("names", "unfinished"),
    [
        ({"__0_0.distcp", "__1_0.distcp", ".metadata"}, set()),
        ({"a/__0_0.distcp", ".metadata"}, {"a/__0_0.distcp"}),
        # dcp.save(…, use_collectives=False)
        ({"__0_0.distcp", "__0_1.distcp", "__0.metadata", "__10_0.distcp", "__10.metadata"}, set()),
        ({"__1_0.distcp", "__0.metadata", "__0_0.distcp"}, {"__1_0.distcp"}),
        ({"__0_0.distcp", ".metadata.tmp", "__0.metadata.tmp"}, {"__0_0.distcp"}),
    ],
    ids=["whole", "of another folder", "one for each rank", "of another rank", "not renamed"],
)
def test_a_save_of_dcp_is_whole_with_the_metadata_of_all_ranks_or_of_its_own(
    names: set[str], unfinished: set[str]
) -> None:
    assert _unfinished(names) == unfinished


def test_a_rank_that_never_comes_is_an_error_after_the_deadline_and_no_checkpoint(seen: Any) -> None:
    kind, message = seen[0]["a_rank_that_never_comes"]["error"]
    assert kind == "SnapshotError"
    assert "not all ranks came to the begin of its block within 5 s" in message
    assert seen[0]["a_rank_that_never_comes"]["names"] == ["checkpoint-000000000001"]


def test_one_rank_finds_what_two_have_written(out: Path, seen: Any) -> None:
    directory = out / "what_all_ranks_wrote_is_one_checkpoint" / "digits"
    newest = Checkpoints(directory, keep=2, identity=Identity("digits", "uid-1", 1, 1, 0, 1)).newest()
    assert newest is not None
    assert (newest[0].step, newest[0].world_size) == (3, 2)


def test_a_checkpoint_that_cannot_be_read_just_now_is_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2, identity=Identity("digits", "uid-1", 1, 1, 0, 1))
    with checkpoints.writing(Progress(7, 0, 0)) as folder:
        (folder / "model.pt").write_bytes(b"model")

    def fails(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("ddp_trainer.snapshots.checkpoints.verify_files", fails)
    with pytest.raises(SnapshotError, match=r"cannot be read: checkpoint-0+7 \(.*Input/output error\)"):
        checkpoints.newest()


def test_a_checkpoint_that_cannot_be_read_just_now_is_reported_where_the_one_before_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[SnapshotEvent] = []
    identity = Identity("digits", "uid-1", 1, 1, 0, 1)
    checkpoints = Checkpoints(tmp_path, keep=2, identity=identity, on_event=events.append)
    for step in (7, 8):
        with checkpoints.writing(Progress(step, 0, 0)) as folder:
            (folder / "model.pt").write_bytes(b"model")

    def reads_the_older(directory: Path, _: object) -> None:
        if directory == checkpoints.path(8):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("ddp_trainer.snapshots.checkpoints.verify_files", reads_the_older)
    newest = checkpoints.newest()
    assert newest is not None
    assert newest[0].step == 7
    assert [(event.result, event.step) for event in events] == [("saved", 7), ("saved", 8), ("unreadable", 8)]
    assert checkpoints.path(8).is_dir()


@pytest.mark.parametrize(
    ("sizes", "cached", "shares"),
    [
        # two nodes of two ranks, each of which wrote one large file; a small one that no node has in memory any more
        (
            [100, 90, 5],
            [[True, False, False], [True, False, False], [False, True, False], [False, True, False]],
            [[0], [2], [1], []],
        ),
        ([7, 7, 7, 7], [[True] * 4, [True] * 4], [[0, 2], [1, 3]]),
        ([10, 1, 1], (), [[0], [1, 2]]),
        ([], (), [[], []]),
    ],
)
def test_each_file_is_read_by_one_rank_of_a_node_that_has_it_in_memory(sizes: Any, cached: Any, shares: Any) -> None:
    assert share_out(sizes, cached, len(shares)) == shares


def test_a_file_that_was_just_written_is_in_memory_and_one_whose_pages_were_dropped_is_not(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(3 << 20))
    assert is_cached(file)
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert not is_cached(file)
    (tmp_path / "empty").touch()
    assert not is_cached(tmp_path / "empty")
