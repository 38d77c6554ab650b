"""What a pod prints is passed on as it comes and copied to the volume, whatever that does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.waiting import PATIENCE_SECONDS, eventually
from tests.trainer.launch.conftest import StartPod

from ddp_trainer.contract.environment import PodEnvironment
from ddp_trainer.contract.pod_logs import STAMP, header
from ddp_trainer.launch import output
from ddp_trainer.launch.output import OutputCopy, copy_output
from ddp_trainer.logs.pods import Wanted, read_lines

PRINTS = """
    import os, sys
    rank = os.environ["RANK"]
    sys.stdout.write(f"hello from {rank}\\n")  # at once: pieces of print stand between those of other ranks
    sys.stdout.flush()
    print("10%\\r50%\\r100%", file=sys.stderr, flush=True)
    sys.stderr.write(f"bye from {rank}")
"""


@pytest.fixture
def named(pod: PodEnvironment, tmp_path: Path) -> PodEnvironment:
    """Node rank 0 of attempt 2, which copies what it prints."""
    return replace(pod, shared=tmp_path, attempt=2, name="digits-2-0", keeps_output=True)


@pytest.fixture
def _streams_come_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Standard output and error of this process, which a copy takes over. Its end waits for a disk that is busy."""
    monkeypatch.setattr(output, "CLOSE_SECONDS", PATIENCE_SECONDS)
    kept = [os.dup(number) for number in (1, 2)]
    yield
    for number, before in zip((1, 2), kept, strict=True):
        os.dup2(before, number)
        os.close(before)


copies = pytest.mark.usefixtures("_streams_come_back")


def log_of(pod: PodEnvironment) -> Path:
    found = pod.output_log
    assert found is not None
    return found


def texts(shared: Path, job: str, attempt: int | None = None) -> list[str]:
    return [line.text for line in read_lines(shared, job, Wanted(attempt=attempt))]


@pytest.mark.processes
def test_what_launcher_and_ranks_print_is_in_the_pods_log_and_on_the_volume(start_pod: StartPod) -> None:
    pod = start_pod(PRINTS, DDPJOB_KEEP_OUTPUT="true", DDPJOB_PROCS_PER_NODE="2")
    assert pod.wait() == 0, pod.log
    first, *lines = (pod.shared / "logs" / "digits" / "pods" / "digits-0-0.log").read_text().splitlines()
    assert re.fullmatch(r"---- \S+Z digits-0-0 \(uid-pod0\) starts, 2 ranks, with times", first)
    assert all(STAMP.match(line) for line in lines)
    found = read_lines(pod.shared, "digits", Wanted())
    said = {(line.rank, line.text) for line in found}
    assert {(0, "hello from 0"), (0, "bye from 0"), (1, "hello from 1"), (1, "bye from 1"), (1, "100%")} <= said
    assert (0, "hello from 1") not in said
    assert any("Succeeded" in text for _, text in said), "the launcher's own last line"
    assert "[local rank 1] hello from 1" in pod.log
    assert "[local rank 1] bye from 1" in pod.log
    assert "[local rank 0]" not in pod.log
    assert "10%" in pod.log, "which has what comes as it comes"


@pytest.mark.processes
def test_without_the_variable_nothing_is_copied(start_pod: StartPod) -> None:
    pod = start_pod("print('hello')")
    assert pod.wait() == 0, pod.log
    assert not (pod.shared / "logs" / "digits" / "pods").exists()


@copies
def test_a_last_line_that_has_no_end_is_copied_too(named: PodEnvironment) -> None:
    copy = OutputCopy(named)
    os.write(1, b"with an end\nwithout one")
    os.write(2, b"an error without one")
    copy.close()
    assert texts(named.shared, named.job) == ["with an end", "without one", "an error without one"]


@copies
def test_in_another_place_the_pod_has_another_file(named: PodEnvironment) -> None:
    copy = OutputCopy(replace(named, node_rank=None))
    os.write(1, b"as a spare\n")
    for attempt in (2, 3):
        copy.go_on(replace(named, attempt=attempt))
        os.write(1, f"attempt {attempt}\n".encode())
    copy.close()
    assert [texts(named.shared, named.job, attempt) for attempt in (2, 3)] == [["attempt 2"], ["attempt 3"]]


@copies
def test_a_later_run_of_the_name_goes_on_in_the_file_with_a_header(named: PodEnvironment) -> None:
    for run in ("first", "second"):
        copy = OutputCopy(replace(named, uid=run))
        os.write(2, f"of the {run} run\n".encode())
        copy.close()
    assert "of the first run" in log_of(named).read_text()
    assert texts(named.shared, named.job) == ["of the second run"]


