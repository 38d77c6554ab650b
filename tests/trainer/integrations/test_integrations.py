"""One-line integrations with the real libraries, two ranks under torchrun: what a stop or a loss of a rank costs."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.starting import starts_processes
from tests.trainer.forked.start import LIBRARIES
from tests.trainer.launch.conftest import ROOT, Pod
from tests.trainer.train.volume import Volume

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.logs.losses import read_losses
from ddp_trainer.snapshots.codec import rng

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


def test_a_transformers_run_of_epochs_goes_on_with_another_number_of_ranks_only_with_the_same_global_batch(
    job: Volume,
) -> None:
    assert job.train(2, "with_transformers.py", "--sigkill-at", "11").returncode != 0
    refused = job.train(1, "with_transformers.py", DDPJOB_ATTEMPT="1")
    assert "trained on 8 samples a step, all ranks together, and this one would on 4" in refused.stderr
    assert max(job.script_losses()) == 10
    job.trained(1, "with_transformers.py", DDPJOB_ATTEMPT="2", ACCUMULATED="2")
    assert [event["step"] for event in job.events("resumed")] == [7, 7]
    assert max(job.script_losses()) == 18


@pytest.mark.parametrize("of_device", [4, 8, 16])
def test_the_batch_of_a_run_that_resumes_is_that_of_its_own_arguments(
    tmp_path: Path, of_device: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with half the ranks. The TrainerState of the checkpoint has the batch of the run before, of 2 ranks; an older
    Trainer goes on with that, whatever its arguments say.
    """
    from ddp_trainer.integrations import transformers
    from ddp_trainer.integrations.transformers import BATCH, DDPJobCallback

    monkeypatch.setattr(transformers, "FOLLOWS_BATCH", False)
    (tmp_path / BATCH).write_text("8")
    callback = DDPJobCallback()
    callback._run = SimpleNamespace(step=0, training_begins=lambda: None, listen=lambda: None)
    callback._resumes_from = tmp_path
    arguments = SimpleNamespace(
        save_only_model=False,
        auto_find_batch_size=False,
        train_batch_size=of_device,
        gradient_accumulation_steps=1,
        world_size=1,
        max_steps=-1,
        accelerator_config=SimpleNamespace(split_batches=False),
    )
    state = SimpleNamespace(global_step=7, train_batch_size=4)
    if of_device == 8:
        callback.on_train_begin(arguments, state, None)
        assert callback.run.step == 7
    else:
        with pytest.raises(UserError, match=f"trained on 8 samples a step.*this one would on {of_device}:"):
            callback.on_train_begin(arguments, state, None)
    monkeypatch.setattr(transformers, "FOLLOWS_BATCH", True)
    with pytest.raises(UserError, match=r"trained on 8 samples a step.*this one would on 4:"):
        callback.on_train_begin(arguments, state, None)


@pytest.mark.parametrize(
    ("noted", "is_split", "is_refused"),
    [
        ({"ddpjob-step-batch": "8"}, True, False),
        ({"ddpjob-step-batch": "16"}, True, True),
        ({"ddpjob-global-batch": "32"}, True, False),
        ({"ddpjob-global-batch": "32"}, False, False),
        ({"ddpjob-global-batch": "8"}, False, True),
    ],
    ids=["same", "other", "unknown of an earlier version", "each its own", "each its own, other"],
)
def test_a_batch_that_ranks_divide_among_them_is_that_of_a_step(
    tmp_path: Path, noted: dict[str, str], is_split: bool, is_refused: bool
) -> None:
    from ddp_trainer.integrations.transformers import DDPJobCallback

    for name, text in noted.items():
        (tmp_path / name).write_text(text)
    callback = DDPJobCallback()
    callback._run = SimpleNamespace(step=0, training_begins=lambda: None, listen=lambda: None)
    callback._resumes_from = tmp_path
    arguments = SimpleNamespace(
        save_only_model=False,
        auto_find_batch_size=False,
        train_batch_size=8,
        gradient_accumulation_steps=1,
        world_size=4,
        max_steps=-1,
        accelerator_config=SimpleNamespace(split_batches=is_split),
    )
    state = SimpleNamespace(global_step=7, train_batch_size=8)
    with pytest.raises(UserError, match="samples a step") if is_refused else nullcontext():
        callback.on_train_begin(arguments, state, None)


