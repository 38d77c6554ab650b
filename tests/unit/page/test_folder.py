"""The folder as a source: files that jobs have written are read in bounded time, and not trusted."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.unit.page.conftest import START, TIME, Folder

from ddpjob_operator.follow.lines import Line
from ddpjob_operator.local.volume import lock_job, process_start
from ddpjob_operator.page import files
from ddpjob_operator.page.files import Tail, course_of, snapshots_of
from ddpjob_operator.page.folder import FolderSource, detail_of, log_of
from ddpjob_operator.page.records import record_of
from ddpjob_operator.page.shared import Shared
from ddpjob_operator.page.values import Course, LogQuery

NOW = datetime(2030, 1, 1, 0, 1, tzinfo=UTC)
RUNNING = {"phase": "Running", "attempt": 1, "startTime": TIME.format(0), "progress": {"step": 7, "totalSteps": 10}}


def course(folder: Folder) -> Course:
    return course_of(Shared(folder.root), "digits", [])


def steps(folder: Folder) -> list[tuple[int, float | None, int]]:
    return [(point.step, point.loss, point.attempt) for point in course(folder).kept]


def texts(lines: list[Line]) -> list[tuple[int, str]]:
    return [(line.rank, line.text) for line in lines]


def test_a_step_that_was_trained_again_has_its_later_loss_and_the_earlier_is_lost(folder: Folder) -> None:
    folder.losses("digits", 0, 0, [3.0, 2.0, 1.9, 1.8])
    folder.losses("digits", 1, 2, [1.7, 1.6])
    assert steps(folder) == [(1, 3.0, 0), (2, 2.0, 0), (3, 1.7, 1), (4, 1.6, 1)]
    assert [(point.step, point.loss) for point in course(folder).lost] == [(3, 1.9), (4, 1.8)]


def test_each_step_has_its_throughput(folder: Folder) -> None:
    folder.losses("digits", 0, 0, [3.0], rate=None)
    folder.losses("digits", 1, 1, [2.0, 1.0], rate=800.5)
    assert [point.samples_per_second for point in course(folder).kept] == [None, 800.5, 800.5]


def test_what_an_earlier_run_of_the_name_trained_further_is_not_lost(folder: Folder) -> None:
    folder.losses("digits", 0, 0, [3.0, 2.0, 1.0])
    folder.losses("digits", 0, 1, [2.5], uid="later", created=1)
    validated = {"event": "validated", "eval_loss": 1.0}
    folder.events("digits", validated | {"step": 2}, validated | {"step": 3})
    found = course_of(Shared(folder.root), "digits", files.events_of(Shared(folder.root), "digits"))
    assert [(point.step, point.loss) for point in found.kept] == [(1, 3.0), (2, 2.5)]
    assert found.lost == ()
    assert [point.step for point in found.validation] == [2]


@pytest.mark.parametrize(
    ("begins", "valid"),
    [
        ({"event": "started", "step": 0}, [(3, 0.5)]),
        ({"event": "resumed", "step": 1}, [(1, 1.0), (3, 0.5)]),
    ],
)
def test_an_attempt_makes_void_the_validations_of_steps_after_its_first(
    folder: Folder, begins: dict[str, Any], valid: list[tuple[int, float]]
) -> None:
    folder.losses("digits", 0, 0, [3.0, 2.0, 1.0])
    validated = {"event": "validated", "eval_loss": 1.0}
    before = [validated | {"step": step} for step in (1, 2, 3)]
    folder.events("digits", *before, begins, validated | {"step": 3, "eval_loss": 0.5})
    found = course_of(Shared(folder.root), "digits", files.events_of(Shared(folder.root), "digits"))
    assert [(point.step, point.loss) for point in found.validation] == valid


def test_a_line_that_is_none_is_left_out(folder: Folder) -> None:
    folder.losses("digits", 0, 0, [3.0])
    path = next((folder.root / "logs/digits/losses").iterdir())
    path.write_bytes(path.read_bytes() + b'[1]\n{"step": "x"}\n{"step": 2, "loss": NaN}\n\xff\xfe\n{"step": 3, "lo')
    assert steps(folder) == [(1, 3.0, 0), (2, None, 0)]


def test_a_long_run_is_read_in_samples(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_WHOLE_BYTES", 10_000)
    folder.losses("digits", 0, 0, [1.0 / step for step in range(1, 20_001)])
    found = course(folder)
    assert 1000 < len(found.kept) <= 2001
    assert found.kept[-1].step == 20_000
    assert found.note.startswith("Every n-th step")


def test_a_run_whose_process_is_gone_has_stopped(folder: Folder) -> None:
    folder.status("digits", **RUNNING)
    folder.holds("digits")
    assert record_of(Shared(folder.root), "digits").phase == "Running"
    folder.holds("digits", pid=2**22 + 1)
    assert record_of(Shared(folder.root), "digits").phase == "Stopped"
    answer = detail_of(Shared(folder.root), "digits", NOW).answer
    assert answer.headline.startswith("digits: stopped before its end")
    assert "starts it again; without a snapshot, a script goes on if it loads what it has saved itself" in answer.text()
    folder.status("digits", **RUNNING, snapshot={"step": 40, "time": NOW.isoformat()})
    answer = detail_of(Shared(folder.root), "digits", NOW).answer
    resumes = "The same command as before resumes it from the snapshot of step 40, with --resume in place of --fresh if"
    assert resumes in answer.text()


def test_a_run_whose_number_another_process_has_by_now_has_stopped(folder: Folder) -> None:
    folder.status("digits", **RUNNING)
    with lock_job(folder.root, "digits"):
        assert record_of(Shared(folder.root), "digits").phase == "Running"
    boot, started = (process_start(os.getpid()) or "").split()
    for start in (f"{boot} {int(started) - 1}", f"{boot[::-1]} {started}", "", 7):
        folder.holds("digits", start=start)
        assert record_of(Shared(folder.root), "digits").phase == "Stopped", start


def test_a_run_whose_start_cannot_be_told_runs_if_a_process_has_its_number(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.holds("digits", start=None)
    assert files.is_running(Shared(folder.root), "digits")
    folder.holds("digits", start="boot 7")
    monkeypatch.setattr(files, "process_start", lambda _: None)
    assert files.is_running(Shared(folder.root), "digits")


def test_a_run_that_ends_while_it_is_looked_at_has_not_stopped(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how it has ended, and then its process is gone: both may be after its status was read."""

    def ends(*_: object) -> bool:
        folder.status("digits", **RUNNING | {"phase": "Succeeded"})
        folder.events("events", {"event": "started", "step": 0}, {"event": "finished", "step": 9})
        return False

    folder.status("digits", **RUNNING)
    folder.events("events", {"event": "started", "step": 0})
    monkeypatch.setattr(files, "is_running", ends)
    assert [record_of(Shared(folder.root), name).phase for name in ("digits", "events")] == ["Succeeded", "Succeeded"]