@copies
def test_a_file_loses_its_older_half_before_it_is_too_large(
    named: PodEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "MOST_BYTES", 20_000)
    monkeypatch.setattr(output, "SECONDS_BETWEEN_WRITES", 0.0)
    copy = OutputCopy(named)
    path = log_of(named)
    for number in range(1000):
        os.write(1, f"line {number}\n".encode())
        if number % 100 == 99:
            eventually(lambda last=number: path.exists() and f"line {last}\n" in path.read_text(), "it is written")
    copy.close()
    assert path.stat().st_size <= 20_000
    said, *lines = texts(named.shared, named.job)
    assert said == "ddpjob: older lines than the next are not kept"
    assert lines == [f"line {number}" for number in range(1000 - len(lines), 1000)]
    assert len(lines) > 100


@copies
def test_a_volume_that_cannot_be_written_is_said_once_and_written_when_it_can_be(
    named: PodEnvironment, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "SECONDS_BETWEEN_TRIES", 0.01)
    (named.shared / "logs").write_text("in the way")
    copy = OutputCopy(named)
    os.write(1, b"early\n")
    said = ""

    def reported() -> bool:
        nonlocal said
        said += "".join(capfd.readouterr())
        return "cannot be written" in said

    eventually(reported, "the error is said")
    (named.shared / "logs").unlink()
    eventually(log_of(named).exists, "the file is there")
    copy.close()
    assert "early\n" in said, "which is passed on all the same"
    assert said.count("cannot be written") == 1
    assert texts(named.shared, named.job)[0] == "early"


@copies
def test_a_volume_that_hangs_holds_up_neither_the_output_nor_the_end(
    named: PodEnvironment, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(output, "MOST_WAITING", 10_000)
    path = log_of(named)
    path.parent.mkdir(parents=True)
    os.mkfifo(path)  # to open it waits until somebody reads
    copy = OutputCopy(named)
    for number in range(200):
        os.write(1, f"line {number}\n".encode())
    copy.close()
    assert capfd.readouterr().out.splitlines()[-1] == "line 199"
    with path.open("rb") as late:  # lets the thread go
        assert header(time.time(), "digits-2-0", named.uid, named.procs_per_node)[:4] == late.read(4)


@copies
def test_output_that_comes_without_a_pause_keeps_no_error_waiting(
    named: PodEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed_on, read = threading.Event(), output._Stream.read

    def without_a_pause(stream: output._Stream) -> bytes:
        if stream._number == 1 and not passed_on.is_set():
            return b"output\n"
        chunk = read(stream)
        if b"error" in chunk:
            passed_on.set()
        return chunk

    monkeypatch.setattr(output._Stream, "read", without_a_pause)
    copy = OutputCopy(named)
    os.write(2, b"error\n")
    is_passed_on = passed_on.wait(PATIENCE_SECONDS)
    passed_on.set()
    copy.close()
    assert is_passed_on
    assert "error" in texts(named.shared, named.job)


@pytest.mark.processes
def test_a_reader_of_the_pods_log_that_is_gone_stops_no_rank(tmp_path: Path, named: PodEnvironment) -> None:
    program = """
import os
from dataclasses import replace
from pathlib import Path
from ddp_trainer.contract.environment import parse_pod
from ddp_trainer.launch.output import OutputCopy
copy = OutputCopy(parse_pod(os.environ))
for number in range(3):
    os.write(1, f"line {number}\\n".encode())
copy.close()
"""
    env = {
        "DDPJOB_NAME": named.job, "DDPJOB_NAMESPACE": "d", "DDPJOB_UID": "u", "DDPJOB_ATTEMPT": "0",
        "DDPJOB_NODE_RANK": "0", "DDPJOB_NODES": "1", "DDPJOB_PROCS_PER_NODE": "1", "DDPJOB_POD_NAME": "x-0-0",
        "POD_IP": "127.0.0.1", "DDPJOB_RDZV_HOST": "h", "DDPJOB_RDZV_PORT": "1", "DDPJOB_STATUS_PORT": "0",
        "DDPJOB_SHARED": str(tmp_path), "DDPJOB_RUN_DIR": "/x", "DDPJOB_TERMINATION_LOG": "/x",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }  # fmt: skip
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", program], env=env, stdout=write, check=False)
    os.close(write)
    assert done.returncode == 0
    assert texts(tmp_path, named.job) == ["line 0", "line 1", "line 2"]


def test_a_pod_without_a_name_or_the_wish_copies_nothing(named: PodEnvironment) -> None:
    assert copy_output(replace(named, name=None)) is None
    assert copy_output(replace(named, keeps_output=False)) is None