def test_a_transformers_run_saves_once_at_the_end_of_each_epoch(job: Volume) -> None:
    job.trained(2, "with_transformers.py", "--save-epochs", DDPJOB_SNAPSHOT_EVERY="1epochs", DDPJOB_SNAPSHOT_KEEP="9")
    assert job.checkpoint_steps() == [6, 12, 18]
    manifests = sorted(job.checkpoints.glob("checkpoint-*/manifest.json"))
    assert [json.loads(path.read_text())["epoch"] for path in manifests] == [1, 2, 3]
    for path in (job.root / "shared" / "output" / "checkpoint-18").iterdir():
        path.write_bytes(b"as when the Trainer saves the same step again")
    job.trained(2, "with_transformers.py", DDPJOB_ATTEMPT="1")
    assert [event["step"] for event in job.events("resumed")] == [18], "the files are as they were summed"


def test_what_other_callbacks_add_to_what_the_trainer_saves_is_in_the_checkpoint(job: Volume) -> None:
    """A callback behind that of the job, after a step and at the end, where the Trainer itself was to save nothing."""
    job.trained(1, "with_transformers.py", "--adds-files", DDPJOB_SNAPSHOT_EVERY="18steps", DDPJOB_SNAPSHOT_KEEP="9")
    added = {path.parent.name: path.read_text() for path in job.checkpoints.glob("checkpoint-*/added")}
    assert added == {"checkpoint-000000000018": "18", "checkpoint-000000000036": "36"}
    assert not list((job.root / "shared" / "output").glob("checkpoint-*"))


def test_a_batch_that_does_not_fit_into_memory_after_saves_begins_again_with_a_smaller_one(job: Volume) -> None:
    every = {"DDPJOB_SNAPSHOT_EVERY": "2steps", "DDPJOB_SNAPSHOT_KEEP": "99"}
    ended = job.train(1, "with_transformers.py", "--out-of-memory-at", "6", **every)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stderr.count("training begins again after step 0, on 3 samples a step") == 1, ended.stderr
    assert {2, 4} < set(job.checkpoint_steps()), "of the batch of 4"
    of_batch = {int(path.parent.name[-12:]): path.read_text() for path in job.checkpoints.glob("*/ddpjob-step-batch")}
    assert (of_batch.pop(2), of_batch.pop(4)) == ("4", "4")
    assert (set(of_batch.values()), max(of_batch)) == ({"3"}, 48)


@pytest.mark.parametrize(
    ("case", "stays"),
    [
        ("of the job", False),
        ("of both", True),
        ("of a callback behind", True),
        ("of the Trainer at the end of the epoch", True),
        ("the best", True),
        ("limited", True),
        ("with an evaluation", True),
        ("nothing else saves", False),
    ],
)
def test_what_the_trainer_saves_for_the_job_alone_does_not_stay_in_its_folder(
    tmp_path: Path, case: str, stays: bool
) -> None:
    from transformers import TrainerControl

    from ddp_trainer.integrations.transformers import DDPJobCallback

    (tmp_path / "job").mkdir()
    source = tmp_path / "checkpoint-2"
    source.mkdir()
    callback = DDPJobCallback()
    callback._run = SimpleNamespace(
        should_save=lambda: case != "of a callback behind",
        should_stop=lambda: False,
        step_end=lambda **_: None,
        checkpoint=lambda step: nullcontext(tmp_path / "job"),
    )
    arguments = SimpleNamespace(
        save_strategy="no" if case == "nothing else saves" else "steps",
        output_dir=f"{tmp_path.parent}/./{tmp_path.name}",
        process_index=0,
        local_process_index=0,
        push_to_hub=False,
        save_total_limit=2 if case == "limited" else None,
    )
    best = f"{arguments.output_dir}/checkpoint-2" if case == "the best" else None
    state = SimpleNamespace(epoch=0.2, global_step=2, best_model_checkpoint=best)
    control = TrainerControl(should_save=case == "of both", should_evaluate=case == "with an evaluation")
    callback.on_step_end(arguments, state, control)
    callback.on_save(arguments, state, control)
    control.should_save = case == "of the Trainer at the end of the epoch"
    control.should_training_stop = True
    callback.on_epoch_end(arguments, state, control)
    assert (source.is_dir(), control.should_save) == (stays, False)