def test_a_job_without_a_status_is_known_by_its_events(folder: Folder) -> None:
    folder.events("digits", {"event": "started", "step": 0, "totalSteps": 9}, {"event": "epoch", "step": 4})
    found = record_of(Shared(folder.root), "digits")
    assert (found.phase, found.status.progress and found.status.progress.step) == ("Unknown", 4)
    folder.events("digits", {"event": "started", "step": 0}, {"event": "finished", "step": 9})
    assert record_of(Shared(folder.root), "digits").phase == "Succeeded"


@pytest.mark.parametrize("length", [0, 1, 30, 60, 90, 120, 2000])
@pytest.mark.parametrize("last", [{"event": "epoch"}, {"event": "finished"}, {"event": "noted", "step": None}])
def test_the_events_of_a_long_run_say_as_much_as_those_of_a_short_one(
    folder: Folder, length: int, last: dict[str, Any]
) -> None:
    begins, goes_on = {"event": "started", "step": 0, "totalSteps": 9}, {"event": "resumed", "attempt": 1}
    epochs = [{"event": "epoch", "step": step, "epoch_loss": 1.0, "attempt": 1} for step in range(length)]
    events = [begins, *epochs, goes_on | {"step": length, "totalSteps": 12}, {"attempt": 1, "step": length} | last]
    folder.events("digits", *events)
    found = record_of(Shared(folder.root), "digits")
    progress = found.status.progress
    assert progress is not None
    assert (found.created, found.status.attempt) == (datetime(2030, 1, 1, tzinfo=UTC), 1)
    assert (progress.step, progress.total_steps) == (length, 12)
    assert found.phase == ("Succeeded" if last["event"] == "finished" else "Unknown")


