"""A folder that jobs write to: nothing outside it is read, also if a job changes it while it is looked at."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.page.conftest import Folder

from ddpjob_operator.page import shared as module
from ddpjob_operator.page.files import course_of, snapshots_of, stacks_of
from ddpjob_operator.page.shared import Shared


@pytest.fixture
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A folder of somebody else, with a job."""
    found = Folder(tmp_path_factory.mktemp("elsewhere"))
    found.losses("digits", 0, 0, [3.0])
    found.snapshot("digits", 7)
    (found.log("digits-0-0", "secret\n").parents[1] / "stacks-attempt-0.txt").write_text("secret")
    return found


def everything(shared: Shared) -> tuple[object, ...]:
    """What is read of a job."""
    logs = shared.logs("digits")
    return (
        *course_of(shared, "digits", []).kept,
        *snapshots_of(shared, "digits")[0],
        *stacks_of(shared, "digits"),
        *shared.names(logs),
        *shared.read(logs / "pods/digits-0-0.log", 100),
    )


@pytest.mark.parametrize("place", ["logs", "checkpoints", "logs/digits", "checkpoints/digits", "logs/digits/losses"])
def test_a_folder_that_is_a_link_is_no_folder(folder: Folder, elsewhere: Folder, place: str) -> None:
    link = folder.root / place
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(elsewhere.root / place)
    shared = Shared(folder.root)
    assert everything(elsewhere_of(elsewhere))
    assert [found for found in everything(shared) if found != "losses"] == []
    assert not shared.is_folder(link)
    assert shared.names(link) == shared.folders(link) == []


def elsewhere_of(found: Folder) -> Shared:
    return Shared(found.root)


def test_a_folder_that_becomes_a_link_while_it_is_looked_at_leads_nowhere(
    folder: Folder, elsewhere: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder.log("digits-0-0", "own\n")
    look: Callable[..., int] = os.open

    def late(name: str | Path, *rest: int, **where: int) -> int:
        if name == "pods":
            path.parent.rename(folder.root / "before")
            path.parent.symlink_to(elsewhere.root / "logs/digits/pods")
        return look(name, *rest, **where)

    assert Shared(folder.root).read(path, 100) == b"own\n"
    monkeypatch.setattr(module.os, "open", late)
    assert Shared(folder.root).read(path, 100) == b""


def test_the_folder_of_a_job_that_is_a_link_is_not_followed_from_the_volume_on(
    folder: Folder, elsewhere: Folder
) -> None:
    (folder.root / "jobs").mkdir()
    (folder.root / "jobs/digits").symlink_to(elsewhere.root)
    assert Shared(folder.root / "jobs/digits").has("digits"), "the link would work"
    assert not Shared(folder.root / "jobs/digits", folder.root).has("digits")
    beside = folder.log("other-0-0", "of another job\n")
    assert Shared(folder.root / "jobs", folder.root).read(beside, 100) == b""


def test_a_path_that_leads_up_is_none(folder: Folder) -> None:
    path = folder.log("digits-0-0", "own\n")
    shared = Shared(folder.root / "logs")
    assert shared.read(folder.root / "logs/../logs/digits/pods" / path.name, 100) == b""
    assert shared.read(path, 100) == b"own\n"


def test_of_a_folder_with_very_many_files_some_are_looked_at(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_ENTRIES", 3)
    for number in range(9):
        folder.log(f"digits-{number}-0", "own\n")
    assert len(Shared(folder.root).names(folder.root / "logs/digits/pods")) == 3


def test_many_files_of_losses_are_read_in_samples_of_them_all(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpjob_operator.page.files._WHOLE_BYTES", 10_000)
    for attempt in range(50):
        folder.losses("digits", attempt, 100 * attempt, [1.0] * 100)
    found = course_of(Shared(folder.root), "digits", [])
    assert {point.attempt for point in found.kept} == set(range(50))
    assert len(found.kept) <= 2100
    assert found.note.startswith("Every n-th step")
