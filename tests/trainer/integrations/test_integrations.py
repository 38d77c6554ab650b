"""One-line integrations with the real libraries, two ranks under torchrun: what a stop or a loss of a rank costs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.starting import starts_processes
from tests.trainer.forked.start import LIBRARIES
from tests.trainer.launch.conftest import ROOT, Pod
from tests.trainer.train.volume import Volume

from ddp_trainer.logs.losses import read_losses

HERE = Path(__file__).parent


@pytest.fixture
@starts_processes
def job(tmp_path: Path) -> Volume:
    return made(tmp_path / "job")


def made(root: Path) -> Volume:
    return Volume(root, here=HERE, imported=LIBRARIES)


@pytest.fixture(scope="module")
@starts_processes
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    return made(tmp_path_factory.mktemp("unbroken")).trained(2, "with_transformers.py").script_losses()


def test_a_transformers_run_that_was_asked_to_stop_exits_143_and_resumes_to_the_same_losses(
    job: Volume, unbroken: Any
) -> None:
    stopped = job.train(2, "with_transformers.py", "--sigterm-at", "8", DDPJOB_SNAPSHOT_EVERY="100steps")
    assert re.search(r"exitcode *: 143", stopped.stderr), stopped.stderr
    assert job.checkpoint_steps() == [9], "the vote of step 8 is read at the end of the next one"
    assert not (job.root / "shared" / "final").exists(), "what follows the training is not for a preempted run"
    resumed = job.train(2, "with_transformers.py", DDPJOB_ATTEMPT="1", DDPJOB_SNAPSHOT_EVERY="100steps")
    assert (resumed.returncode, resumed.stdout.count("resuming after step 9")) == (0, 1), (
        resumed.stdout + resumed.stderr
    )
    assert [event["step"] for event in job.events("resumed")] == [9]
    assert job.script_losses() == unbroken
    assert len(unbroken) == 18


def test_a_transformers_run_that_lost_a_rank_resumes_to_the_same_losses(job: Volume, unbroken: Any) -> None:
    assert job.train(2, "with_transformers.py", "--sigkill-at", "11").returncode != 0
    assert job.checkpoint_steps() == [7]
    job.trained(2, "with_transformers.py", DDPJOB_ATTEMPT="1")
    assert job.script_losses() == unbroken
    assert not list((job.root / "shared" / "output").glob("checkpoint-*")), "the Trainer was to save nothing itself"


def test_a_transformers_run_saves_once_at_the_end_of_each_epoch(job: Volume) -> None:
    job.trained(2, "with_transformers.py", "--save-epochs", DDPJOB_SNAPSHOT_EVERY="1epochs", DDPJOB_SNAPSHOT_KEEP="9")
    assert job.checkpoint_steps() == [6, 12, 18]
    manifests = sorted(job.checkpoints.glob("checkpoint-*/manifest.json"))
    assert [json.loads(path.read_text())["epoch"] for path in manifests] == [1, 2, 3]
    for path in (job.root / "shared" / "output" / "checkpoint-18").iterdir():
        path.write_bytes(b"as when the Trainer saves the same step again")
    job.trained(2, "with_transformers.py", DDPJOB_ATTEMPT="1")
    assert [event["step"] for event in job.events("resumed")] == [18], "the files are as they were summed"


def test_a_lightning_run_that_was_asked_to_stop_exits_143_and_resumes_to_the_same_losses(
    job: Volume, tmp_path: Path
) -> None:
    whole = made(tmp_path / "unbroken").trained(2, "with_lightning.py").script_losses()
    # 4 steps an epoch: the stop is agreed on at the end of the second
    stopped = job.train(2, "with_lightning.py", "--sigterm-at", "7", DDPJOB_SNAPSHOT_EVERY="1epochs")
    assert re.search(r"exitcode *: 143", stopped.stderr), stopped.stderr
    assert job.checkpoint_steps() == [4, 8]
    job.trained(2, "with_lightning.py", DDPJOB_ATTEMPT="1", DDPJOB_SNAPSHOT_EVERY="1epochs")
    assert job.script_losses() == whole
    assert (len(whole), (job.root / "shared" / "finished").read_text()) == (24, "24")


def test_what_lightning_saves_of_its_own_accord_becomes_a_checkpoint_of_the_job(job: Volume) -> None:
    # 24 steps, 4 an epoch: step 12 is saved by both
    job.trained(2, "with_lightning.py", "--model-checkpoint", DDPJOB_SNAPSHOT_EVERY="3epochs", DDPJOB_SNAPSHOT_KEEP="9")
    assert job.checkpoint_steps() == [3, 6, 9, 12, 15, 18, 21, 24]
    (own,) = (job.root / "shared" / "own").glob("*step=21.ckpt")
    assert (job.checkpoints / "checkpoint-000000000021" / "lightning.ckpt").read_bytes() == own.read_bytes()
    (job.checkpoints / "checkpoint-000000000024" / "lightning.ckpt").write_bytes(b"damaged")
    job.trained(2, "with_lightning.py", DDPJOB_ATTEMPT="1", DDPJOB_SNAPSHOT_EVERY="100epochs")
    assert [event["step"] for event in job.events("resumed")] == [21]


def test_an_accelerate_run_that_lost_a_rank_resumes_to_the_same_losses(job: Volume, tmp_path: Path) -> None:
    whole = made(tmp_path / "unbroken").trained(2, "with_accelerate.py").script_losses()
    assert job.train(2, "with_accelerate.py", DIES_AT="10").returncode != 0
    assert job.checkpoint_steps() == [7]
    job.trained(2, "with_accelerate.py", DDPJOB_ATTEMPT="1")
    assert job.script_losses() == whole
    assert len(whole) == 12


def test_a_stop_saves_although_only_the_best_is_to_be_saved() -> None:
    from transformers import TrainerControl

    from ddp_trainer.integrations.transformers import DDPJobCallback

    callback = DDPJobCallback()
    callback._run = SimpleNamespace(should_save=lambda: True, should_stop=lambda: True, step_end=lambda **_: None)
    control = TrainerControl(should_evaluate=True)
    callback.on_step_end(SimpleNamespace(save_strategy="best"), SimpleNamespace(epoch=0.5), control)
    # the Trainer takes should_save from the result of an evaluation, if there is one
    assert (control.should_save, control.should_evaluate, control.should_training_stop) == (True, False, True)


@pytest.mark.processes
@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_the_loss_of_each_step_is_recorded_with_the_throughput_and_so_is_the_last(tmp_path: Path, library: str) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    environment = {"DDPJOB_UID": library, "DDPJOB_SHARED": str(shared), "PYTHONPATH": str(ROOT / "trainer_image")}
    pod = Pod(tmp_path, shared, ["--script", str(HERE / f"with_{library}.py"), "--"], environment)
    try:
        assert pod.wait() == 0, pod.log
    finally:
        pod.end()
    trained = [json.loads(line)[0] for line in (shared / "losses.jsonl").read_text().splitlines()]
    recorded = {entry["step"]: entry.get("samplesPerSecond") for entry in read_losses(shared / "logs" / "digits")}
    assert sorted(recorded) == list(range(1, max(trained) + 1))
    assert (recorded[max(trained)] or 0) > 0