def test_what_another_callback_has_removed_is_no_checkpoint(tmp_path: Path) -> None:
    from ddp_trainer.integrations import transformers

    with pytest.raises(UserError, match="checkpoint-2 is gone"):
        transformers._copy_all(tmp_path / "checkpoint-2", tmp_path)


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


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_lightning_run_that_shuffles_and_drops_out_ends_with_the_same_weights(
    job: Volume, tmp_path: Path, ranks: int
) -> None:
    steps = 8 // ranks  # of an epoch
    whole = made(tmp_path / "unbroken").trained(ranks, "with_lightning.py", "--random")
    stop = ("--sigterm-at", str(2 * steps - 1))
    stopped = job.train(ranks, "with_lightning.py", "--random", *stop, DDPJOB_SNAPSHOT_EVERY="1epochs")
    assert (stopped.returncode != 0, job.checkpoint_steps()) == (True, [steps, 2 * steps]), stopped.stderr
    job.trained(ranks, "with_lightning.py", "--random", DDPJOB_ATTEMPT="1", DDPJOB_SNAPSHOT_EVERY="1epochs")
    assert job.script_losses() == whole.script_losses()
    assert weights(job) == weights(whole)


def weights(job: Volume) -> Any:
    return json.loads((job.root / "shared" / "weights.json").read_text())


def test_a_lightning_run_that_stops_at_a_validation_in_an_epoch_makes_it(job: Volume) -> None:
    # 8 steps an epoch: the stop is agreed on at the end of step 12
    every = {"DDPJOB_SNAPSHOT_EVERY": "4steps", "DDPJOB_SNAPSHOT_KEEP": "99"}
    stopped = job.train(1, "with_lightning.py", "--validates-every", "4", "--sigterm-at", "11", **every)
    assert (stopped.returncode != 0, job.checkpoint_steps()) == (True, [4, 8, 12]), stopped.stderr
    job.trained(1, "with_lightning.py", "--validates-every", "4", DDPJOB_ATTEMPT="1", **every)
    assert job.checkpoint_steps() == list(range(4, 49, 4))
    validated = [int(line) for line in (job.root / "shared" / "validated").read_text().splitlines()]
    assert validated == list(range(4, 49, 4))


def test_a_lightning_run_that_follows_a_metric_resumes_with_the_same_learning_rates(
    job: Volume, tmp_path: Path
) -> None:
    arguments = ("with_lightning.py", "--validates-every", "8")
    every = {"DDPJOB_SNAPSHOT_EVERY": "1epochs"}
    whole = made(tmp_path / "unbroken").trained(1, *arguments, **every)
    stopped = job.train(1, *arguments, "--sigterm-at", "15", **every)
    assert (stopped.returncode != 0, job.checkpoint_steps()[-1]) == (True, 16), stopped.stderr
    job.trained(1, *arguments, DDPJOB_ATTEMPT="1", **every)
    assert (job.script_losses(), weights(job)) == (whole.script_losses(), weights(whole))


def test_a_lightning_run_that_follows_a_metric_lowers_the_rate_after_an_epoch_that_it_resumes_in(
    job: Volume, tmp_path: Path
) -> None:
    arguments = ("with_lightning.py", "--validates-every", "8")
    whole = made(tmp_path / "unbroken").trained(1, *arguments)
    stopped = job.train(1, *arguments, "--sigterm-at", "19")
    assert (stopped.returncode != 0, 16 < job.checkpoint_steps()[-1] < 24) == (True, True), stopped.stderr
    job.trained(1, *arguments, DDPJOB_ATTEMPT="1")
    assert rates(job) == rates(whole)


def rates(job: Volume) -> list[str]:
    """Of each epoch, as it begins."""
    return (job.root / "shared" / "rates").read_text().splitlines()


def test_what_lightning_saves_at_the_end_of_an_epoch_has_the_generators_of_that_moment(job: Volume) -> None:
    # those of its end, whatever the next epoch draws for its order
    once = {"DDPJOB_SNAPSHOT_EVERY": "100epochs", "DDPJOB_SNAPSHOT_KEEP": "9"}
    job.trained(1, "with_lightning.py", "--random", "--save-epochs", **once)
    assert job.checkpoint_steps() == [8, 16, 24, 32, 40, 48]
    losses, ended = job.script_losses(), weights(job)
    (job.checkpoints / "checkpoint-000000000048" / "lightning.ckpt").write_bytes(b"damaged")
    job.trained(1, "with_lightning.py", "--random", "--save-epochs", DDPJOB_ATTEMPT="1", **once)
    assert [event["step"] for event in job.events("resumed")] == [40]
    assert (job.script_losses(), weights(job)) == (losses, ended)