def test_snapshots_are_newest_first_with_their_size_and_those_set_aside_with_their_reason(folder: Folder) -> None:
    folder.snapshot("digits", 20, files={"a": {"bytes": 5}, "b": {"bytes": 6}}, kind="final")
    folder.snapshot("digits", 10, files="none")
    folder.set_aside("digits", 15, "bytes differ\n")
    found, aside = snapshots_of(Shared(folder.root), "digits")
    assert [(row.step, row.size, row.kind) for row in found] == [(20, 11, "final"), (10, None, "periodic")]
    assert aside == ["step-000000000015.corrupt: bytes differ"]


def test_stacks_of_ranks_that_stalled_are_shown(folder: Folder) -> None:
    folder.stacks("digits", "1-node-0", "rank 0: in all_reduce\n")
    folder.stacks("digits", "0", "rank 1: in backward\n")
    folder.stacks("digits", "2", "")
    assert detail_of(Shared(folder.root), "digits", NOW).stacks == (
        ("stacks-attempt-0.txt", "rank 1: in backward\n"),
        ("stacks-attempt-1-node-0.txt", "rank 0: in all_reduce\n"),
    )


def test_of_any_number_of_stacks_a_bounded_number_is_looked_at(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(300):
        folder.stacks("digits", f"{number:03}", f"{number}\n")
    asked: list[Path] = []

    def status(self: Shared, path: Path) -> os.stat_result:
        asked.append(path)
        return path.stat()

    monkeypatch.setattr(Shared, "status", status)
    found = files.stacks_of(Shared(folder.root), "digits", NOW - timedelta(hours=1))
    assert [text for _, text in found] == [f"{number}\n" for number in range(292, 300)]
    assert len(asked) <= 100


def test_attempts_are_dated_by_their_fencing_tokens(folder: Folder) -> None:
    folder.token("digits", 0)
    folder.token("digits", 1)
    began = files.began_of(Shared(folder.root), "digits")
    assert {attempt: time.timestamp() - START for attempt, time in began.items()} == {0: 0, 1: 10}


def test_attempts_events_and_stacks_of_an_earlier_run_are_not_those_of_this_one(folder: Folder) -> None:
    folder.token("digits", 0, uid="earlier", created=-90)
    folder.token("digits", 1, uid="earlier", created=-90)
    folder.events("digits", {"event": "started", "time": START - 90}, {"event": "resumed", "time": START + 3})
    folder.stacks("digits", "0", "of the run before\n", -80)
    folder.stacks("digits", "1", "own\n", 3)
    folder.status("digits", **RUNNING)
    found = detail_of(Shared(folder.root), "digits", NOW)
    assert (found.began, [row.reason for row in found.events]) == ({}, ["resumed"])
    assert found.stacks == (("stacks-attempt-1.txt", "own\n"),)
    folder.token("digits", 1)
    assert list(detail_of(Shared(folder.root), "digits", NOW).began) == [1]


def test_the_log_has_the_lines_of_the_newest_attempt_with_their_ranks(folder: Folder) -> None:
    folder.status("digits", **RUNNING)
    folder.log("digits-0-0", "of the attempt before\n")
    folder.log("digits-1-0", "---- 2030 digits-1-0 (u1) starts\nold run\n---- 2030 digits-1-0 (u2) starts\nzero\n")
    folder.log("digits-1-1", "[local rank 1] three\ntwo\n")
    shared = Shared(folder.root)
    assert texts(log_of(shared, "digits", LogQuery())) == [(0, "zero"), (3, "three"), (2, "two")]
    assert texts(log_of(shared, "digits", LogQuery(rank=3))) == [(3, "three")]
    assert texts(log_of(shared, "digits", LogQuery(attempt=0))) == [(0, "of the attempt before")]
    assert texts(log_of(shared, "digits", LogQuery(tail=1))) == [(0, "zero"), (2, "two")]


IN_PLACE = [
    {"pod": "digits-0-0", "attempt": 1, "nodeRank": 0},
    {"pod": "digits-0-s0", "attempt": 1, "nodeRank": 2},
    {"pod": "digits-0-0", "attempt": 2, "nodeRank": 1},
]


def restarted_in_place(folder: Folder, attempt: int) -> None:
    folder.status("digits", **RUNNING | {"attempt": attempt}, places=IN_PLACE[: attempt + 1])
    folder.holds("digits")
    for pod in ("digits-0-0", "digits-0-1", "digits-0-2", "digits-0-s0", "digits-1-1", "digits-2-0")[: attempt + 4]:
        folder.log(pod, f"of {pod}\n")


@pytest.mark.parametrize(
    ("attempt", "pods"),
    [(1, ["digits-0-0", "digits-1-1", "digits-0-s0"]), (2, ["digits-2-0", "digits-0-0"])],
)
async def test_a_pod_that_a_restart_has_kept_has_its_lines_in_the_new_attempt_too(
    folder: Folder, attempt: int, pods: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ddpjob run` goes on with its log, which has the name of its first place."""
    restarted_in_place(folder, attempt)
    lines = [(2 * node, f"of {pod}") for node, pod in enumerate(pods)]
    assert texts(log_of(Shared(folder.root), "digits", LogQuery())) == lines
    before = ["digits-0-0", "digits-0-1", "digits-0-2"]
    assert [text for _, text in texts(log_of(Shared(folder.root), "digits", LogQuery(attempt=0)))] == [
        f"of {pod}" for pod in before
    ]
    monkeypatch.setattr(files, "is_running", lambda *_: False)
    followed = [line async for line in FolderSource.at(folder.root).follow("local", "digits", LogQuery())]
    assert texts(followed) == lines


def test_a_pod_that_a_restart_has_kept_is_shown_once_as_what_it_is_now(folder: Folder) -> None:
    restarted_in_place(folder, 1)
    found = detail_of(Shared(folder.root), "digits", NOW)
    assert [(row.name, row.attempt, row.node_rank, row.state) for row in found.pods] == [
        ("digits-0-0", 1, 0, "Running"),
        ("digits-1-1", 1, 1, "Running"),
        ("digits-0-s0", 1, 2, "Running"),
        ("digits-0-1", 0, 1, "Ended"),
        ("digits-0-2", 0, 2, "Ended"),
    ]
    assert found.commands[0].text == f"tail -f {folder.root}/logs/digits/pods/digits-0-0.log"


@pytest.mark.parametrize("newest", ["digits-1-0", "digits-1-s0"])
def test_the_log_to_follow_is_that_of_the_pod_that_took_the_place_last(folder: Folder, newest: str) -> None:
    """With live recovery the attempt goes on with another pod, which may have the name of the first again."""
    places = [{"pod": pod, "attempt": 1, "nodeRank": 0} for pod in ("digits-1-0", "digits-1-s0") if pod != newest]
    folder.status("digits", **RUNNING, places=[*places, {"pod": newest, "attempt": 1, "nodeRank": 0}])
    for pod in ("digits-1-0", "digits-1-s0"):
        folder.log(pod, f"of {pod}\n")
    found = detail_of(Shared(folder.root), "digits", NOW)
    assert found.commands[0].text == f"tail -f {folder.root}/logs/digits/pods/{newest}.log"


def test_what_a_run_has_written_is_its_own_also_where_a_clock_is_behind(folder: Folder) -> None:
    """That of the machine may be set back in the run, that of a file server differs a little."""
    places = [{"pod": "digits-0-0", "attempt": 0, "nodeRank": 0}, {"pod": "digits-1-0", "attempt": 1, "nodeRank": 0}]
    folder.status("digits", **RUNNING, places=places)
    for pod in ("digits-0-0", "digits-1-0", "digits-1-1"):
        path = folder.log(pod, f"of {pod}\n")
        os.utime(path, (START - 3600, START - 3600))
    of_before = {"event": "finished", "time": START - 9}
    begins, goes_on = {"event": "started", "time": START - 2}, {"event": "resumed", "time": START - 3600}
    folder.events("digits", of_before, begins, goes_on)
    folder.stacks("digits", "0", "of the run before\n", -9)
    folder.stacks("digits", "1", "own\n", -2)
    found = detail_of(Shared(folder.root), "digits", NOW)
    assert [pod.name for pod in found.pods] == ["digits-1-0", "digits-0-0"]
    assert texts(list(found.log)) == [(0, "of digits-1-0")]
    assert [row.reason for row in found.events] == ["resumed", "started"]
    assert found.stacks == (("stacks-attempt-1.txt", "own\n"),)


@pytest.mark.parametrize("attempt", [None, 0, 1, 2])
def test_logs_that_a_larger_or_longer_run_before_has_left_are_not_those_of_this_one(
    folder: Folder, attempt: int | None
) -> None:
    folder.status("digits", **RUNNING)
    for pod in ("digits-0-0", "digits-1-0", "digits-1-1"):
        folder.log(pod, "own\n")
    for pod in ("digits-0-1", "digits-1-2"):
        path = folder.log(pod, "of the run before\n")
        os.utime(path, (START - 1, START - 1))
    folder.log("digits-2-0", "of the run before\n")
    logs = log_of(Shared(folder.root), "digits", LogQuery(attempt=attempt))
    ranks = {None: [0, 2], 0: [0], 1: [0, 2], 2: []}
    assert texts(logs) == [(rank, "own") for rank in ranks[attempt]]
    pods = detail_of(Shared(folder.root), "digits", NOW).pods
    assert [pod.name for pod in pods] == ["digits-1-0", "digits-1-1", "digits-0-0"]


@pytest.mark.parametrize(
    "places",
    [7, {"pod": "x"}, [7, {"pod": 7, "attempt": 1, "nodeRank": 0}, {"pod": "digits-0-0", "attempt": 1}],
     [{"pod": f"{up}secret", "attempt": 1, "nodeRank": 1} for up in ("../" * 4, "/", "a\0", "none/")]],
)  # fmt: skip
def test_places_that_are_none_are_left_out(folder: Folder, places: object) -> None:
    folder.status("digits", **RUNNING, places=places)
    folder.log("digits-1-0", "own\n")
    folder.write(folder.root.parent / "secret.log", "secret\n")
    assert texts(log_of(Shared(folder.root), "digits", LogQuery())) == [(0, "own")]


def test_a_log_is_followed_from_where_it_was_read_to_also_if_it_is_begun_anew(folder: Folder) -> None:
    path = folder.log("digits-0-0", "one\ntw")
    shared, tail = Shared(folder.root), Tail(path)
    assert list(tail.read(shared)) == ["one"]
    path.write_text("one\ntwo\nthree\n")
    assert list(tail.read(shared)) == ["two", "three"]
    assert list(tail.read(shared)) == []
    path.write_text("anew\n")
    assert list(tail.read(shared)) == ["anew"]


async def test_a_job_that_has_ended_is_followed_to_its_last_line(folder: Folder) -> None:
    folder.status("digits", **(RUNNING | {"phase": "Succeeded"}))
    folder.log("digits-1-0", "one\ntwo\n")
    found = [line async for line in FolderSource.at(folder.root).follow("local", "digits", LogQuery(tail=1))]
    assert texts(found) == [(0, "two")]


async def test_the_last_lines_of_an_attempt_are_followed_also_if_the_next_begins_at_once(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def restart(_: float) -> None:
        folder.log("digits-0-0", "one\ntwo\nTraceback\nwithout an end")
        folder.log("digits-1-0", "three\n")
        folder.status("digits", **RUNNING | {"phase": "Succeeded"})
        monkeypatch.setattr(files, "is_running", lambda *_: False)

    folder.status("digits", **RUNNING | {"attempt": 0})
    folder.holds("digits")
    folder.log("digits-0-0", "one\ntw")
    monkeypatch.setattr("ddpjob_operator.page.folder.asyncio.sleep", restart)
    found = [line.text async for line in FolderSource.at(folder.root).follow("local", "digits", LogQuery())]
    assert found == ["one", "two", "Traceback", "without an end", "three"]


async def test_the_log_of_a_kept_pod_is_followed_on_where_the_new_attempt_is_seen_before_its_places(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status has the number of the attempt before the pods have their places in it."""

    def begins() -> None:
        folder.status("digits", **RUNNING)
        folder.log("digits-1-1", "of a new pod\n")

    def is_placed() -> None:
        folder.status("digits", **RUNNING, places=IN_PLACE[:1])
        folder.log("digits-0-0", "one\ntwo\nthree\n")

    def ends() -> None:
        folder.log("digits-0-0", "one\ntwo\nthree\nfour\n")
        monkeypatch.setattr(files, "is_running", lambda *_: False)

    looks = iter((begins, is_placed, ends))

    async def look_again(_: float) -> None:
        next(looks)()

    folder.status("digits", **RUNNING | {"attempt": 0})
    folder.holds("digits")
    folder.log("digits-0-0", "one\ntwo\n")
    monkeypatch.setattr("ddpjob_operator.page.folder.asyncio.sleep", look_again)
    found = [line.text async for line in FolderSource.at(folder.root).follow("local", "digits", LogQuery())]
    assert found == ["one", "two", "of a new pod", "three", "four"]


@pytest.mark.parametrize("part", [1, 7, 64, 1 << 20])
def test_a_log_has_the_same_lines_in_parts_of_any_size(
    folder: Folder, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_PART_BYTES", part)
    before = "---- 2030 digits-0-0 (u1) starts\nold run\n---- x\n"
    newest = "---- 2030 digits-0-0 (u2) starts\r\nóne\r\n\n10%\r20%\rsaid ---- 2030 (u3) starts\n---- \nthr"
    lines = ["óne", "", "10%", "20%", "said ---- 2030 (u3) starts", "---- "]
    path = folder.log("digits-0-0", "")
    path.write_bytes((before + newest).encode())
    shared, tail = Shared(folder.root), Tail(path)
    assert list(tail.read(shared)) == lines
    assert list(tail.read(shared)) == []
    assert list(tail.read(shared, over=True)) == ["thr"]
    path.write_bytes((before + newest + "ee\n").encode())
    assert list(Tail(path).read(shared)) == [*lines, "three"]
    assert list(Tail(path).read(shared, 14)) == ["s", "---- ", "three"]


def test_a_line_that_never_ends_is_read_in_pieces(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PART_BYTES", 4)
    monkeypatch.setattr(files, "_LONGEST_LOG_LINE", 8)
    tail = Tail(folder.log("digits-0-0", f"one\n{'x' * 100}\n"))
    lines = list(tail.read(Shared(folder.root)))
    assert (lines[0], "".join(lines[1:])) == ("one", "x" * 100)
    assert max(map(len, lines)) <= 12


async def test_a_page_has_the_end_of_a_large_log(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpjob_operator.page.folder._LOG_BYTES", 9)
    folder.log("digits-0-0", "one\ntwo\nthree\n")
    source = FolderSource.at(folder.root)
    assert texts(list(await source.log("local", "digits", LogQuery()) or ())) == [(0, "wo"), (0, "three")]
    assert texts([line async for line in source.follow("local", "digits", LogQuery())]) == [(0, "wo"), (0, "three")]


def test_links_out_of_the_folder_are_not_followed(folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> None:
    secret = tmp_path_factory.mktemp("elsewhere") / "secret.log"
    secret.write_text("secret\n")
    pods = folder.log("digits-0-0", "own\n").parent
    (pods / "digits-0-1.log").symlink_to(secret)
    shared = Shared(folder.root)
    assert texts(log_of(shared, "digits", LogQuery())) == [(0, "own")]
    assert list(Tail(pods / "digits-0-1.log").read(shared)) == []


def test_a_pipe_in_the_place_of_a_file_holds_nothing_up(folder: Folder) -> None:
    pods = folder.log("digits-0-0", "own\n").parent
    os.mkfifo(pods / "digits-0-1.log")
    os.mkfifo(folder.root / "logs/digits/events.jsonl")
    assert texts(log_of(Shared(folder.root), "digits", LogQuery())) == [(0, "own")]
    assert record_of(Shared(folder.root), "digits").phase == "Unknown"


@pytest.mark.parametrize("name", ["..", ".", "", "../digits", "none", "a\0b", "x" * 300])
def test_a_name_that_leads_elsewhere_is_no_job(folder: Folder, name: str) -> None:
    folder.events("digits", {"event": "started"})
    assert not Shared(folder.root / "logs").has(name)
    assert not Shared(folder.root).has(name)


def test_a_job_with_nothing_yet_has_a_page(folder: Folder) -> None:
    (folder.root / "logs" / "digits").mkdir(parents=True)
    found = detail_of(Shared(folder.root), "digits", NOW)
    assert (found.course.kept, found.pods, found.snapshots, found.events, found.log) == ((), (), (), (), ())


def test_a_folder_that_is_none_has_no_jobs(tmp_path: Path) -> None:
    assert Shared(tmp_path / "none").job_names() == []
