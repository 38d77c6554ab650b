"""A loop of the user's own with three lines added has what the trainer's loop has."""

from __future__ import annotations

import gc
import importlib
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from tests.support.starting import starts_processes
from tests.trainer.client.one_rank import model_and_optimizer, step
from tests.trainer.train.volume import Volume
from torch import nn

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.rank import failures
from ddp_trainer.rank.world import World

HERE = Path(__file__).parent


def test_an_own_loop_that_was_told_to_stop_exits_143_and_resumes_to_the_same_bits(volume, trained_once) -> None:
    own = ("own_loop.py", "--steps", "20", "--sigterm-at", "9")
    stopped = volume.train(2, *own)
    assert re.search(r"exitcode *: 143", stopped.stderr), stopped.stderr
    assert volume.snapshot_steps()[-1] == 10
    volume.trained(2, *own, DDPJOB_ATTEMPT="1")
    assert [event["step"] for event in volume.events("resumed")] == [10]

    volume.assert_same_end(trained_once(2, "own_loop.py", "--steps", "20"))


def test_an_exception_in_an_own_loop_leaves_an_emergency_snapshot_and_the_same_losses_in_the_end(
    volume, trained_once
) -> None:
    own = ("own_loop.py", "--steps", "20", "--raise-at", "12")
    failed = volume.train(2, *own)
    assert "a sample that cannot be trained on" in failed.stderr
    manifest = volume.newest_manifest()
    assert (manifest["kind"], manifest["step"]) == ("emergency", 11), volume.events("snapshot_skipped")
    volume.trained(2, *own, DDPJOB_ATTEMPT="1")
    assert [event["step"] for event in volume.events("resumed")] == [11]
    volume.assert_same_end(trained_once(2, "own_loop.py", "--steps", "20"))


def test_a_run_whose_first_step_after_a_resume_has_no_update_goes_on(volume, trained_once) -> None:
    own = ("own_loop.py", "--steps", "20", "--raise-at", "12", "--no-update-at", "12")
    volume.train(2, *own)
    volume.trained(2, *own, DDPJOB_ATTEMPT="1")
    assert [event["step"] for event in volume.events("resumed")] == [11]
    assert [event["step"] for event in volume.events("step_without_update")] == [12]
    volume.assert_same_end(trained_once(2, "own_loop.py", "--steps", "20", "--no-update-at", "12"))


@pytest.mark.parametrize("number", [10, 20], ids=["in the run", "in its last step"])
def test_an_update_that_one_rank_left_out_ends_the_run_before_a_snapshot_of_other_weights(volume, number) -> None:
    failed = volume.train(2, "own_loop.py", "--steps", "20", "--no-update-at", str(number), "--no-update-on", "1")
    assert f"1 of 2 ranks ended step {number} without an optimizer.step()" in failed.stderr
    assert max(volume.snapshot_steps()) < number


def test_no_emergency_snapshot_has_a_step_whose_update_one_rank_left_out(volume) -> None:
    own = ("own_loop.py", "--steps", "20", "--raise-at", "12", "--no-update-at", "11", "--no-update-on", "1")
    failed = volume.train(2, *own)
    assert "a sample that cannot be trained on" in failed.stderr
    assert max(volume.snapshot_steps()) < 11


DRAWS = ("draws.py", "--draws-in", "3", "11", "16", "19", "--fails-in")


@pytest.fixture(scope="module")
@starts_processes
def never_failed(tmp_path_factory) -> Volume:
    return Volume(tmp_path_factory.mktemp("draws"), here=HERE).trained(2, *DRAWS, "0")


@pytest.mark.parametrize("fails_in", [10, 13, 18])
def test_an_emergency_snapshot_has_generators_that_were_sent_long_before(fails_in, never_failed, tmp_path) -> None:
    volume = Volume(tmp_path, here=HERE)
    volume.train(2, *DRAWS, str(fails_in), DDPJOB_SNAPSHOT_EVERY="100steps")
    manifest = volume.newest_manifest()
    assert (manifest["kind"], manifest["step"]) == ("emergency", fails_in - 1), volume.events("snapshot_skipped")
    volume.trained(2, *DRAWS, str(fails_in), DDPJOB_ATTEMPT="1")
    assert [event["step"] for event in volume.events("resumed")] == [fails_in - 1]
    volume.assert_same_end(never_failed)


def test_generators_that_are_not_sent_yet_leave_no_emergency_snapshot_and_a_reason(never_failed, tmp_path) -> None:
    volume = Volume(tmp_path, here=HERE)
    volume.train(2, *DRAWS, "12")
    assert volume.snapshot_steps() == [7]
    (skipped,) = volume.events("snapshot_skipped")
    assert "none in the one before: they are not sent yet. The next attempt goes on from step 7" in skipped["message"]
    volume.trained(2, *DRAWS, "12", DDPJOB_ATTEMPT="1")
    volume.assert_same_end(never_failed)