def test_with_another_number_of_ranks_lightning_draws_anew_the_same_way_each_time(tmp_path: Path) -> None:
    from ddp_trainer.integrations.lightning import DDPJobCallback

    states = []
    for rank in range(2):
        torch.manual_seed(rank)
        states.append(rng.capture())
        (tmp_path / f"rng-{rank}.bin").write_bytes(bytes(states[-1].numpy()))

    def draws(rank: int, world_size: int) -> float:
        torch.manual_seed(99)
        callback = DDPJobCallback()
        callback._run = SimpleNamespace(step=0, listen=lambda: None)
        path = str(tmp_path / "lightning.ckpt")
        place = {"global_rank": rank, "world_size": world_size}
        callback.on_train_start(SimpleNamespace(ckpt_path=path, global_step=8, **place), None)
        return torch.rand(1).item()

    assert draws(1, 2) == torch.rand(1, generator=torch.Generator().manual_seed(1)).item()
    rng.reseed(states[0], step=8, rank=2, world_size=3)
    assert torch.rand(1).item() == draws(2, 3) == draws(2, 3) != draws(1, 3)


def test_what_lightning_saves_of_its_own_accord_becomes_a_checkpoint_of_the_job(job: Volume) -> None:
    # 24 steps, 4 an epoch: step 12 is saved by both
    job.trained(2, "with_lightning.py", "--model-checkpoint", DDPJOB_SNAPSHOT_EVERY="3epochs", DDPJOB_SNAPSHOT_KEEP="9")
    assert job.checkpoint_steps() == [3, 6, 9, 12, 15, 18, 21, 24]
    (own,) = (job.root / "shared" / "own").glob("*step=21.ckpt")
    assert (job.checkpoints / "checkpoint-000000000021" / "lightning.ckpt").read_bytes() == own.read_bytes()
    (job.checkpoints / "checkpoint-000000000024" / "lightning.ckpt").write_bytes(b"damaged")
    job.trained(2, "with_lightning.py", DDPJOB_ATTEMPT="1", DDPJOB_SNAPSHOT_EVERY="100epochs")
    assert [event["step"] for event in job.events("resumed")] == [21]


def test_weights_alone_are_not_taken_over_for_the_checkpoint_that_lightning_has_saved(tmp_path: Path) -> None:
    """As by two ModelCheckpoints after the same step, the second with save_weights_only."""
    from ddp_trainer.integrations.lightning import DDPJobCallback

    files: Any = DDPJobCallback().checkpoint_io
    files.save_checkpoint({"state_dict": {}, "optimizer_states": []}, tmp_path / "whole.ckpt")
    files.save_checkpoint({"state_dict": {}}, tmp_path / "weights.ckpt")
    assert (tmp_path / "weights.ckpt").is_file()
    assert files.path == tmp_path / "whole.ckpt"


def test_an_epoch_of_lightning_whose_last_batches_are_no_step_ends_too() -> None:
    """As where gradients accumulate by hand, or in DeepSpeed, over so many batches that some are left."""
    from ddp_trainer.integrations.lightning import DDPJobCallback

    seen: list[Any] = []
    callback = DDPJobCallback()
    callback._run = SimpleNamespace(step=0, should_save=lambda: False, should_stop=lambda: False)

    def step_end(epoch_end: bool) -> None:
        callback.run.step += 1
        seen.append(epoch_end)

    callback._run.step_end, callback._run.epoch_ends = step_end, lambda: seen.append("epoch")
    trainer = SimpleNamespace(global_step=0, is_last_batch=False, callbacks=[])
    for batches in (5, 4, 3):  # the last one is cut short, as by max_steps
        for batch in range(1, batches + 1):
            trainer.global_step += batch % 2 == 0
            trainer.is_last_batch = batch == batches > 3
            callback.on_train_batch_end(trainer, None, None, None, batch)
        callback.on_train_epoch_end(trainer, None)
    assert seen == [False, False, "epoch", False, True, False]


def test_lightning_saves_for_the_job_what_the_other_callbacks_have_made_of_the_step() -> None:
    from lightning.pytorch import Callback
    from lightning.pytorch.callbacks import ModelCheckpoint

    from ddp_trainer.integrations.lightning import DDPJobCallback

    callback, average, checkpoint = DDPJobCallback(), Callback(), ModelCheckpoint()
    trainer = SimpleNamespace(callbacks=[callback, average, checkpoint])
    for _ in range(2):
        callback.setup(trainer, None, "fit")
        assert trainer.callbacks == [average, callback, checkpoint, callback._at_end]
    callback.teardown(trainer, None, "fit")
    assert trainer.callbacks == [average, callback, checkpoint]
    trainer.callbacks = [callback, average]
    callback.setup(trainer, None, "validate")
    assert trainer.callbacks == [average, callback]


