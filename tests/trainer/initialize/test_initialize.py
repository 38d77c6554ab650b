"""Data on the volume: whole or not at all, checked, once, and by nobody else's leave.

Real sources: a web server on this machine, mounted folders, scripts; object stores and hubs are in test_sources.py.
"""

from __future__ import annotations

import errno
import http.client
import http.server
import json
import os
import shutil
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.processes import all_end
from tests.trainer.data_server import BODY, DIGEST, Web, cut_short, left_over, refusing, whole

from ddp_trainer.contract.addresses import public, shown
from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.contract.json_files import read_json, write_json
from ddp_trainer.initialize.__main__ import MARKERS, Initializer, Size, Stopped, measure, parse, run
from ddp_trainer.initialize.sources import FetchError


def pvcs(shared: Path) -> Path:
    """Where claims are mounted: one named `models`, with a folder of two files."""
    folder = shared.parent / "source" / "models" / "tiny"
    (folder / "weights").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "weights" / "0.bin").write_bytes(BODY)
    return shared.parent / "source"


def test_a_file_is_there_after_it_was_fetched_and_is_not_fetched_again(web: Web, shared: Path) -> None:
    task = Initializer("dataset", "datasets/digits.bin", source=web.url, sha256=DIGEST)
    for _ in range(2):
        run(task, shared, shared)
        assert (shared / "datasets" / "digits.bin").read_bytes() == BODY
    assert len(web.asked) == 1
    assert left_over(shared) == []
    (marker,) = (shared / ".ddpjob" / "initialized").glob("*.json")
    assert marker.stem == task.digest
    known = read_json(marker)
    assert known is not None
    assert (known["version"], known["path"], known["files"], known["bytes"]) == (1, task.path, 1, len(BODY))


@pytest.mark.parametrize("path", ["datasets/digits.bin", "digits.bin"])
def test_a_file_below_a_link_is_put_where_that_leads(web: Web, shared: Path, path: str) -> None:
    """The volume, or a folder of it that leads to another one."""
    (shared / "nvme").mkdir()
    (shared / "datasets").symlink_to("nvme")
    volume = shared if "/" in path else shared / "datasets"
    task = Initializer("dataset", path, source=web.url, sha256=DIGEST)
    for _ in range(2):
        run(task, volume, shared)
    assert (shared / "nvme" / "digits.bin").read_bytes() == BODY
    assert len(web.asked) == 1


def test_what_a_newer_operator_sends_besides_is_ignored(shared: Path) -> None:
    given = {"name": "data", "path": "data", "source": "s3://bucket/key", "fromTheFuture": {"min": 1}}
    task, _ = parse({"DDPJOB_SHARED": str(shared), "DDPJOB_INITIALIZER": json.dumps(given)})
    assert task == Initializer("data", "data", source="s3://bucket/key")


def test_another_job_that_asks_for_the_same_under_another_name_finds_it(web: Web, shared: Path) -> None:
    for name in ("dataset", "training-data"):
        run(Initializer(name, "datasets/digits.bin", source=web.url), shared, shared)
    assert len(web.asked) == 1


@pytest.mark.parametrize("change", ["sha256", "path", "source"])
def test_another_task_is_done_although_one_like_it_was(web: Web, shared: Path, change: str) -> None:
    first = {"name": "a", "path": "datasets/digits.bin", "source": web.url}
    other = {"sha256": DIGEST, "path": "datasets/other.bin", "source": f"{web.url}?v=2"}
    run(Initializer(**first), shared, shared)
    run(Initializer(**first | {change: other[change]}), shared, shared)
    assert len(web.asked) == 2


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(BODY[1:])])
def test_what_is_no_longer_what_was_put_there_is_fetched_again(
    web: Web, shared: Path, damage: Callable[[Path], None]
) -> None:
    task = Initializer("dataset", "digits.bin", source=web.url)
    run(task, shared, shared)
    damage(shared / "digits.bin")
    run(task, shared, shared)
    assert (shared / "digits.bin").read_bytes() == BODY