def test_an_emergency_snapshot_needs_nothing_of_a_process_group_that_is_lost(attach: Any, tmp_path: Path) -> None:
    """As with live recovery, where too few ranks are left."""
    model, optimizer = model_and_optimizer()
    run = attach(model, optimizer)
    for _ in range(run.resume(), 3):
        run.step_end(step(model, optimizer))
    run.lost_group()
    run.emergency(RuntimeError("too few ranks are left"))
    manifest = json.loads((tmp_path / f"shared/checkpoints/job/step-{3:012d}/manifest.json").read_text())
    assert (manifest["kind"], manifest["step"]) == ("emergency", 3)


@pytest.mark.parametrize(("batch", "noted"), [(48, [[32, 48]]), (32, [])], ids=["another one", "the same"])
def test_a_run_that_resumes_with_another_global_batch_says_so(
    attach: Any, tmp_path: Path, capsys: Any, batch: int, noted: list[list[int]]
) -> None:
    """As one does that takes a batch of each rank, after the number of ranks has changed."""
    for global_batch in (32, batch):
        model, optimizer = model_and_optimizer()
        run = attach(model, optimizer, global_batch=global_batch)
        run.resume()
        run.step_end(step(model, optimizer))
        run.finish()
    lines = (tmp_path / "shared/logs/job/events.jsonl").read_text().splitlines()
    events = [event for line in lines if (event := json.loads(line))["event"] == "batch_changed"]
    assert [event["globalBatch"] for event in events] == noted
    said = "the run before trained on 32 samples a step, this one trains on 48: the total of steps"
    assert (said in capsys.readouterr().out) == bool(noted)


@pytest.mark.parametrize(("steps", "noted"), [(2, True), (3, False)], ids=["too few", "all"])
def test_a_loop_that_ends_before_the_last_of_its_steps_says_so(
    attach: Any, capsys: pytest.CaptureFixture[str], steps: int, noted: bool
) -> None:
    """As one does whose data loader gives no more batches in the epoch that it resumes."""
    model, optimizer = model_and_optimizer()
    run = attach(model, optimizer, total_steps=3)
    run.resume()
    for _ in range(steps):
        run.step_end(step(model, optimizer))
    run.finish()
    assert ("the loop has ended after step 2 of 3" in capsys.readouterr().out) == noted


