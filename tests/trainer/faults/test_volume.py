"""A volume that is full, slow or forgetful under a real run: training goes on, and the message says what to do."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.trainer.documented import message
from tests.trainer.snapshots.one_rank import Run
from tests.trainer.train.volume import Volume

from ddp_trainer.snapshots.trust.disk import Disk


@pytest.mark.fault(34)
def test_a_full_volume_costs_snapshots_and_never_training(small_volume: Volume) -> None:
    done = small_volume.train(2, "--task", "faulty_tasks:FullVolume", "--max-steps", "30", "--log-every", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert message("The volume is full", 0).search(done.stdout)
    assert message("The volume is full", 1).search(done.stdout)
    assert message("The volume is full", 2).search(done.stderr)
    assert [event["step"] for event in small_volume.events("snapshot_failed")] == [7, 14, 21]
    assert small_volume.snapshot_steps() == [28, 30]
    assert sorted(small_volume.losses()) == list(range(1, 31)), "the lines that waited are there"
    (beat,) = (beat for beat in small_volume.beats() if beat["rank"] == 0)
    assert beat["counters"]["saves"] == {"failed": 3, "saved": 2}
    assert beat["snapshotProblem"] is None, "it is over"


@pytest.mark.fault(35)
def test_a_slow_volume_makes_snapshots_fewer_and_says_so(volume: Volume) -> None:
    done = volume.train(2, "--task", "faulty_tasks:SlowVolume", "--max-steps", "30")
    assert done.returncode == 0, done.stdout + done.stderr
    skipped = volume.events("snapshot_skipped")
    assert [event["step"] for event in skipped] == [14, 21]
    assert message("The volume is slow", 0).fullmatch(skipped[0]["message"])
    assert skipped[0]["message"] in done.stdout
    assert [event["step"] for event in volume.events("snapshot_saved")] == [7, 28, 30]
    assert sorted(volume.losses()) == list(range(1, 31))
    (beat,) = (beat for beat in volume.beats() if beat["rank"] == 0)
    assert beat["counters"]["saves"] == {"skipped": 2, "saved": 3}


@pytest.mark.fault(35)
def test_a_volume_that_hangs_is_reported_as_failing(tmp_path: Path) -> None:
    class Hung(Disk):
        released = threading.Event()

        def fsync(self, path: Path) -> None:
            assert self.released.wait(60)
            super().fsync(path)

    run = Run(tmp_path, every="1steps", save_timeout=0.01)
    run.snapshots.resume()
    assert run.snapshots._saver is not None
    run.snapshots._saver._store.disk = disk = Hung()
    run.train(4)
    assert [event.failures for event in run.events] == [1, 2, 3]
    assert message("The volume is slow", 1).fullmatch(run.events[0].message)
    assert run.events[2].message.startswith("SnapshotsFailing: 3 saves in a row have failed")
    disk.released.set()
    assert run.snapshots._saver._writer.wait(60)
    run.train(5)
    assert run.events[3].result == "saved"
    run.snapshots.close()


@pytest.mark.fault(37)
def test_a_flipped_bit_sets_the_snapshot_aside_and_the_one_before_is_used(volume: Volume) -> None:
    arguments = ("--strategy", "single", "--task-options", "width=8", "--max-steps")
    volume.trained(0, *arguments, "16")
    assert volume.snapshot_steps() == [7, 14, 16]
    weights = volume.newest / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-100] ^= 1
    weights.write_bytes(content)

    again = volume.train(0, *arguments, "20", DDPJOB_ATTEMPT="1")
    assert again.returncode == 0, again.stderr
    (event,) = volume.events("snapshot_set_aside")
    assert message("A snapshot has gone bad").fullmatch(event["message"])
    assert event["message"] in again.stdout
    assert [event["step"] for event in volume.events("resumed")] == [14]
    (beat,) = volume.beats()
    assert beat["snapshotsSetAside"] == [{"step": 16, "message": event["message"]}]
    aside = volume.checkpoints / "step-000000000016.corrupt"
    assert "model.safetensors has SHA-256" in (aside / "reason.txt").read_text()