def test_what_was_replaced_by_a_file_of_equal_size_is_fetched_again_where_its_checksum_is_known(
    web: Web, shared: Path
) -> None:
    task = Initializer("dataset", "digits.bin", source=web.url, sha256=DIGEST)
    run(task, shared, shared)
    (shared / "digits.bin").write_bytes(bytes(len(BODY)))
    run(task, shared, shared)
    assert (shared / "digits.bin").read_bytes() == BODY


def test_a_folder_that_gained_a_file_is_not_fetched_again(shared: Path) -> None:
    task, mounted = Initializer("model", "models/tiny", source="pvc://models/tiny"), pvcs(shared)
    run(task, shared, mounted)
    (shared / "models" / "tiny" / "labels.cache").write_text("made by a job")
    (mounted / "models" / "tiny" / "config.json").write_text("changed")
    run(task, shared, mounted)
    assert (shared / "models" / "tiny" / "labels.cache").exists()
    assert (shared / "models" / "tiny" / "config.json").read_text() == "{}"


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / "weights" / "0.bin").write_bytes(BODY[1:]),
    ],
    ids=["a file less", "a byte less"],
)
def test_a_folder_that_lost_something_is_fetched_again(shared: Path, damage: Callable[[Path], None]) -> None:
    task, mounted = Initializer("model", "models/tiny", source="pvc://models/tiny"), pvcs(shared)
    run(task, shared, mounted)
    damage(shared / "models" / "tiny")
    run(task, shared, mounted)
    assert (shared / "models" / "tiny" / "config.json").read_text() == "{}"
    assert (shared / "models" / "tiny" / "weights" / "0.bin").read_bytes() == BODY


def mark_as_done(task: Initializer, shared: Path, files: int = 1, size: int = 1) -> None:
    """As a run of it did that left so much."""
    known = {"version": 1, "name": task.name, "path": task.path, "files": files, "bytes": size}
    write_json(shared / MARKERS / f"{task.digest}.json", known)


def test_a_script_that_was_done_is_not_run_again_as_something_is_added_or_removed(shared: Path) -> None:
    task = Initializer("unpack", "set", script="exit 1")
    mark_as_done(task, shared, files=2, size=100)
    (shared / "set").mkdir()
    for name in ("a", "b", "c"):
        run(task, shared, shared)
        (shared / "set" / name).touch()