def test_a_snapshot_that_is_set_aside_is_noted_once(
    attach: Any, tmp_path: Path, capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Python prints warnings on stderr where a script sets up no logging."""
    for damages in (True, False):
        model, optimizer = model_and_optimizer()
        run = attach(model, optimizer)
        run.resume()
        run.step_end(step(model, optimizer))
        run.finish()
        if damages:
            capsys.readouterr()
            next((tmp_path / "shared/checkpoints/job").glob("step-*/model.safetensors")).write_bytes(b"damaged")
    said = "snapshot of step 1 is not used"
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    lines = [line for line in (*capsys.readouterr().out.splitlines(), *warnings) if said in line]
    assert len(lines) == 1, lines


class OnTheThirdGPU(nn.Module):
    """A model that was moved there by name."""

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        yield SimpleNamespace(device=torch.device("cuda:2"))


def test_a_run_that_has_finished_lets_its_model_go(attach: Any) -> None:
    """A process may train one model after the other, each in a job of its own."""

    def trained() -> tuple[ref[Any], ref[Any]]:
        model, optimizer = model_and_optimizer()
        run = attach(model, optimizer)
        run.resume()
        step(model, optimizer)
        run.step_end()
        run.finish()
        return ref(model), ref(run)

    model, run = trained()
    gc.collect()
    assert (model(), run()) == (None, None)


def test_two_runs_of_a_job_at_once_are_an_error_before_one_saves_in_place_of_the_other(
    attach: Any, tmp_path: Path
) -> None:
    (first, second), environ = (model_and_optimizer() for _ in range(2)), {"DDPJOB_ATTEMPT": "0"}
    runs = [attach(*given, environ=environ) for given in (first, second)]
    assert [run.resume() for run in runs] == [0, 0]
    step(*first)
    with pytest.raises(
        UserError, match=r"run.step_end\(\) was called on a run of the job job, .*all models to one att"
    ):
        runs[0].step_end()
    with pytest.raises(UserError, match=r"run.finish\(\) was called on a run"):
        runs[0].finish()
    assert not list((tmp_path / "shared/checkpoints/job").glob("step-*"))


def test_a_loop_that_failed_and_is_begun_again_in_the_same_process_goes_on(attach: Any) -> None:
    """As after the device was out of memory, with a smaller batch."""
    runs = []
    for last in (3, 6):
        model, optimizer = model_and_optimizer()
        runs.append(attach(model, optimizer, environ={"DDPJOB_ATTEMPT": "0"}))
        for _ in range(runs[-1].resume(), last):
            step(model, optimizer)
            runs[-1].step_end()
        runs[-1]._snapshots.close()
    runs[-1].finish()
    assert runs[-1].step == 6


def test_a_run_that_was_left_behind_saves_nothing_after_a_later_failure(attach: Any, tmp_path: Path) -> None:
    """It would be the newest snapshot, of a run that nothing has gone on with."""
    runs, environ = list[Any](), {"DDPJOB_ATTEMPT": "0", "DDPJOB_SNAPSHOT_EVERY": "1000steps"}
    for steps in (3, 1):
        model, optimizer = model_and_optimizer()
        runs.append(attach(model, optimizer, environ=environ))
        runs[-1].resume()
        for _ in range(steps):
            step(model, optimizer)
            runs[-1].step_end()
    failures.failed(RuntimeError("broken"))
    saved = sorted(path.name for path in (tmp_path / "shared/checkpoints/job").glob("step-*"))
    assert [int(name.removeprefix("step-")) for name in saved] == [1]


def test_an_exception_after_a_run_has_finished_is_none_of_its_own(attach: Any, tmp_path: Path) -> None:
    for name in ("first", "second"):
        model, optimizer = model_and_optimizer()
        run = attach(model, optimizer, environ={"DDPJOB_NAME": name, "DDPJOB_SNAPSHOT_EVERY": "1000steps"})
        run.resume()
        for _ in range(3):
            step(model, optimizer)
            run.step_end()
        if name == "first":
            run.finish()
    failures.failed(ValueError("of the second"))
    events = {
        name: [json.loads(line)["event"] for line in (tmp_path / f"shared/logs/{name}/events.jsonl").open()]
        for name in ("first", "second")
    }
    assert events["first"][-1] == "finished"
    assert "finished" not in events["second"]
    assert list((tmp_path / "shared/checkpoints/second").glob("step-*3")), "no emergency snapshot"


def test_the_models_gpu_becomes_the_current_device(monkeypatch) -> None:
    module = importlib.import_module("ddp_trainer.client.attach")
    happened: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", happened.append)
    monkeypatch.setattr(module, "prepared", lambda given, per_rank, names: None)
    run = SimpleNamespace(emergency=None)
    monkeypatch.setattr(module, "Run", lambda states, world, *others, **settings: happened.append(world) or run)
    monkeypatch.setattr(module, "on_failure", lambda action: None)
    model = OnTheThirdGPU()
    module.attach(model, torch.optim.SGD([torch.zeros(1)]), environ={})
    assert happened == [torch.device("cuda:2"), World(device=torch.device("cuda:2"))]


@pytest.mark.parametrize(
    ("backend", "device"),
    [("cuda:gloo", "cuda:3"), ("xpu:gloo", "cpu"), ("cpu:gloo,cuda:gloo", "cpu"), ("gloo", "cpu")],
)
def test_ranks_whose_model_is_on_the_host_reduce_where_their_group_can(
    backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL, which is not here, takes tensors of the device alone, as gloo does that is asked for these alone."""
    module = importlib.import_module("ddp_trainer.client.attach")
    happened: list[Any] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(module, "Run", lambda states, world, *others, **settings: happened.append(world.device) or run)
    monkeypatch.setattr(module, "on_failure", lambda action: None)
    run = SimpleNamespace(emergency=None)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        module.attach(*model_and_optimizer(), environ={})
    finally:
        dist.destroy_process_group()
    assert happened == [torch.device(device)]


@pytest.mark.parametrize(
    ("current", "local_rank", "gpus", "device"),
    [
        pytest.param(0, 1, 2, "cuda:1", id="the script gives DDP its device_ids"),
        pytest.param(2, 1, 4, "cuda:2", id="the script has set another"),
        pytest.param(0, 1, 1, "cuda:0", id="each rank sees one GPU"),
    ],
)
def test_the_ranks_of_a_node_that_attach_without_a_model_reduce_each_on_a_gpu_of_its_own(
    current: int, local_rank: int, gpus: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert _reducing_device({"LOCAL_RANK": str(local_rank)}, monkeypatch) == torch.device(device)


def test_a_run_without_a_model_reduces_on_the_gpu_that_its_group_is_bound_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `init_process_group(device_id=…)` binds it."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    found = _reducing_device({"LOCAL_RANK": "1"}, monkeypatch, bound=torch.device("cuda:3"))
    assert found == torch.device("cuda:3")


def _reducing_device(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, *, bound: torch.device | None = None
) -> torch.device:
    """Of a run without a model whose group takes tensors of the device alone."""
    module = importlib.import_module("ddp_trainer.client.attach")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(module, "begun", lambda kind, given, world, *others, **settings: world.device)
    monkeypatch.setattr(module, "observing", lambda: None)
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.group.WORLD.bound_device_id = bound  # type: ignore[union-attr]
        return module.attach(environ=environ)
    finally:
        dist.destroy_process_group()


@pytest.mark.processes
def test_the_package_imports_without_torch() -> None:
    code = "import ddp_trainer as d, sys; print('torch' in sys.modules, callable(d.attach), d.Task.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": "trainer_image"}
    )
    assert done.stdout == "False True Task\n"