def test_the_end_of_an_epoch_is_saved_with_what_is_called_there_behind_other_callbacks() -> None:
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
    from lightning.pytorch.trainer.call import _call_callback_hooks

    from ddp_trainer.integrations.lightning import DDPJobCallback

    seen: list[str] = []
    callback, stopping, checkpoint = DDPJobCallback(), EarlyStopping("loss"), ModelCheckpoint()
    stopping.on_train_epoch_end = lambda *_: seen.append("stopping")
    checkpoint.on_train_epoch_end = lambda *_: seen.append("checkpoint")
    callback._at_end = type(callback._at_end)(lambda _: seen.append("job"), lambda _: None)
    trainer = SimpleNamespace(
        callbacks=[callback, checkpoint, stopping],
        lightning_module=None,
        fit_loop=SimpleNamespace(restarting=False),
        profiler=SimpleNamespace(profile=lambda _: nullcontext()),
    )
    callback.setup(trainer, None, "fit")
    _call_callback_hooks(trainer, "on_train_epoch_end", monitoring_callbacks=False)
    seen.append("module")
    _call_callback_hooks(trainer, "on_train_epoch_end", monitoring_callbacks=True)
    assert (seen[0], sorted(seen[1:3]), seen[3:]) == ("module", ["checkpoint", "stopping"], ["job"])


