"""A run that saves and resumes goes on as if it had never stopped, and saving never stops it."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_trainer.errors import FencedError, UserError
from ddp_trainer.snapshots import saving
from ddp_trainer.snapshots.disk import Disk
from ddp_trainer.snapshots.errors import IncompatibleSnapshotError
from ddp_trainer.snapshots.fence import Fence
from ddp_trainer.snapshots.session import Every, Identity, Progress, SnapshotEvent, Snapshots
from ddp_trainer.snapshots.state import Stateful


class Cursor:
    """A stand-in for the data cursor."""

    def __init__(self) -> None:
        self.samples = 0

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.samples}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.samples = state["samples"]


class Run:
    """A small training run: dropout and random data, AdamW, a scheduler, and its snapshots."""

    def __init__(
        self, directory: Path, *, attempt: int = 0, every: str = "2steps", seed: int = 0, **settings: Any
    ) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 7])
        self.cursor = Cursor()
        self.events: list[SnapshotEvent] = []
        self.losses: list[float] = []
        stateful: dict[str, Stateful] = {
            "model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "cursor": self.cursor
        }  # fmt: skip
        settings = {"keep": 3, "strategy": "single", "global_batch": 16} | settings
        self.snapshots = Snapshots(
            directory,
            stateful,
            every=Every.parse(every),
            identity=Identity("digits", "uid-1", 1, attempt, 0, 1),
            on_event=self.events.append,
            **settings,
        )

    def train(self, until: int) -> None:
        while self.cursor.samples < until * 16:
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(16, 8)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.cursor.samples += 16
            self.losses.append(loss.item())
            step = self.cursor.samples // 16
            self.snapshots.step_end(Progress(step, step // 5, self.cursor.samples), epoch_end=step % 5 == 0)

    def results(self) -> list[str]:
        return [event.result for event in self.events]


def test_a_resumed_run_ends_bitwise_as_the_unbroken_one(tmp_path: Path) -> None:
    unbroken = Run(tmp_path / "unbroken")
    unbroken.snapshots.resume()
    unbroken.train(10)

    broken = Run(tmp_path / "broken")
    broken.snapshots.resume()
    broken.train(5)
    broken.snapshots.close()
    resumed = Run(tmp_path / "broken", attempt=1, seed=99)
    manifest = resumed.snapshots.resume()
    assert manifest is not None
    assert (manifest.step, manifest.samples, manifest.attempt) == (4, 64, 0)
    resumed.train(10)

    assert broken.losses[:4] + resumed.losses == unbroken.losses
    for name, tensor in unbroken.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    for mine, theirs in zip(unbroken.optimizer.state.values(), resumed.optimizer.state.values(), strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert resumed.scheduler.state_dict() == unbroken.scheduler.state_dict()
    unbroken.snapshots.close()
    resumed.snapshots.close()


def test_the_first_attempt_has_nothing_to_resume_from(tmp_path: Path) -> None:
    run = Run(tmp_path / "new" / "digits")
    assert run.snapshots.resume() is None
    assert run.events == []


@pytest.mark.parametrize(
    ("every", "steps"), [("4steps", [4, 8, 12]), ("1epochs", [5, 10]), ("2epochs", [10]), ("5 steps", [5, 10])]
)
def test_snapshots_are_saved_when_the_policy_says(tmp_path: Path, every: str, steps: list[int]) -> None:
    run = Run(tmp_path, every=every, keep=9)
    run.snapshots.resume()
    run.train(12)
    run.snapshots.close()
    assert [event.step for event in run.events if event.result == "saved"] == steps


def test_a_final_snapshot_is_on_the_disk_when_save_returns(tmp_path: Path) -> None:
    run = Run(tmp_path, every="100steps")
    run.snapshots.resume()
    run.train(3)
    assert run.snapshots.save(Progress(3, 0, 48), kind="final", wait=True)
    assert run.snapshots.last_saved is not None
    assert (run.snapshots.last_saved.step, run.snapshots.last_saved.kind) == (3, "final")
    assert (tmp_path / "step-000000000003" / "manifest.json").exists()


def test_a_step_that_is_already_saved_is_not_written_twice(tmp_path: Path) -> None:
    run = Run(tmp_path, every="3steps")
    run.snapshots.resume()
    run.train(3)
    assert run.snapshots.save(Progress(3, 0, 48), kind="final", wait=True)
    assert run.results() == ["saved"]


def test_a_bad_snapshot_is_told_and_the_one_before_resumed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.snapshots.resume()
    run.train(4)
    run.snapshots.close()
    os.truncate(tmp_path / "step-000000000004" / "optimizer.safetensors", 10)
    resumed = Run(tmp_path, attempt=1)
    manifest = resumed.snapshots.resume()
    assert manifest is not None
    assert manifest.step == 2
    assert resumed.results() == ["set_aside", "resumed"]
    assert "step 4 is not used: optimizer.safetensors has 10 bytes" in resumed.events[0].message


# Behind training's back


class SlowDisk(Disk):
    """Blocks every new file until it is released; says when the first one is reached."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.released = threading.Event()

    def create(self, path: Path, chunks: Any) -> None:
        self.reached.set()
        assert self.released.wait(60)
        super().create(path, chunks)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[Run, SlowDisk]]:
    """A run on a disk that takes for ever until it is released."""
    run = Run(tmp_path, keep=9)
    run.snapshots.resume()
    disk = SlowDisk()
    use(run, disk)
    yield run, disk
    disk.released.set()
    run.snapshots.close()