def test_a_script_that_fails_when_it_runs_again_does_not_count_as_done(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        (shared / "set").touch()
        raise FetchError("exit code 1")

    monkeypatch.setattr("ddp_trainer.initialize.__main__._run_script", fail)
    task = Initializer("unpack", "set", script="exit 1")
    mark_as_done(task, shared)
    for _ in range(2):
        with pytest.raises(FetchError):
            run(task, shared, shared)


def test_what_another_source_replaced_by_as_many_bytes_is_fetched_again(web: Web, shared: Path) -> None:
    first, second = (Initializer("labels", "data/labels.bin", source=f"{web.url}?v={n}") for n in (1, 2))
    for task in (first, second, second, first):
        run(task, shared, shared)
    assert web.asked == ["/digits.bin?v=1", "/digits.bin?v=2", "/digits.bin?v=1"]


def test_a_source_below_the_folder_of_another_is_put_there_once(web: Web, shared: Path) -> None:
    mounted = pvcs(shared)
    around, below = (
        Initializer("model", "tiny", source="pvc://models/tiny"),
        Initializer("labels", "tiny/labels.bin", source=web.url),
    )
    for _ in range(2):
        for task in (around, below):
            run(task, shared, mounted)
    assert len(web.asked) == 1


@pytest.mark.parametrize("change", ["truncated", "truncated, and refused once", "edited"])
def test_a_folder_loses_nothing_to_what_was_put_into_it_and_is_fetched_again(
    web: Web, shared: Path, change: str
) -> None:
    mounted, below = pvcs(shared), Initializer("labels", "tiny/labels.bin", source=web.url)
    around = Initializer("model", "tiny", source="pvc://models/tiny")
    for task in (around, below):
        run(task, shared, mounted)
    (shared / "tiny" / "index.cache").write_text("made by a job")
    if change == "edited":
        below = Initializer("labels", "tiny/labels.bin", source=f"{web.url}?v=2")
    else:
        (shared / "tiny" / "labels.bin").write_bytes(BODY[1:])
    if change == "truncated, and refused once":
        web.answer = refusing(503)
        with pytest.raises(FetchError):
            run(below, shared, mounted)
        web.answer = whole
    for task in (below, around, below):
        run(task, shared, mounted)
    assert (shared / "tiny" / "labels.bin").read_bytes() == BODY
    assert (shared / "tiny" / "index.cache").exists(), "the folder was fetched again"


@pytest.mark.parametrize("is_folder", [False, True])
def test_what_a_job_removes_while_a_folder_is_measured_is_no_error(
    shared: Path, is_folder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, is_file, scan = shared / "set", Path.is_file, os.scandir
    (folder / "cache").mkdir(parents=True)
    (folder / "a").write_bytes(b"12345")
    if not is_folder:
        (folder / "b").touch()

    def remove_after(path: Path) -> bool:
        was = is_file(path)
        if path.name == "b":
            path.unlink(missing_ok=True)
        return was

    def remove_before(path: Any) -> Any:
        if Path(path).name == "cache":
            Path(path).rmdir()
        return scan(path)

    monkeypatch.setattr(Path, "is_file", remove_after)
    monkeypatch.setattr(os, "scandir", remove_before)
    assert measure(folder) == Size(files=1, bytes=5)


def test_a_folder_that_cannot_be_listed_is_not_measured_without_it(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(OSError, match="Input/output error"):
        measure(shared)


SOURCE, SCRIPT = {"source": "s3://bucket/new"}, {"script": "tokenize"}


@pytest.mark.parametrize(
    ("new", "path", "is_there", "is_lost"),
    [
        ({**SOURCE, "path": "data/set"}, "data/set", True, True),
        ({**SOURCE, "path": "data/./set"}, "data/set/", True, True),
        ({**SOURCE, "path": "data/set"}, "data/set/tokens", True, True),
        ({**SOURCE, "path": "data/set"}, "data/settings", True, False),
        ({**SOURCE, "path": "data/set/labels"}, "data/set", True, True),
        ({**SOURCE, "path": "data/set/labels"}, "data/set", False, False),
        ({**SCRIPT, "path": "data/set", "name": "old"}, "data/set", True, True),
        ({**SCRIPT, "path": "data/set"}, "data/set", True, False),
        ({**SCRIPT, "path": "data", "name": "old"}, "data/set", True, False),
    ],
)
def test_a_marker_is_removed_with_what_it_knows_of(
    shared: Path, new: dict[str, str], path: str, is_there: bool, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_there:
        (shared / new["path"]).mkdir(parents=True)
    monkeypatch.setattr("ddp_trainer.initialize.__main__._run_script", lambda *_: None)
    monkeypatch.setattr("ddp_trainer.initialize.__main__.fetch", lambda _, part, __: part.write_text("new"))
    known = Initializer("old", path, source="s3://bucket/old")
    mark_as_done(known, shared)
    run(Initializer(**{"name": "new", **new}), shared, shared)
    assert (shared / MARKERS / f"{known.digest}.json").exists() is not is_lost


def test_what_is_not_fetched_whole_costs_no_marker(web: Web, shared: Path) -> None:
    known = Initializer("old", "digits.bin", source="s3://bucket/old")
    mark_as_done(known, shared)
    web.answer = cut_short
    with pytest.raises(FetchError):
        run(Initializer("new", "digits.bin", source=web.url), shared, shared)
    assert (shared / MARKERS / f"{known.digest}.json").exists()


def test_a_marker_without_sizes_counts_for_none(web: Web, shared: Path) -> None:
    task = Initializer("dataset", "digits.bin", source=web.url)
    (shared / "digits.bin").touch()
    write_json(shared / MARKERS / f"{task.digest}.json", {"version": 1, "files": "many"})
    run(task, shared, shared)
    assert (shared / "digits.bin").read_bytes() == BODY


def test_a_file_with_another_checksum_never_gets_its_name(web: Web, shared: Path) -> None:
    task = Initializer("dataset", "digits.bin", source=web.url, sha256="0" * 64)
    with pytest.raises(FetchError, match=f"has the SHA-256 {DIGEST} and not 000"):
        run(task, shared, shared)
    assert not (shared / "digits.bin").exists()
    assert left_over(shared) == []
    assert list(shared.rglob("*.json")) == []


def test_a_connection_that_breaks_is_not_taken_for_the_end(web: Web, shared: Path) -> None:
    web.answer = cut_short
    with pytest.raises(FetchError, match=f"{len(BODY)} bytes came of {2 * len(BODY)}"):
        run(Initializer("dataset", "digits.bin", source=web.url), shared, shared)
    assert not (shared / "digits.bin").exists()


def test_what_was_there_stays_until_what_replaces_it_is_whole(web: Web, shared: Path) -> None:
    (shared / "digits.bin").write_text("before")
    web.answer = cut_short
    task = Initializer("dataset", "digits.bin", source=web.url)
    with pytest.raises(FetchError):
        run(task, shared, shared)
    assert (shared / "digits.bin").read_text() == "before"
    web.answer = whole
    run(task, shared, shared)
    assert (shared / "digits.bin").read_bytes() == BODY


@pytest.mark.parametrize(
    ("code", "kind"), [(404, UserError), (403, UserError), (500, FetchError), (503, FetchError), (429, FetchError)]
)
def test_an_answer_decides_whether_to_ask_again(web: Web, shared: Path, code: int, kind: type[Exception]) -> None:
    web.answer = refusing(code)
    with pytest.raises(kind, match=f"answered {code}"):
        run(Initializer("dataset", "digits.bin", source=web.url), shared, shared)


@pytest.mark.parametrize("code", [202, 204, 206])
def test_an_answer_that_promises_data_or_a_part_of_it_is_not_taken_for_it(web: Web, shared: Path, code: int) -> None:
    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(code)
        request.send_header("Content-Length", "0")
        request.end_headers()

    web.answer = answer
    with pytest.raises(FetchError, match=f"answered {code} "):
        run(Initializer("dataset", "digits.bin", source=web.url), shared, shared)
    assert not (shared / "digits.bin").exists()


@pytest.mark.parametrize("error", [ssl.SSLError(1, "bad record mac"), OSError(errno.EHOSTUNREACH, "No route to host")])
def test_a_network_that_breaks_is_not_taken_for_the_volume(
    web: Web, shared: Path, error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> bytes:
        raise error

    monkeypatch.setattr(http.client.HTTPResponse, "read", fail)
    with pytest.raises(FetchError, match=str(error.strerror)):
        run(Initializer("dataset", "digits.bin", source=web.url), shared, shared)


def test_a_server_that_is_not_there_may_be_later(web: Web, shared: Path) -> None:
    web.close()
    with pytest.raises(FetchError, match="Connection refused"):
        run(Initializer("dataset", "digits.bin", source=web.url), shared, shared)


def test_a_folder_of_a_mounted_claim_is_copied_as_it_is(shared: Path) -> None:
    mounted = pvcs(shared)
    run(Initializer("model", "models/tiny", source="pvc://models/tiny"), shared, mounted)
    assert (shared / "models" / "tiny" / "config.json").read_text() == "{}"
    assert (shared / "models" / "tiny" / "weights" / "0.bin").read_bytes() == BODY
    (mounted / "models" / "tiny" / "config.json").unlink()
    run(Initializer("model", "models/tiny", source="pvc://models/tiny"), shared, mounted)
    assert (shared / "models" / "tiny" / "config.json").exists(), "the second time there was nothing to do"


def test_a_folder_that_cannot_be_read_in_part_is_not_taken_for_whole(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted, scan = pvcs(shared), os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("weights"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match=r"may not be read .*securityContext"):
        run(Initializer("model", "models/tiny", source="pvc://models/tiny"), shared, mounted)
    assert not (shared / "models" / "tiny").exists()


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda folder: (folder / "a").symlink_to("/nowhere/a"), "a in pvc://models/tiny is a link that leads nowhere"),
        (lambda folder: (folder / "a").symlink_to("a"), "a in pvc://models/tiny is a link that leads nowhere"),
        (
            lambda folder: (folder / "weights" / "up").symlink_to(".."),
            "weights/up in pvc://models/tiny is a link to a folder that it is in",
        ),
        (lambda folder: os.mkfifo(folder / "a"), "a in pvc://models/tiny is neither a file nor a folder"),
    ],
    ids=["a broken link", "a link to itself", "a link upwards", "a pipe"],
)
def test_what_cannot_be_copied_of_a_claim_is_named(shared: Path, add: Callable[[Path], None], message: str) -> None:
    mounted = pvcs(shared)
    add(mounted / "models" / "tiny")
    with pytest.raises(UserError, match=message):
        run(Initializer("model", "models/tiny", source="pvc://models/tiny"), shared, mounted)


def test_a_link_of_a_claim_is_copied_as_what_it_leads_to(shared: Path) -> None:
    mounted = pvcs(shared)
    for name in ("first", "second"):
        (mounted / "models" / "tiny" / name).symlink_to("weights")
    run(Initializer("model", "tiny", source="pvc://models/tiny"), shared, mounted)
    assert (shared / "tiny" / "second" / "0.bin").read_bytes() == BODY
    assert not (shared / "tiny" / "second").is_symlink()


def test_what_a_file_system_keeps_for_itself_is_no_data_of_a_claim(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted, scan = pvcs(shared), os.scandir
    (mounted / "models" / "lost+found").mkdir()

    def refuse(path: Any) -> Any:
        if str(path).endswith("lost+found"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    run(Initializer("models", "models", source="pvc://models"), shared, mounted)
    assert [path.name for path in (shared / "models").iterdir()] == ["tiny"]


def test_a_folder_replaces_a_folder_whole(shared: Path) -> None:
    mounted = pvcs(shared)
    (shared / "models" / "tiny").mkdir(parents=True)
    (shared / "models" / "tiny" / "stale.bin").write_text("x")
    run(Initializer("model", "models/tiny", source="pvc://models/tiny"), shared, mounted)
    assert sorted(path.name for path in (shared / "models" / "tiny").iterdir()) == ["config.json", "weights"]
    assert left_over(shared) == []


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_folder_that_nothing_replaced_in_the_end_is_put_back(
    web: Web, shared: Path, is_killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shared / "tiny").mkdir()
    (shared / "tiny" / "before.bin").write_text("x")
    if is_killed:
        (shared / "tiny").rename(shared / ".tiny.old")
        web.answer = refusing(503)
        with pytest.raises(FetchError):
            run(Initializer("model", "tiny", source=web.url), shared, shared)
    else:
        replace = Path.replace

        def stop(path: Path, to: Path) -> Path:
            if path.name.endswith(".part"):
                raise Stopped
            return replace(path, to)

        monkeypatch.setattr(Path, "replace", stop)
        with pytest.raises(Stopped):
            run(Initializer("model", "tiny", source="pvc://models/tiny"), shared, pvcs(shared))
    assert [path.name for path in (shared / "tiny").iterdir()] == ["before.bin"]
    assert left_over(shared) == []


@pytest.fixture
def half_removed(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Initializer:
    """A task whose folder is in its place, killed while it removed the one before."""
    (shared / "tiny").mkdir()
    for name in ("first.bin", "second.bin"):
        (shared / "tiny" / name).touch()
    task, mounted = Initializer("model", "tiny", source="pvc://models/tiny"), pvcs(shared)
    mark_as_done(task, shared, files=2, size=len(BODY) + len("{}"))

    def remove_one(folder: Path) -> None:
        (folder / "first.bin").unlink()
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", remove_one)
        with pytest.raises(Stopped):
            run(task, shared, mounted)
    assert len(left_over(shared)) == 1
    return task


def test_a_folder_of_which_a_part_was_removed_is_not_put_back(
    web: Web, shared: Path, half_removed: Initializer
) -> None:
    shutil.rmtree(shared / "tiny")
    web.answer = refusing(503)
    with pytest.raises(FetchError):
        run(Initializer("model", "tiny", source=web.url), shared, shared)
    assert not (shared / "tiny").exists()


def test_a_run_that_has_nothing_to_do_removes_what_a_killed_one_has_left(
    shared: Path, half_removed: Initializer
) -> None:
    run(half_removed, shared, shared / "no claims")
    assert (shared / "tiny" / "config.json").exists()
    assert left_over(shared) == []


def test_the_user_in_an_address_is_sent_to_its_host_alone(web: Web, shared: Path) -> None:
    sent: list[tuple[str, str | None]] = []

    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        sent.append((request.path, request.headers["Authorization"]))
        if request.path == "/elsewhere":
            whole(request)
            return
        request.send_response(302)
        request.send_header("Location", "/elsewhere")
        request.end_headers()

    web.answer = answer
    run(Initializer("x", "data", source=web.url.replace("//", "//me:p%40ss@")), shared, shared)
    assert sent == [("/digits.bin", "Basic bWU6cEBzcw=="), ("/elsewhere", None)]  # me:p@ss


@pytest.mark.parametrize(
    ("written", "asked"),
    [("/two words?q=a b", "/two%20words?q=a%20b"), ("/données", "/donn%C3%A9es"), ("/50%25%20#top", "/50%25%20")],
)
def test_an_address_is_asked_for_as_a_browser_does(web: Web, shared: Path, written: str, asked: str) -> None:
    run(Initializer("x", "data", source=web.url.replace("/digits.bin", written)), shared, shared)
    assert web.asked == [asked]


def test_a_link_that_leads_nowhere_makes_way_for_a_folder(shared: Path) -> None:
    (shared / "tiny").symlink_to("gone")
    run(Initializer("model", "tiny", source="pvc://models/tiny"), shared, pvcs(shared))
    assert (shared / "tiny" / "config.json").read_text() == "{}"
    assert left_over(shared) == []


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"source": "pvc://models/none"}, "there is no pvc://models/none"),
        ({"source": "pvc://models/tiny", "sha256": DIGEST}, "is a folder"),
        ({"source": "http:///x"}, "names no host"),
        ({"source": "http://[::1/x"}, "is no address of a web server"),
        ({"source": "http://localhost:port/x"}, "is no address of a web server"),
        ({"source": f"http://{'a' * 64}.example/x"}, "is no address of a web server"),
        ({"script": "true"}, "the script has ended, and there is no data"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.processes
def test_what_can_never_work_as_written_is_the_users_to_correct(
    shared: Path, task: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run(Initializer("x", "data", **task), shared, pvcs(shared))


@pytest.mark.processes
def test_a_script_runs_on_the_volume_once(shared: Path) -> None:
    task = Initializer("unpack", "datasets/count", script="mkdir -p datasets && pwd >> datasets/count")
    for _ in range(2):
        run(task, shared, shared)
    assert (shared / "datasets" / "count").read_text() == f"{shared}\n"


@pytest.mark.processes
def test_what_a_script_made_is_checked_as_what_is_fetched_is(shared: Path) -> None:
    task = Initializer("unpack", "a", script="echo b > a", sha256="0" * 64)
    with pytest.raises(FetchError, match=r"a has the SHA-256 0263829989b6.* and not 000"):
        run(task, shared, shared)
    assert list((shared / MARKERS).glob("*.json")) == []


@pytest.mark.processes
def test_a_script_has_the_environment_of_its_pod_without_what_is_for_the_initializer(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for_the_initializer = {"DDPJOB_INITIALIZER", "DDPJOB_TERMINATION_LOG"}
    for name in (*for_the_initializer, "HF_TOKEN"):
        monkeypatch.setenv(name, "given")
    run(Initializer("unpack", "names", script="env | cut -d= -f1 > names"), shared, shared)
    names = set((shared / "names").read_text().split())
    assert "HF_TOKEN" in names
    assert not names & for_the_initializer


@pytest.mark.processes
def test_a_script_that_fails_is_tried_again_and_leaves_nothing_running(shared: Path) -> None:
    task = Initializer("unpack", "done", script="sleep 600 & echo $! > pid; test -e ready && touch done")
    with pytest.raises(FetchError, match="exit code 1"):
        run(task, shared, shared)
    all_end([int((shared / "pid").read_text())])
    (shared / "ready").touch()
    run(task, shared, shared)


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("https://me:pass@host/a?X-Signature=abc failed", "https://***@host/a?*** failed"),
        ("url='https://host/a?token=abc'", "url='https://host/a?***'"),
        (
            "from https://me:it's@host/a, https://me:pa@ss@host/b?c",
            "from https://***@host/a, https://***@host/b?***",
        ),
        ("https://me:se/cret@host/x", "https://***@host/x"),
        ("https://me:se?cret@host/x", "https://***"),
        ("https://host?mail=me@home&token=abc", "https://host?***"),
        ("git+https://tok@github.com/org/repo.git@v1.2#egg=x", "git+https://***@github.com/org/repo.git@v1.2#egg=x"),
        ("ssh://git@github.com/org/repo.git@main", "ssh://***@github.com/org/repo.git@main"),
        ("http://minio:9000/bucket/file@v2.bin", "http://minio:9000/bucket/file@v2.bin"),
        ("http://[::1]:9000/bucket/file@v2.bin", "http://[::1]:9000/bucket/file@v2.bin"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("no address here?", "no address here?"),
    ],
)
def test_what_is_secret_in_an_address_is_not_shown(text: str, public: str) -> None:
    assert shown(text) == public


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("https://me:pass@host/two words?X-Signature=abc", "https://***@host/two words?***"),
        ("https://host/it's?X-Signature=abc", "https://host/it's?***"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("hf://datasets/owner/name@main/x", "hf://datasets/owner/name@main/x"),
        ("https://host/name@main/x", "https://host/name@main/x"),
        ("https://host:8080/x", "https://host:8080/x"),
        ("https://me:se/cret@host/x", "https://***@host/x"),
        ("https://me:12/34@host/x?X-Signature=abc", "https://***@host/x?***"),
        ("https://me:se@cr/et@host/x", "https://***@host/x"),
        ("https://me:se?cret@host/x", "https://***"),
        ("https://me:pass@host/a?mail=me@home&X-Signature=abc", "https://***"),
    ],
)
def test_what_is_secret_in_a_source_is_not_shown_whatever_characters_it_has(source: str, what: str) -> None:
    assert public(source) == what
    assert shown(what) == what


@pytest.mark.parametrize("password", ["q7/z9", "q7?z9", "q7@[w8/z9"])
def test_a_password_that_is_not_in_percent_codes_is_in_no_message(
    shared: Path, password: str, capsys: pytest.CaptureFixture[str]
) -> None:
    task = Initializer("x", "data", source=f"http://me:{password}@host/x")
    with pytest.raises(UserError) as error:
        run(task, shared, shared)
    said = str(error.value) + "".join(capsys.readouterr())
    for part in ("q7", "w8", "z9"):
        assert part not in said


def test_a_driver_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    import fsspec

    files = fsspec.filesystem("memory")
    files.pipe({"/bucket/ok.bin": BODY, "/bucket/../evil": b"x"})
    files.find = lambda root, detail: {"/bucket/../evil": {"size": 1}}
    from ddp_trainer.initialize.sources import copy_tree

    with pytest.raises(FetchError, match="is not inside"):
        copy_tree(files, "/bucket", tmp_path / "data", "memory://bucket")
    assert not (tmp_path / "evil").exists()
