"""The script fills up the memory that the launcher and its ranks write to."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.support.starting import starts_processes
from tests.support.tmpfs import small_tmpfs

from ddp_trainer.contract.environment import PodEnvironment
from ddp_trainer.contract.json_files import read_json, reserve, write_json
from ddp_trainer.launch.attempt import CannotStart

FILL = """
import os, time
from ddp_trainer.contract.heartbeat import Heartbeat
heartbeat = Heartbeat.from_env()
heartbeat.enter("train")
heartbeat.step(step=1)

def fill(directory):
    with open(os.path.join(directory, "filler"), "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass

fill(os.environ["DDPJOB_RUN_DIR"])
"""


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.fixture
@starts_processes
def memory(tmp_path: Path) -> Iterator[Path]:
    with small_tmpfs(tmp_path / "memory", size="4m") as folder:
        yield folder


def test_a_rank_that_trains_with_all_memory_used_up_is_not_stalled_and_ends_as_completed(start_pod, memory):
    pod = start_pod(
        FILL
        + """
for step in range(2, 101):
    time.sleep(0.1)
    heartbeat.step(step=step, loss=1.0 / step, total_steps=10**6)
heartbeat.metrics(**{f"metric_{n}": 0.1 for n in range(40)})
heartbeat.enter("done")
""",
        DDPJOB_RUN_DIR=str(memory / "run"),
        DDPJOB_STALL_MIN_SECONDS="5",
        DDPJOB_STALL_MAX_SECONDS="5",
    )
    assert pod.wait() == 0, pod.log
    assert pod.message["reason"] == "Completed"
    assert pod.message["step"] == 100
    assert len(pod.message["metrics"]) == 40
    assert "no space left on device in" in pod.log


def test_an_error_of_a_rank_is_on_record_with_all_memory_used_up(start_pod, memory):
    pod = start_pod(FILL + 'raise ValueError("x" * 40000)', DDPJOB_RUN_DIR=str(memory / "run"))
    assert pod.wait() == 1
    assert (pod.message["reason"], pod.message["rank"]) == ("WorkerException", 0)
    assert pod.message["message"].startswith("rank 0 raised ValueError after step 1: xxx")


def test_a_write_that_fails_for_it_names_the_shared_memory_and_not_the_volume(start_pod, memory):
    pod = start_pod(
        FILL + "fill = open(os.environ['DDPJOB_RUN_DIR'] + '/more', 'wb', buffering=0).write(bytes(4096))",
        DDPJOB_RUN_DIR=str(memory / "run"),
    )
    assert pod.wait() == 1
    assert pod.message["reason"] == "DiskFull"
    assert "(/dev/shm of the pod, 4 MiB): raise its size" in pod.message["message"]


@pytest.mark.parametrize(
    ("number", "reason"), [(errno.ENOSPC, "DiskFull"), (errno.EDQUOT, "DiskFull"), (errno.EROFS, "WorkerException")]
)
def test_a_start_that_fails_for_space_or_a_quota_is_a_full_disk(pod: PodEnvironment, number: int, reason: str) -> None:
    assert CannotStart(pod, OSError(number, "")).reason == reason


def test_a_file_is_overwritten_where_it_is_while_there_is_no_space(memory):
    path, value = memory / "state.json", {"text": "x" * 5000}
    write_json(path, {"text": ""}, room=8192)
    reserve(memory / "later.json", 8192)
    fill(memory)
    for name in ("state.json", "later.json"):
        write_json(memory / name, value)
        assert read_json(memory / name) == value
    with pytest.raises(OSError, match="No space left"):
        write_json(path, {"text": "x" * 20000})
    assert read_json(path) == value, "what does not fit leaves what was there"
    assert sorted(entry.name for entry in memory.iterdir()) == ["filler", "later.json", "state.json"]
    assert json.loads(path.read_text()) == value
