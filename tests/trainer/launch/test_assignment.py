"""A pod's place in the gang, as the kubelet writes it into the pod."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ddp_trainer.launch.assignment import Assignment, AssignmentError, AssignmentWatch, read_assignment

GOOD = {"attempt": "3", "node-rank": "1", "nodes": "2"}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text)


def test_three_files_name_the_place(tmp_path):
    write(tmp_path, GOOD)
    assert read_assignment(tmp_path) == Assignment(attempt=3, node_rank=1, nodes=2)


def test_a_pod_without_a_rank_is_a_spare(tmp_path):
    write(tmp_path, GOOD | {"node-rank": "none\n"})
    place = read_assignment(tmp_path)
    assert place.node_rank is None
    assert str(place) == "attempt 3, a spare"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("attempt", "", "attempt is '': it must be a whole number from 0 to 999999$"),
        ("attempt", "-1", "attempt is '-1'"),
        ("attempt", "1000000", "from 0 to 999999"),
        ("nodes", "0", "from 1"),
        ("nodes", "two", "nodes is 'two'"),
        ("node-rank", "2", "node-rank is '2': it must be a whole number from 0 to 1, or none"),
        ("node-rank", "None", "or none"),
        ("node-rank", "\u0661", "node-rank"),
    ],
)
def test_a_file_that_makes_no_sense_is_named_with_what_it_must_be(tmp_path, name, text, words):
    write(tmp_path, GOOD | {name: text})
    with pytest.raises(AssignmentError, match=words):
        read_assignment(tmp_path)


@pytest.mark.parametrize("name", GOOD)
def test_a_file_that_is_missing_is_named(tmp_path, name):
    write(tmp_path, {key: text for key, text in GOOD.items() if key != name})
    with pytest.raises(AssignmentError, match=f"lacks the file {name}: .*labels"):
        read_assignment(tmp_path)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    write(tmp_path, GOOD)
    (tmp_path / "nodes").write_bytes(b"\xff")
    with pytest.raises(AssignmentError, match="cannot be read"):
        read_assignment(tmp_path)


def test_a_watch_says_why_it_sees_nothing_and_sees_again(tmp_path):
    write(tmp_path, GOOD | {"nodes": "x"})
    watch = AssignmentWatch(tmp_path)
    assert (watch.look(), watch.problem) == (
        None,
        f"{tmp_path}/nodes is 'x': it must be a whole number from 1 to 100000",
    )
    write(tmp_path, GOOD)
    assert (watch.look(), watch.problem) == (Assignment(3, 1, 2), None)


def test_the_files_are_of_one_moment_however_often_they_are_swapped(tmp_path, place):
    """Attempt, rank and size are the same number in every version, so a mixture would show."""
    done = threading.Event()

    def swap() -> None:
        version = 1
        while not done.is_set():
            version = version % 50 + 1
            place(tmp_path, attempt=version, node_rank=version, nodes=version + 1)

    place(tmp_path, attempt=1, node_rank=1, nodes=2)
    writer = threading.Thread(target=swap)
    writer.start()
    watch = AssignmentWatch(tmp_path)
    seen: list[Assignment] = []
    try:
        while len({found.attempt for found in seen}) < 40:
            seen.extend(found for _ in range(20) if (found := watch.look()) is not None)
    finally:
        done.set()
        writer.join()
    assert {found.attempt - (found.node_rank or 0) for found in seen} == {0}
    assert {found.nodes - found.attempt for found in seen} == {1}
