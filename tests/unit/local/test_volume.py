"""The shared folder and its lock."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ddpjob_operator.local.volume import (
    VolumeError,
    created_after_others,
    has_written_files,
    lock_job,
    log_tail,
    newest_snapshot,
    open_shared,
    process_start,
    written_by_runs,
)
from ddpjob_operator.submit.pack import pack

HOLD = """
import sys
from pathlib import Path
from ddpjob_operator.local.volume import lock_job
with lock_job(Path(sys.argv[1]), "digits"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_files_that_a_script_has_written_differ_from_those_of_its_code(tmp_path: Path) -> None:
    work = tmp_path / "work" / "digits"
    assert not has_written_files(tmp_path, "digits")
    (work / "pkg" / "__pycache__").mkdir(parents=True)
    (work / "pkg" / "__pycache__" / "model.pyc").touch()
    (work / "pkg" / "model.py").write_text("layers = 2")
    (work / "pkg" / "link").symlink_to("model.py")
    assert has_written_files(tmp_path, "digits")
    sha256 = hashlib.sha256(b"layers = 2").hexdigest()
    (tmp_path / "work" / ".digits").mkdir()
    (tmp_path / "work" / ".digits" / "code.json").write_text(json.dumps({"files": {"pkg/model.py": [sha256]}}))
    assert not has_written_files(tmp_path, "digits")
    (work / "pkg" / "model.py").write_text("layers = 3")
    assert has_written_files(tmp_path, "digits"), "the script has changed it"
    (work / "pkg" / "model.py").write_text("layers = 2")
    (work / "pkg" / "snapshot.pt").touch()
    assert has_written_files(tmp_path, "digits")


def test_a_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    work, record = tmp_path / "work" / "digits", tmp_path / "work" / ".digits" / "code.json"
    work.mkdir(parents=True)
    record.parent.mkdir()
    os.mkfifo(work / "pipe")
    for files in ({}, {"pipe": [hashlib.sha256(b"").hexdigest()]}):
        record.write_text(json.dumps({"files": files}))
        found: list[bool] = []
        looks = threading.Thread(target=lambda found=found: found.append(has_written_files(tmp_path, "digits")))
        looks.daemon = True
        looks.start()
        looks.join(60)
        assert found == [True]


def test_a_new_folder_has_what_the_volume_has(tmp_path: Path) -> None:
    shared = open_shared(tmp_path / "new" / "shared")
    assert sorted(entry.name for entry in shared.iterdir()) == [".gitignore", "checkpoints", "datasets", "logs"]
    assert (shared / ".gitignore").read_text() == "*\n", "it is no code of the folder that it is in"


def test_a_folder_that_somebody_made_is_left_as_it_is(tmp_path: Path) -> None:
    assert not (open_shared(tmp_path) / ".gitignore").exists()


@pytest.mark.parametrize(("place", "exclude"), [(".", True), ("runs", False)])
def test_what_a_run_writes_into_a_folder_that_was_there_is_no_code(tmp_path: Path, place: str, exclude: bool) -> None:
    """`ddpjob run --shared .` leaves the folders of runs out, and every command what is in a folder that a run made."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "code").mkdir()
    for name in ("train.py", "code/model.py"):
        (tmp_path / name).write_text("print(1)")
    before = pack(tmp_path)
    shared = open_shared(tmp_path / place)
    with lock_job(shared, "train"):
        pass
    for name in ("checkpoints/train/step-000000000010/state", "logs/train/status.json", "work/train/train.py"):
        (shared / name).parent.mkdir(parents=True)
        (shared / name).write_text("written")
    if exclude:
        for name in (f"code/{before.sha256}/train.py", f"envs/{'0' * 32}/x.py", "work/.train/code.json"):
            (shared / name).parent.mkdir(parents=True)
            (shared / name).write_text("written")
        for name in ("checkpoints", "logs", "work"):
            (shared / name / ".gitignore").unlink()  # as in a folder of an earlier version
    after = pack(tmp_path, written_by_runs(shared) if exclude else ())
    assert (after.sha256, after.left_out) == (before.sha256, ())


def test_packages_with_the_names_of_the_folders_of_runs_are_code(tmp_path: Path) -> None:
    packages = {f"{name}/utils/save.py" for name in ("checkpoints", "logs", "work", "envs")}
    for name in packages:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("print(1)")
    shared = open_shared(tmp_path)
    with lock_job(shared, "train"):
        assert pack(tmp_path, written_by_runs(shared)).paths == packages


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shared").write_text("")
    with pytest.raises(VolumeError, match=r"--shared .*/shared: Not a directory; choose a folder"):
        open_shared(tmp_path / "shared")


def test_a_home_directory_that_is_not_known_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(VolumeError, match=r"--shared ~no-such-user/x: ~no-such-user is no home directory; write the"):
        open_shared(Path("~no-such-user/x"))
    assert not list(tmp_path.iterdir())


def test_an_unwritable_folder_is_refused() -> None:
    with pytest.raises(VolumeError, match=r"--shared /proc/ddpjob: .*; choose a folder that you may write to"):
        open_shared(Path("/proc/ddpjob"))


def test_the_newest_snapshot_is_found_by_its_name(tmp_path: Path) -> None:
    assert newest_snapshot(tmp_path, "digits") is None
    for name in ("step-000000000040", "step-000000000100", "step-000000000120.corrupt", ".tmp-step-140-0-7"):
        (tmp_path / "checkpoints" / "digits" / name).mkdir(parents=True)
    assert newest_snapshot(tmp_path, "digits") == 100


NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("tokens", "created"),
    [
        ([], NOON),
        ([NOON.replace(hour=11)], NOON),
        ([NOON], NOON.replace(second=1)),
        ([NOON.replace(year=2031), NOON.replace(hour=11)], datetime(2031, 1, 1, 12, 0, 1, tzinfo=UTC)),
    ],
    ids=["the first run", "an earlier run", "a run of the same second", "a run whose clock was ahead"],
)
def test_a_run_is_created_after_all_runs_before_it(tmp_path: Path, tokens: list[datetime], created: datetime) -> None:
    attempts = tmp_path / "checkpoints" / "digits" / "attempts"
    if tokens:
        attempts.mkdir(parents=True)
        (attempts / ".nfs000000000000").touch()
        (attempts / "999999999999-000002-uid").touch()  # no time
    for token in tokens:
        (attempts / f"{int(token.timestamp()):012d}-000002-uid").touch()
    assert created_after_others(tmp_path, "digits", NOON) == created


def test_two_jobs_share_a_folder_and_one_job_does_not_run_twice(tmp_path: Path) -> None:
    refusal = rf"job digits is already running .*process {os.getpid()} on "
    with lock_job(tmp_path, "digits"), lock_job(tmp_path, "other"), pytest.raises(VolumeError, match=refusal):
        lock_job(tmp_path, "digits").__enter__()
    with lock_job(tmp_path, "digits"):
        pass


@pytest.mark.processes
def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(VolumeError, match=f"process {holder.pid} on "), lock_job(tmp_path, "digits"):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait(60)
        with lock_job(tmp_path, "digits"):
            pass


def test_the_start_of_a_process_stays_and_is_none_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = process_start(os.getpid())
    assert found is not None
    assert found == process_start(os.getpid())
    assert found.split()[0] == (process_start(os.getppid()) or "").split()[0], "the boot of the machine"
    assert process_start(2**22 + 1) is None
    named = "1 (a) b) c) S " + " ".join(str(number) for number in range(4, 53))
    monkeypatch.setattr(Path, "read_text", lambda path, **_: named if path.name == "stat" else "boot\n")
    assert process_start(1) == "boot 22"


def test_of_a_progress_bar_the_tail_of_a_log_has_the_last_state(tmp_path: Path) -> None:
    log = tmp_path / "digits-0-0.log"
    bar = "".join(f"\r{step} of 999" for step in range(900))
    log.write_text(f"---- digits-0-0 (u1) starts\nloss 0.5\n{bar}\nTraceback\nKilled\n", newline="")
    assert log_tail(log, lines=4) == "loss 0.5\n899 of 999\nTraceback\nKilled"


def test_the_tail_of_a_log_is_what_the_pod_itself_wrote_last(tmp_path: Path) -> None:
    log = tmp_path / "digits-0-0.log"
    assert log_tail(log, "u2") == ""
    log.write_text("---- digits-0-0 (u1) starts\nof another run\n---- digits-0-0 (u2) starts\nstep 1\nTraceback\n")
    assert log_tail(log, "u2") == log_tail(log) == "step 1\nTraceback"
    assert log_tail(log, lines=1) == "Traceback"
    with log.open("a") as file:
        file.writelines(f"line {number}\n" for number in range(2000))
    tail = log_tail(log, "u2").splitlines()
    assert (tail[0], tail[-1]) == ("line 1960", "line 1999")
