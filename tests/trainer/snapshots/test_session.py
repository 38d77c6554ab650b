"""A run that saves and resumes goes on as if it had never stopped, or says why it cannot."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.snapshots.one_rank import Cursor, Run

from ddp_trainer.contract.exit_codes import FencedError, UserError
from ddp_trainer.snapshots import resuming
from ddp_trainer.snapshots.codec import rng
from ddp_trainer.snapshots.session import Identity, Progress, SaveInterval, Snapshots
from ddp_trainer.snapshots.trust.errors import IncompatibleSnapshotError, SnapshotError
from ddp_trainer.snapshots.trust.fence import Fence
from ddp_trainer.snapshots.trust.manifest import FileEntry, Manifest


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


def test_generators_of_an_earlier_step_are_not_taken_for_those_of_the_last(tmp_path: Path) -> None:
    run = Run(tmp_path, every="2steps")
    run.snapshots.resume()
    for step in range(1, 6):
        run.train(step)
        known = run.snapshots.generators_at_boundary()
        assert known is None or torch.equal(known, rng.capture()), step
    run.snapshots.close()


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


def test_a_bad_snapshot_is_reported_and_the_one_before_resumed(tmp_path: Path) -> None:
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


def test_a_snapshot_that_cannot_be_read_now_is_reported_and_a_later_attempt_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    run.snapshots.resume()
    run.train(4)
    run.snapshots.close()
    read = resuming.read_files

    def read_the_older(directory: Path, manifest: Manifest, **settings: Any) -> Any:
        if manifest.step == 4:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(directory, manifest, **settings)

    older, newer = Run(tmp_path, attempt=1), Run(tmp_path, attempt=2)
    with monkeypatch.context() as patch:
        patch.setattr(resuming, "read_files", read_the_older)
        found = older.snapshots.resume()
    assert found is not None
    assert found.step == 2
    assert older.results() == ["unreadable", "resumed"]
    assert "step 4 is not used, since it cannot be read now ([Errno 5]" in older.events[0].message
    again = newer.snapshots.resume()
    assert again is not None
    assert again.step == 4
    assert newer.results() == ["resumed"]


def test_a_fenced_run_stops_at_its_next_step(tmp_path: Path) -> None:
    run = Run(tmp_path, every="1steps")
    run.snapshots.resume()
    run.train(1)
    Fence.acquire(tmp_path, created=1, attempt=1, uid="uid-1")
    with pytest.raises(FencedError, match=r"attempt 0 .* is fenced: attempt 1"):
        run.train(200)
    run.snapshots.close()


def test_an_older_attempt_cannot_even_start(tmp_path: Path) -> None:
    Run(tmp_path, attempt=3).snapshots.resume()
    with pytest.raises(FencedError, match="attempt 3"):
        Run(tmp_path, attempt=2).snapshots.resume()


def test_a_run_that_was_replaced_while_it_read_its_snapshot_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Run(tmp_path)
    first.snapshots.resume()
    first.train(5)
    first.snapshots.close()
    slow, read = Run(tmp_path, attempt=1), resuming.read_files

    def read_slowly(*arguments: Any, **settings: Any) -> Any:
        files = read(*arguments, **settings)
        Fence.acquire(tmp_path, created=1, attempt=2, uid="uid-2")
        return files

    monkeypatch.setattr(resuming, "read_files", read_slowly)
    before = {name: tensor.clone() for name, tensor in slow.model.state_dict().items()}
    with pytest.raises(FencedError, match="attempt 2"):
        slow.snapshots.resume()
    assert all(torch.equal(tensor, before[name]) for name, tensor in slow.model.state_dict().items())


# What does not fit


def changed_model(run: Run) -> None:
    run.snapshots._stateful["model"] = torch.nn.Linear(3, 3)


def missing_scaler(run: Run) -> None:
    run.snapshots._stateful["scaler"] = Cursor()


class Settings(Cursor):
    may_be_absent = True


def test_a_state_that_an_earlier_version_did_not_save_stays_as_it_is(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.snapshots.resume()
    run.train(2)
    run.snapshots.close()
    other = Run(tmp_path, attempt=1)
    other.snapshots._stateful["settings"] = Settings()
    found = other.snapshots.resume()
    assert found is not None
    assert found.step == 2
    assert torch.equal(other.model[0].weight, run.model[0].weight)


def after_two_steps(tmp_path: Path) -> Run:
    """The attempt after one that has saved two steps, before it resumes."""
    run = Run(tmp_path)
    run.snapshots.resume()
    run.train(2)
    run.snapshots.close()
    return Run(tmp_path, attempt=1)


@pytest.mark.parametrize(
    ("change", "named"), [(changed_model, "model: .*weight"), (missing_scaler, r"the program has .*scaler")]
)
def test_a_snapshot_of_another_program_stops_the_job_for_good(
    tmp_path: Path, change: Callable[[Run], None], named: str
) -> None:
    other = after_two_steps(tmp_path)
    change(other)
    with pytest.raises(IncompatibleSnapshotError, match=f"(?s){named}.*give the job another name") as caught:
        other.snapshots.resume()
    assert caught.value.exit_code == 64
    assert (tmp_path / "step-000000000002").is_dir()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: uncorrectable ECC error encountered"),
        RuntimeError("Error(s) in loading state_dict for Linear: … an exception occurred : ('CUDA error: unknown',)."),
        MemoryError(),
        OSError(errno.EIO, os.strerror(errno.EIO)),
    ],
)
def test_a_machine_that_fails_while_a_snapshot_is_loaded_does_not_stop_the_job_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    other = after_two_steps(tmp_path)

    def fail(_: Any) -> None:
        raise error

    monkeypatch.setattr(other.cursor, "load_state_dict", fail)
    with pytest.raises(type(error)) as caught:
        other.snapshots.resume()
    assert caught.value is error
    assert (tmp_path / "step-000000000002").is_dir()


@pytest.mark.fault(33)
@pytest.mark.parametrize(
    ("number", "kind", "advice"),
    [
        (errno.EROFS, UserError, "Mount the volume writable"),
        (errno.EACCES, UserError, "Mount the volume writable"),
        (errno.ENOSPC, SnapshotError, "Check that the volume is mounted and not full"),
    ],
)
def test_a_volume_that_cannot_be_written_is_named_and_a_retry_is_made_where_it_may_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception], advice: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Fence, "acquire", refuse)
    with pytest.raises(kind, match=rf"got no fencing token for attempt 0: .*{advice}"):
        Run(tmp_path / "digits").snapshots.resume()


def test_a_volume_that_is_a_file_is_an_error_that_says_where_to_look(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SnapshotError, match=r"got no fencing token for attempt 0: .*Check that the volume is mounted"):
        Run(tmp_path / "file" / "digits").snapshots.resume()


def test_the_compiled_and_the_wrapped_model_are_saved_as_the_model_inside(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    snapshots = Snapshots(
        tmp_path,
        {"a": torch.nn.DataParallel(model), "b": torch.compile(model)},  # type: ignore[dict-item]
        every=SaveInterval.parse("1steps"),
        keep=1,
        identity=Identity("digits", "uid-1", 1, 0, 0, 1),
        strategy="single",
        global_batch=1,
    )
    assert snapshots._stateful == {"a": model, "b": model}


@pytest.mark.parametrize(
    ("saved", "own", "refused"),
    [
        ("fsdp", "fsdp", False),
        ("hsdp", "fsdp", False),
        ("own", "fsdp", False),
        ("pipeline", "pipeline", False),
        ("pipeline", "fsdp", True),
        ("fsdp", "pipeline", True),
    ],
)
def test_shards_and_stages_are_not_taken_for_each_other(saved: str, own: str, refused: bool) -> None:
    shard = FileEntry(1, "0" * 64)
    manifest = Manifest("digits", "uid", 0, 7, 0, 56, 2, saved, 8, 1.0).with_files({"shards/rank-00000.json": shard})

    def check() -> None:
        resuming.check_sharding(Path("/volume"), manifest, strategy=own, shards=True)

    if not refused:
        check()
        return
    with pytest.raises(IncompatibleSnapshotError, match=f"of step 7 in /volume is of strategy {saved}, this is {own}"):
        check()