def use(run: Run, disk: Disk) -> None:
    saver = run.snapshots._saver
    assert saver is not None
    saver._store.disk = disk


def test_training_goes_on_while_a_snapshot_is_written_and_the_snapshot_is_of_its_own_step(
    slow: tuple[Run, SlowDisk], tmp_path: Path
) -> None:
    run, disk = slow
    run.train(2)
    assert disk.reached.wait(60)
    weights = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.train(3)
    assert run.events == [], "step 3 was done while step 2 was still being written"
    disk.released.set()
    run.snapshots.close()
    assert run.results() == ["saved"]
    resumed = Run(tmp_path, attempt=1, seed=5)
    resumed.snapshots.resume()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in resumed.model.state_dict().items())


def test_a_snapshot_due_while_a_slow_one_is_written_is_skipped_and_says_so(
    slow: tuple[Run, SlowDisk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "PATIENCE_SECONDS", 0.01)
    run, disk = slow
    run.train(4)
    assert run.results() == ["skipped"]
    assert "no snapshot of step 4: that of step 2 is still being written" in run.events[0].message
    disk.released.set()
    assert run.snapshots._saver is not None
    assert run.snapshots._saver._writer.wait(60)
    run.train(6)
    run.snapshots.close()
    assert [event.step for event in run.events if event.result == "saved"] == [2, 6]


def test_a_final_snapshot_waits_for_the_one_in_flight(slow: tuple[Run, SlowDisk]) -> None:
    run, disk = slow
    run.train(2)
    assert disk.reached.wait(60)
    threading.Timer(0.05, disk.released.set).start()
    run.train(3)
    assert run.snapshots.save(Progress(3, 0, 48), kind="preempted", wait=True)
    assert [event.step for event in run.events if event.result == "saved"] == [2, 3]


def test_waiting_for_a_periodic_snapshot_that_is_being_written_waits_until_it_is(
    slow: tuple[Run, SlowDisk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "PATIENCE_SECONDS", 0.01)
    run, disk = slow
    run.train(2)
    assert disk.reached.wait(60)
    threading.Timer(0.1, disk.released.set).start()
    assert run.snapshots.save(Progress(2, 0, 32), wait=True)
    assert run.results() == ["saved"]


def test_a_disk_that_hangs_does_not_hang_the_end_of_training(tmp_path: Path) -> None:
    run = Run(tmp_path, save_timeout=0.2)
    run.snapshots.resume()
    disk = SlowDisk()
    use(run, disk)
    run.train(2)
    started = time.monotonic()
    assert run.snapshots.save(Progress(2, 0, 32), kind="preempted", wait=True) is False
    run.snapshots.close()
    assert time.monotonic() - started < 10
    assert run.events[-1].result == "failed"
    assert "not written within 0 s: the volume hangs" in run.events[-1].message
    disk.released.set()


class BrokenDisk(Disk):
    """Fails to create files until it is mended."""

    def __init__(self) -> None:
        self.is_mended = False

    def create(self, path: Path, chunks: Any) -> None:
        if not self.is_mended:
            raise OSError(errno.EIO, "Input/output error")
        super().create(path, chunks)


def test_failed_saves_never_stop_training_and_three_in_a_row_are_reported(tmp_path: Path) -> None:
    run = Run(tmp_path, every="1steps")
    run.snapshots.resume()
    disk = BrokenDisk()
    use(run, disk)
    run.train(3)
    assert run.snapshots.save(Progress(3, 0, 48), kind="final", wait=True) is False
    assert [event.failures for event in run.events] == [1, 2, 3, 4]
    assert run.events[2].is_failing
    assert run.events[2].message.startswith("SnapshotsFailing: 3 saves in a row have failed")
    assert "check that the volume is mounted and writable" in run.events[0].message
    disk.is_mended = True
    run.train(5)
    run.snapshots.close()
    assert (run.events[-1].result, run.events[-1].failures) == ("saved", 0)


def test_a_state_that_cannot_be_saved_is_a_failed_save_and_not_the_end(tmp_path: Path) -> None:
    run = Run(tmp_path, every="1steps")
    run.snapshots.resume()
    run.scheduler.secret = lambda: None  # type: ignore[attr-defined]
    run.train(1)
    assert run.results() == ["failed"]
    assert "secret is a builtins.function" in run.events[0].message


def test_a_fenced_run_stops_at_its_next_step(tmp_path: Path) -> None:
    run = Run(tmp_path, every="1steps")
    run.snapshots.resume()
    run.train(1)
    Fence.claim(tmp_path, created=1, attempt=1, uid="uid-1")
    with pytest.raises(FencedError, match=r"attempt 0 .* is fenced: attempt 1"):
        run.train(200)
    run.snapshots.close()


def test_an_older_attempt_cannot_even_start(tmp_path: Path) -> None:
    Run(tmp_path, attempt=3).snapshots.resume()
    with pytest.raises(FencedError, match="attempt 3"):
        Run(tmp_path, attempt=2).snapshots.resume()


# What does not fit


def changed_model(run: Run) -> None:
    run.snapshots._stateful["model"] = torch.nn.Linear(3, 3)


def missing_scaler(run: Run) -> None:
    run.snapshots._stateful["scaler"] = Cursor()


@pytest.mark.parametrize(
    ("change", "named"), [(changed_model, "model: .*weight"), (missing_scaler, r"the program has .*scaler")]
)
def test_a_snapshot_of_another_program_stops_the_job_for_good(
    tmp_path: Path, change: Callable[[Run], None], named: str
) -> None:
    run = Run(tmp_path)
    run.snapshots.resume()
    run.train(2)
    run.snapshots.close()
    other = Run(tmp_path, attempt=1)
    change(other)
    with pytest.raises(IncompatibleSnapshotError, match=f"(?s){named}.*give the job another name") as caught:
        other.snapshots.resume()
    assert caught.value.exit_code == 64
    assert (tmp_path / "step-000000000002").is_dir()


def test_a_volume_that_cannot_be_written_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Exception, match=r"could not be claimed for attempt 0: .*Check that the volume is mounted"):
        Run(tmp_path / "file" / "digits").snapshots.resume()


def test_the_compiled_and_the_wrapped_model_are_saved_as_the_model_inside(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    snapshots = Snapshots(
        tmp_path,
        {"a": torch.nn.DataParallel(model), "b": torch.compile(model)},  # type: ignore[dict-item]
        every=Every.parse("1steps"),
        keep=1,
        identity=Identity("digits", "uid-1", 1, 0, 0, 1),
        strategy="single",
        global_batch=1,
    )
    assert snapshots._stateful == {"a": model, "b": model}


# The environment

ENVIRON = {
    "DDPJOB_NAME": "digits",
    "DDPJOB_UID": "u",
    "DDPJOB_CREATED": "5",
    "DDPJOB_ATTEMPT": "1",
    "DDPJOB_NODES": "2",
}


def from_env(shared: Path, **changes: str) -> Snapshots:
    environ = {**ENVIRON, "DDPJOB_SHARED": str(shared), **changes}
    environ = {name: value for name, value in environ.items() if value}
    return Snapshots.from_env({"cursor": Cursor()}, strategy="ddp", global_batch=8, environ=environ)


def test_the_environment_of_the_contract_is_read(tmp_path: Path) -> None:
    snapshots = from_env(tmp_path, DDPJOB_SNAPSHOT_EVERY="2epochs")
    assert snapshots.directory == tmp_path / "checkpoints" / "digits"
    assert snapshots.identity == Identity("digits", "u", 5, 1, 0, 1, nodes=2)
    assert str(snapshots.every) == "2epochs"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"DDPJOB_NAME": ""}, "DDPJOB_NAME is not set"),
        ({"DDPJOB_ATTEMPT": "-1"}, "DDPJOB_ATTEMPT is '-1', not a whole number"),
        ({"DDPJOB_SNAPSHOT_EVERY": "soon"}, "'soon' is not an interval"),
        ({"DDPJOB_NAME": "../other"}, r"job name '\.\./other' cannot be a directory"),
        ({"DDPJOB_NAME": ".."}, "cannot be a directory"),
        ({"DDPJOB_NAME": "a/b"}, "cannot be a directory"),
        ({"DDPJOB_NAME": "a..b"}, "cannot be a directory"),
    ],
)
def test_a_wrong_environment_is_named(tmp_path: Path, changes: dict[str, str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        from_env(tmp_path, **changes)


def test_a_job_whose_directory_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoints" / "digits").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="outside the job's own place"):
        from_env(tmp_path)