def test_the_end_of_an_epoch_is_saved_in_a_subclass_with_a_setup_of_its_own() -> None:
    from ddp_trainer.integrations.lightning import DDPJobCallback

    class Own(DDPJobCallback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            """Without that of the callback."""

    seen: list[str] = []
    callback = Own()
    callback._save_if_due = lambda _: seen.append("job")
    trainer = SimpleNamespace(callbacks=[callback])
    callback.setup(trainer, None, "fit")
    callback.on_train_epoch_end(trainer, None)
    assert seen == ["job"]


def test_an_accelerate_run_that_lost_a_rank_resumes_to_the_same_losses(job: Volume, tmp_path: Path) -> None:
    whole = made(tmp_path / "unbroken").trained(2, "with_accelerate.py").script_losses()
    assert job.train(2, "with_accelerate.py", DIES_AT="10").returncode != 0
    assert job.checkpoint_steps() == [7]
    job.trained(2, "with_accelerate.py", DDPJOB_ATTEMPT="1")
    assert job.script_losses() == whole
    assert len(whole) == 12


def test_an_accelerator_that_names_its_checkpoints_saves_into_that_of_the_job(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    from ddp_trainer.integrations.accelerate import save_state

    project = ProjectConfiguration(str(tmp_path / "project"), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = torch.nn.Linear(2, 1)
    accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    folder = tmp_path / "checkpoint"
    run: Any = SimpleNamespace(checkpoint=lambda step: nullcontext(folder))
    save_state(run, accelerator)
    assert (folder / "optimizer.bin").is_file()
    assert not (tmp_path / "project" / "checkpoints").exists()
    assert project.automatic_checkpoint_naming


@pytest.mark.parametrize(
    ("script", "callback"),
    [("with_transformers.py", "same"), ("with_transformers.py", "new"), ("with_lightning.py", "same")],
)
def test_a_second_training_which_would_go_on_from_the_first_is_an_error(
    job: Volume, script: str, callback: str
) -> None:
    """As pre-training and fine-tuning in one script: the second began with the weights and the steps of the first."""
    ended = job.train(1, script, "--again", callback)
    assert ended.returncode != 0
    assert re.search(r"this process has trained to step \d+ of the job \w+ before", ended.stderr), ended.stderr


def test_a_stop_saves_although_only_the_best_is_to_be_saved() -> None:
    from transformers import TrainerControl

    from ddp_trainer.integrations.transformers import DDPJobCallback

    callback = DDPJobCallback()
    callback._run = SimpleNamespace(should_save=lambda: True, should_stop=lambda: True, step_end=lambda **_: None)
    control = TrainerControl(should_evaluate=True)
    callback.on_step_end(SimpleNamespace(save_strategy="best"), SimpleNamespace(epoch=0.5, global_step=1), control)
    # the Trainer takes should_save from the result of an evaluation, if there is one
    assert (control.should_save, control.should_evaluate, control.should_training_stop) == (True, False, True)


@pytest.mark.parametrize(("epoch", "evaluates"), [(0.5, False), (1.0, True)], ids=["in an epoch", "at its end"])
def test_a_stop_in_an_epoch_does_not_wait_for_the_evaluation_of_its_end(epoch: float, evaluates: bool) -> None:
    """The Trainer calls on_epoch_end where it leaves an epoch early, and then evaluates with eval_strategy="epoch"."""
    from transformers import TrainerControl

    from ddp_trainer.integrations.transformers import DDPJobCallback

    callback = DDPJobCallback()
    callback._run = SimpleNamespace(should_save=lambda: False, should_stop=lambda: True, step_end=lambda **_: None)
    arguments, control = SimpleNamespace(save_strategy="steps"), TrainerControl()
    callback.on_step_end(arguments, SimpleNamespace(epoch=epoch, global_step=1), control)
    control.should_evaluate = True  # by the Trainer's own callback, which comes first
    callback.on_epoch_end(arguments, SimpleNamespace(global_step=7), control)
    assert (control.should_evaluate, control.should_training_stop) == (evaluates, True)


def test_what_an_evaluation_has_the_trainer_forget_to_save_is_saved_after_the_next_step() -> None:
    """With save_strategy="best", should_save is the result of an evaluation after the same step."""
    from transformers import TrainerControl

    from ddp_trainer.integrations.transformers import DDPJobCallback

    due = iter([True, False, False])
    callback = DDPJobCallback()
    callback._run = SimpleNamespace(
        should_save=lambda: next(due), should_stop=lambda: False, step_end=lambda **_: None, epoch=0
    )
    arguments, control = SimpleNamespace(save_strategy="best"), TrainerControl(should_evaluate=True)
    callback.on_step_end(arguments, SimpleNamespace(epoch=0.2, global_step=1), control)
    assert (control.should_save, control.should_evaluate) == (True, True)
    control.should_save = control.should_evaluate = False  # it was not the best
    callback.on_step_end(arguments, SimpleNamespace(epoch=0.4, global_step=1), control)
    assert control.should_save
    callback._saved = {2}
    callback.on_save(arguments, SimpleNamespace(global_step=2), control)
    control.should_save = False
    callback.on_step_end(arguments, SimpleNamespace(epoch=0.6, global_step=1), control)
    assert not control.should_save


def test_an_epoch_of_a_data_set_without_a_length_ends_too() -> None:
    """The Trainer takes all steps for one epoch then, and calls on_epoch_end where the data does end."""
    from transformers import TrainerControl

    from ddp_trainer.integrations.transformers import DDPJobCallback

    seen: list[Any] = []
    callback = DDPJobCallback()
    callback._run = SimpleNamespace(epoch=0, should_save=lambda: False, should_stop=lambda: False)
    callback._run.step_end = lambda epoch_end: seen.append(epoch_end)
    callback._run.epoch_ends = lambda: seen.append("epoch")
    arguments, control = SimpleNamespace(save_strategy="no"), TrainerControl()
    for epochs, stops in (((0.1, 0.2), False), ((1.5, 2.0), False), ((2.1,), True)):
        for epoch in epochs:
            callback.on_step_end(arguments, SimpleNamespace(epoch=epoch, global_step=1), control)
        control.should_training_stop = stops
        callback.on_epoch_end(arguments, SimpleNamespace(global_step=7), control)
    assert seen == [False, False, "epoch", False, True, False]


def test_the_step_after_an_epoch_whose_last_step_the_trainer_has_saved_saves_nothing() -> None:
    """As of a data set without a length, where save_steps falls on the end of the data."""
    from transformers import TrainerControl

    from ddp_trainer.integrations.transformers import DDPJobCallback

    asked: list[bool] = []
    callback = DDPJobCallback()
    callback._run = SimpleNamespace(
        epoch=0, should_save=lambda: bool(asked), should_stop=lambda: False, step_end=lambda **_: asked.clear()
    )
    callback._run.epoch_ends = lambda: asked.append(True)
    arguments, control = SimpleNamespace(save_strategy="steps"), TrainerControl()
    callback.on_step_end(arguments, SimpleNamespace(epoch=0.2, global_step=1), control)
    callback._saved = {2}
    callback.on_epoch_end(arguments, SimpleNamespace(global_step=2), control)
    assert (asked, control.should_save) == ([True], False)
    callback.on_step_end(arguments, SimpleNamespace(epoch=1.1, global_step=1), control)
    assert not control.should_save


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
