"""The doctor finds what is wrong with ranks and nodes before a training run does."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.support.waiting import PATIENCE_SECONDS
from tests.trainer.forked import start as forked

from ddp_trainer import doctor
from ddp_trainer.rank.world import World


def examine(volume, module: tuple[str, ...], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        forked.command(2, *module),
        env=volume.environment(**environment),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


def test_two_healthy_ranks_are_found_well(volume) -> None:
    (volume.root / "shared").mkdir()
    done = examine(volume, ("-m", "ddp_trainer.doctor", "--mebibytes", "1"))
    lines = done.stdout.splitlines()
    for what in ("ranks: all 2 are here", "all-reduce: 1 MiB", "broadcast: 1", "gather: 1", "scatter: 1", "clocks: 0."):
        assert any(line.startswith(f"ok   {what}") for line in lines), done.stdout + done.stderr


def test_a_rank_that_does_not_answer_is_named(volume) -> None:
    done = examine(volume, (str(volume.here / "absent_rank.py"), "--timeout-seconds", "3"))
    assert done.returncode != 0
    assert "rank 1 did not answer within 3 s; look at that rank's node and log" in done.stderr


def test_a_wrong_result_names_its_rank_and_a_missing_volume_says_what_to_do(monkeypatch, tmp_path) -> None:
    world = World()
    with doctor.process_group(world, timeout_seconds=10):
        wrong = doctor.check(world, "all-reduce", lambda world, data: False, 1024)
        assert str(wrong) == (
            "FAIL all-reduce: wrong result on rank 0; do not train here: memory or network corrupts data"
        )
        assert doctor.check(world, "all-reduce", doctor.all_reduce, 1024).well
    monkeypatch.setenv("DDPJOB_SHARED", str(tmp_path / "gone"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    failed = [str(finding) for finding in doctor.node() if not finding.well]
    assert any("cannot be written: No such file or directory; mount it writable" in line for line in failed)
    assert any("GLOO_SOCKET_IFNAME is eth99; there is none such: choose of " in line for line in failed)
    assert torch.distributed.is_initialized() is False


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ([5.0, 0.25, 3.0, 5.0, 5.0], "ok   clocks: 0.250 s apart"),
        ([5.0, 4.0, 6.0, 5.0, 5.0], "FAIL clocks: 4.000 s apart; synchronise them (NTP)"),
    ],
)
def test_a_rank_that_reads_its_clock_late_has_no_wrong_one(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], said: str
) -> None:
    readings = iter(seconds)

    def gather(times: list[float | None], own: float) -> None:
        times[:] = [1000.0, 1000.0 + next(readings)]

    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    assert str(doctor.clocks(World(size=2))).startswith(said)


@pytest.mark.parametrize(
    ("variable", "asked", "known"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", True),
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("GLOO_SOCKET_IFNAME", "eth0,eth9", False),
        ("NCCL_SOCKET_IFNAME", "eth", True),
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "=eth0", True),
        ("NCCL_SOCKET_IFNAME", "ib,eth", True),
        ("NCCL_SOCKET_IFNAME", "ib", False),
        ("NCCL_SOCKET_IFNAME", "^docker0", True),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", True),
        ("NCCL_SOCKET_IFNAME", "^lo,eth", False),
        ("NCCL_SOCKET_IFNAME", "^=lo,eth", True),
    ],
)
def test_an_interface_is_missed_only_if_none_is_left_to_choose(variable: str, asked: str, known: bool) -> None:
    assert doctor.has_interface(variable, asked, ["lo", "eth0"]) == known


def test_a_file_system_that_reports_no_size_is_not_called_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DDPJOB_SHARED", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=0, used=0, free=0))
    assert [str(found) for found in doctor.node() if not found.well] == []


def test_a_volume_that_renames_no_folder_is_not_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(path: Path, target: Path) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path), None, str(target))

    monkeypatch.setenv("DDPJOB_SHARED", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=0, used=0, free=0))
    assert any("renames folders" in str(found) for found in doctor.node() if found.well)
    monkeypatch.setattr(Path, "rename", refused)
    (failed,) = (str(found) for found in doctor.node() if not found.well)
    assert "does not rename folders: Too many open files; use a file system" in failed
    assert list(tmp_path.iterdir()) == []
