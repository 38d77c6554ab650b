"""Folders that a killed rank leaves in the middle of a save, and what the next attempt finds."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ddp_trainer.rank import unfinished_saves
from ddp_trainer.rank.unfinished_saves import ACCELERATOR, DEEPSPEED, SPEECHBRAIN, TRAINER, UnfinishedSaves


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory of the script."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)


def of_attempt(tmp_path: Path, attempt: int, rank: int = 0) -> UnfinishedSaves:
    return UnfinishedSaves(tmp_path / "unfinished", f"uid-{attempt}", rank)


def begun(saves: UnfinishedSaves, folder: Path) -> None:
    """A save that has written a file when its rank is killed."""
    with contextlib.suppress(KeyboardInterrupt), saves.saving(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").touch()
        raise KeyboardInterrupt


def test_the_next_attempt_does_not_see_a_folder_that_was_not_finished(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = Path("output/checkpoint-5"), Path("output/checkpoint-10")
    with of_attempt(tmp_path, 0).saving(first):
        first.mkdir(parents=True)
    begun(of_attempt(tmp_path, 0), second)
    of_attempt(tmp_path, 0, rank=1).remove()
    assert second.exists(), "the attempt is still at it"
    for rank in range(2):
        of_attempt(tmp_path, 1, rank).remove()
    assert list(Path("output").iterdir()) == [first]
    assert capfd.readouterr().err.count(f"removed {second.absolute()}, which") == 1
    assert not list((tmp_path / "unfinished").iterdir())


def test_what_a_later_attempt_saves_is_left_where_a_pod_of_an_earlier_one_begins_late(tmp_path: Path) -> None:
    folder = Path("output/checkpoint-5")
    begun(of_attempt(tmp_path, 10), folder)
    of_attempt(tmp_path, 9).remove()
    assert (folder / "model.safetensors").exists()
    of_attempt(tmp_path, 11).remove()
    assert not folder.exists()


@pytest.mark.parametrize("name", ["rng_state_1.pth", "checkpoint-is-incomplete.txt"])
def test_a_folder_that_another_rank_has_written_into_is_new(name: str, tmp_path: Path) -> None:
    folder = Path("checkpoint-10")
    folder.mkdir()
    (folder / name).touch()
    begun(of_attempt(tmp_path, 0), folder)
    of_attempt(tmp_path, 1).remove()
    assert not folder.exists()


@pytest.mark.parametrize(("state", "is_whole"), [("{}", True), ('{"step', False), (None, False)])
def test_a_folder_with_the_file_that_is_written_last_is_left(
    state: str | None, is_whole: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The rank was killed while its library removed older checkpoints, or sent this one away."""
    folder = Path("checkpoint-10")
    with contextlib.suppress(KeyboardInterrupt), of_attempt(tmp_path, 0).saving(folder, "trainer_state.json"):
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
        raise KeyboardInterrupt
    of_attempt(tmp_path, 1).remove()
    assert folder.exists() == is_whole
    assert ("removed" in capfd.readouterr().err) != is_whole
    assert not list((tmp_path / "unfinished").iterdir())


@pytest.mark.parametrize("folder", ["last", ".", ".."])
def test_a_folder_with_other_files_is_left_and_named(
    folder: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("last").mkdir()
    Path("last/config.json").touch()
    begun(of_attempt(tmp_path, 0), Path(folder))
    for rank in range(2):
        of_attempt(tmp_path, 1, rank).remove()
    assert Path("last/config.json").exists()
    assert Path(folder, "model.safetensors").exists()
    said = f"saved into {Path(folder).absolute()}, which had files before: that may be unfinished, or have parts of two"
    assert capfd.readouterr().err.count(said) == 1
    assert not list((tmp_path / "unfinished").iterdir())


def test_a_folder_that_was_saved_over_to_the_end_is_not_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    saves, last, other = of_attempt(tmp_path, 0), Path("last"), Path("checkpoint-10")
    with saves.saving(last):
        last.mkdir()
        (last / "model.safetensors").touch()
    begun(saves, other)
    with saves.saving(last):
        (last / "model.safetensors").touch()
    of_attempt(tmp_path, 1).remove()
    assert last.exists()
    assert not other.exists(), "its note is another one"
    assert "which had files before" not in capfd.readouterr().err


def test_a_folder_of_the_attempt_that_was_saved_again_and_not_finished_is_removed(tmp_path: Path) -> None:
    saves, folder = of_attempt(tmp_path, 0), Path("checkpoint-10")
    for _ in range(2):
        begun(saves, folder)
    of_attempt(tmp_path, 1).remove()
    assert not folder.exists()


def test_the_working_directory_is_left(tmp_path: Path) -> None:
    begun(of_attempt(tmp_path, 0), Path())
    of_attempt(tmp_path, 1).remove()
    assert Path("model.safetensors").exists()


def test_a_save_that_failed_and_was_repeated_is_finished(tmp_path: Path) -> None:
    saves, folder = of_attempt(tmp_path, 0), Path("checkpoint-10")
    begun(saves, folder)
    with saves.saving(folder):
        (folder / "optimizer.pt").touch()
    of_attempt(tmp_path, 1).remove()
    assert folder.exists()


def test_a_later_save_finishes_what_another_rank_has_begun(tmp_path: Path) -> None:
    """A rank of an attempt that was taken for dead has noted the folder last."""
    folder = Path("checkpoint-10")
    begun(of_attempt(tmp_path, 0), folder)
    with of_attempt(tmp_path, 1).saving(folder):
        (folder / "optimizer.pt").touch()
    of_attempt(tmp_path, 2).remove()
    assert folder.exists()


class Checkpointer:
    """As SpeechBrain's: a folder with the first file is a checkpoint to it."""

    def __init__(self, *, is_killed: bool) -> None:
        self.is_killed = is_killed

    def _save_checkpoint_metafile(self, path: Path, meta: Any = None) -> None:
        path.write_text("unixtime: 1\n")

    def save_checkpoint(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._save_checkpoint_metafile(folder / "CKPT.yaml")
        if self.is_killed:
            raise KeyboardInterrupt
        (folder / "model.ckpt").touch()


@pytest.fixture
def speechbrain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_save_checkpoint_metafile", "save_checkpoint"):
        monkeypatch.setattr(Checkpointer, name, getattr(Checkpointer, name))
    module: Any = ModuleType(SPEECHBRAIN)
    module.Checkpointer = Checkpointer
    monkeypatch.setitem(sys.modules, SPEECHBRAIN, module)


@pytest.mark.usefixtures("speechbrain")
def test_a_checkpoint_of_speechbrain_that_was_not_finished_is_removed(tmp_path: Path) -> None:
    of_attempt(tmp_path, 0)._watch_speechbrain()
    Checkpointer(is_killed=False).save_checkpoint(Path("save/CKPT+1"))
    with contextlib.suppress(KeyboardInterrupt):
        Checkpointer(is_killed=True).save_checkpoint(Path("save/CKPT+2"))
    of_attempt(tmp_path, 1).remove()
    assert list(Path("save").iterdir()) == [Path("save/CKPT+1")]
    assert not list((tmp_path / "unfinished").iterdir())


@pytest.mark.usefixtures("speechbrain")
def test_a_checkpoint_of_speechbrain_that_was_saved_again_after_a_failure_is_left(tmp_path: Path) -> None:
    of_attempt(tmp_path, 0)._watch_speechbrain()
    with contextlib.suppress(KeyboardInterrupt):
        Checkpointer(is_killed=True).save_checkpoint(Path("save/CKPT+latest"))
    Checkpointer(is_killed=False).save_checkpoint(Path("save/CKPT+latest"))
    of_attempt(tmp_path, 1).remove()
    assert Path("save/CKPT+latest/model.ckpt").exists()


class Engine:
    """As DeepSpeed's: rank 0 names a checkpoint before other ranks have written their parts of it."""

    def __init__(self, step: int, *, rank: int = 0, is_killed: bool = False) -> None:
        self.global_steps, self.global_rank, self.is_killed = step, rank, is_killed

    def save_checkpoint(self, save_dir: str, tag: str | None = None, client_state: Any = None) -> None:
        name = tag or f"global_step{self.global_steps}"
        Path(save_dir, name).mkdir(parents=True, exist_ok=True)
        Path(save_dir, name, f"zero_pp_rank_{self.global_rank}_mp_rank_00_optim_states.pt").touch()
        if self.global_rank == 0:
            Path(save_dir, "latest").write_text(name)
        if self.is_killed:
            raise KeyboardInterrupt


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "save_checkpoint", Engine.save_checkpoint)
    module: Any = ModuleType(DEEPSPEED)
    module.DeepSpeedEngine = Engine
    monkeypatch.setitem(sys.modules, DEEPSPEED, module)


@pytest.mark.usefixtures("deepspeed")
@pytest.mark.parametrize("tags", [(None, None), ("epoch1/step10", "epoch1/step20")])
def test_deepspeed_resumes_from_the_checkpoint_before_the_one_that_was_not_finished(
    tags: tuple[str | None, str | None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    of_attempt(tmp_path, 0)._watch_deepspeed()
    Engine(10).save_checkpoint("save", tag=tags[0], client_state={})
    named = Path("save/latest").read_text()
    assert not list((tmp_path / "unfinished").iterdir())
    with contextlib.suppress(KeyboardInterrupt):
        Engine(20, is_killed=True).save_checkpoint("save", tags[1])
    unfinished = Path("save", Path("save/latest").read_text())
    assert unfinished != Path("save", named)
    for rank in range(2):
        of_attempt(tmp_path, 1, rank).remove()
    assert Path("save/latest").read_text() == named
    assert Path("save", named).is_dir()
    assert not unfinished.exists()
    assert sorted(path.name for path in Path("save").iterdir()) == sorted([named.partition("/")[0], "latest"])
    assert f"removed {unfinished.absolute()}, which" in capfd.readouterr().err


@pytest.mark.usefixtures("deepspeed")
@pytest.mark.parametrize("is_first", [True, False])
def test_deepspeed_begins_anew_where_there_is_no_checkpoint_before(is_first: bool, tmp_path: Path) -> None:
    """The script may have removed it, to have only one at a time."""
    of_attempt(tmp_path, 0)._watch_deepspeed()
    if not is_first:
        Engine(10).save_checkpoint("save")
        shutil.rmtree("save/global_step10")
    with contextlib.suppress(KeyboardInterrupt):
        Engine(20, is_killed=True).save_checkpoint("save")
    of_attempt(tmp_path, 1).remove()
    assert not list(Path("save").iterdir())


@pytest.mark.usefixtures("deepspeed")
def test_the_newest_checkpoint_of_deepspeed_that_is_another_by_now_stays_so(tmp_path: Path) -> None:
    """Such as one that was chosen by hand, or that a job has saved which may have saved the other one too."""
    of_attempt(tmp_path, 0)._watch_deepspeed()
    for step in (10, 20):
        Engine(step).save_checkpoint("save")
    with contextlib.suppress(KeyboardInterrupt):
        Engine(30, is_killed=True).save_checkpoint("save")
    Path("save/latest").write_text("global_step10\n")
    of_attempt(tmp_path, 1).remove()
    assert Path("save/global_step30").exists()
    assert Path("save/latest").read_text() == "global_step10\n"
    assert not list((tmp_path / "unfinished").iterdir())


@pytest.mark.usefixtures("deepspeed")
@pytest.mark.parametrize("arguments", [("save", None), ("step=20.ckpt", "checkpoint")])
def test_a_checkpoint_of_deepspeed_that_another_job_may_have_saved_again_is_left(
    arguments: tuple[str, str | None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing in the folder tells that it is whole by now."""
    of_attempt(tmp_path, 0)._watch_deepspeed()
    with contextlib.suppress(KeyboardInterrupt):
        Engine(20, is_killed=True).save_checkpoint(*arguments)
    named = Path(arguments[0], "latest").read_text()
    for rank in range(2):
        UnfinishedSaves(tmp_path / "unfinished", "uid-of-another-0", rank).remove()
    assert Path(arguments[0], named).is_dir()
    assert Path(arguments[0], "latest").read_text() == named
    assert capfd.readouterr().err.count("is left, which an earlier attempt had not finished") == 1
    assert not list((tmp_path / "unfinished").iterdir())


@pytest.mark.usefixtures("deepspeed")
def test_the_name_of_the_newest_checkpoint_of_deepspeed_may_not_be_written_yet(tmp_path: Path) -> None:
    """Rank 0 has opened the file, which makes it empty."""
    of_attempt(tmp_path, 0)._watch_deepspeed()
    Engine(10).save_checkpoint("save")
    with contextlib.suppress(KeyboardInterrupt):
        Engine(20, is_killed=True).save_checkpoint("save")
    Path("save/latest").write_text("")
    of_attempt(tmp_path, 1).remove()
    assert not Path("save/global_step20").exists()
    assert Path("save/latest").read_text() == "global_step10"


@pytest.mark.usefixtures("deepspeed")
def test_of_lightning_with_deepspeed_the_whole_checkpoint_is_removed(tmp_path: Path) -> None:
    """It saves each in a folder of its own, and what looks for the newest takes that folder for one."""
    of_attempt(tmp_path, 0)._watch_deepspeed()
    Engine(10).save_checkpoint("version_0/step=10.ckpt", client_state={}, tag="checkpoint")
    with contextlib.suppress(KeyboardInterrupt):
        Engine(20, is_killed=True).save_checkpoint("version_0/step=20.ckpt", client_state={}, tag="checkpoint")
    of_attempt(tmp_path, 1).remove()
    assert [path.name for path in Path("version_0").iterdir()] == ["step=10.ckpt"]
    assert sorted(path.name for path in Path("version_0/step=10.ckpt").iterdir()) == ["checkpoint", "latest"]


@pytest.mark.usefixtures("deepspeed")
def test_a_rank_that_does_not_name_the_checkpoint_of_deepspeed_notes_nothing(tmp_path: Path) -> None:
    of_attempt(tmp_path, 0, rank=1)._watch_deepspeed()
    with contextlib.suppress(KeyboardInterrupt):
        Engine(10, rank=1, is_killed=True).save_checkpoint("save")
    assert not (tmp_path / "unfinished").exists()


def test_a_whole_checkpoint_below_a_folder_whose_save_failed_is_left(tmp_path: Path) -> None:
    saves, whole = of_attempt(tmp_path, 0), Path("output/epoch-1")
    begun(saves, Path("output"))
    with saves.saving(whole):
        whole.mkdir()
    of_attempt(tmp_path, 1).remove()
    assert whole.exists()


def test_notes_that_cannot_be_taken_back_remove_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are of another user, and would have the folder removed in each attempt."""
    folder = Path("checkpoint-10")
    begun(of_attempt(tmp_path, 0), folder)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "unfinished")
    of_attempt(tmp_path, 1).remove()
    assert folder.exists()


def test_a_folder_that_cannot_be_removed_is_named_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("elsewhere").mkdir()
    folder = Path("checkpoint-10")
    folder.symlink_to("elsewhere")  # which rmtree refuses
    begun(of_attempt(tmp_path, 0), folder)
    of_attempt(tmp_path, 1).remove()
    assert f"cannot remove {folder.absolute()}" in capfd.readouterr().err


def test_notes_that_cannot_be_listed_do_not_fail_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = of_attempt(tmp_path, 0)
    with saves.saving(Path("checkpoint-10")):
        scandir = os.scandir

        def fails(path: Any) -> Any:
            if Path(path) == tmp_path / "unfinished":
                raise OSError(errno.EIO, "Input/output error")
            return scandir(path)

        monkeypatch.setattr(os, "scandir", fails)
    of_attempt(tmp_path, 1).remove()


def test_a_save_where_the_working_directory_is_gone(tmp_path: Path) -> None:
    Path("gone").mkdir()
    os.chdir("gone")
    Path("../gone").absolute().rmdir()
    begun(of_attempt(tmp_path, 0), tmp_path / "checkpoint-10")


def test_a_folder_with_other_files_is_left_where_the_working_directory_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "table.csv").touch()
    Path("gone").mkdir()
    os.chdir("gone")
    (tmp_path / "work" / "gone").rmdir()
    begun(of_attempt(tmp_path, 0), folder)
    of_attempt(tmp_path, 1).remove()
    assert (folder / "table.csv").exists()


def test_notes_that_cannot_be_written_or_read_do_not_stop_a_rank(tmp_path: Path) -> None:
    notes = tmp_path / "unfinished"
    notes.touch()
    begun(of_attempt(tmp_path, 0), Path("checkpoint-10"))
    notes.unlink()
    notes.mkdir()
    for number, text in enumerate(["", "[]", '{"folder": 3}']):
        (notes / f"uid-0-rank-{number}.json").write_text(text)
    of_attempt(tmp_path, 1).remove()
    assert Path("checkpoint-10").exists()
    assert not list(notes.iterdir())


def test_a_save_that_is_a_part_of_another_does_not_finish_it(tmp_path: Path) -> None:
    saves, folder = of_attempt(tmp_path, 0), Path("checkpoint-10")
    with contextlib.suppress(KeyboardInterrupt), saves.saving(folder):
        with saves.saving(folder / "shards"):
            (folder / "shards").mkdir(parents=True)
        raise KeyboardInterrupt
    of_attempt(tmp_path, 1).remove()
    assert not folder.exists()


@pytest.mark.parametrize("name", ["checkpoint_id", "storage_writer"])
def test_a_distributed_checkpoint_that_was_not_finished_is_removed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed.checkpoint as dcp

    for module in (dcp, dcp.state_dict_saver):
        monkeypatch.setattr(module, "save", module.save)
    of_attempt(tmp_path, 0).watch()
    for folder, fails in ((Path("step-1"), False), (Path("step-2"), True)):
        writer = dcp.FileSystemWriter(folder)
        if fails:
            monkeypatch.setattr(writer, "finish", None)
        where = {"storage_writer": writer, "checkpoint_id": folder if name == "checkpoint_id" else None}
        with pytest.raises(dcp.CheckpointException) if fails else contextlib.nullcontext():
            dcp.save({"weight": torch.ones(2)}, **where)
    assert list(Path("step-2").iterdir())
    of_attempt(tmp_path, 1).remove()
    assert [path.name for path in Path().iterdir()] == ["step-1"]


class Killed(BaseException):
    """In the place of SIGKILL."""


@pytest.fixture
def killed_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ends the process, as far as a test can, when a file whose name begins so is saved with torch."""
    save = torch.save

    def killed_at(name: str) -> None:
        def killed(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
            if Path(f).name.startswith(name):
                raise Killed
            save(obj, f, *args, **kwargs)

        monkeypatch.setattr(torch, "save", killed)

    return killed_at


def tiny_trainer(steps: int) -> Any:
    """Saves each second step."""
    import transformers  # takes seconds

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    return transformers.Trainer(
        model=transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=8, **sizes)),
        args=transformers.TrainingArguments("output", use_cpu=True, report_to=[], save_steps=2, max_steps=steps),
        train_dataset=[{"input_ids": torch.arange(4), "labels": index % 2} for index in range(16)],
    )


def test_a_trainer_resumes_from_the_checkpoint_before_the_one_that_was_not_finished(
    tmp_path: Path, killed_at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers  # takes seconds
    from transformers.trainer_utils import get_last_checkpoint

    monkeypatch.setattr(transformers.Trainer, "_save_checkpoint", transformers.Trainer._save_checkpoint)
    of_attempt(tmp_path, 0).watch()
    tiny_trainer(steps=2).train()
    killed_at("scheduler.pt")
    with pytest.raises(Killed):
        tiny_trainer(steps=4).train(resume_from_checkpoint=True)
    assert get_last_checkpoint("output") == "output/checkpoint-4"
    of_attempt(tmp_path, 1).remove()
    assert get_last_checkpoint("output") == "output/checkpoint-2"
    killed_at("none")
    resumed = tiny_trainer(steps=4)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4


def test_a_checkpoint_that_a_trainer_saves_at_sigterm_and_does_not_finish_is_removed(
    tmp_path: Path, killed_at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With enable_jit_checkpoint: the pod's time may be up before the save is done."""
    import transformers  # takes seconds
    from transformers.trainer_jit_checkpoint import CheckpointManager
    from transformers.trainer_utils import get_last_checkpoint

    monkeypatch.setattr(transformers.Trainer, "_save_checkpoint", transformers.Trainer._save_checkpoint)
    of_attempt(tmp_path, 0).watch()
    trainer = tiny_trainer(steps=2)
    trainer.train()
    trainer.state.global_step = 3
    killed_at("scheduler.pt")
    with pytest.raises(Killed):
        CheckpointManager(trainer).execute_jit_checkpoint()
    assert get_last_checkpoint("output") == "output/checkpoint-3"
    of_attempt(tmp_path, 1).remove()
    assert get_last_checkpoint("output") == "output/checkpoint-2"


def test_the_state_of_an_accelerator_that_was_not_finished_is_removed(
    tmp_path: Path, killed_at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import accelerate  # takes seconds
    from accelerate.utils import ProjectConfiguration

    monkeypatch.setattr(accelerate.Accelerator, "save_state", accelerate.Accelerator.save_state)
    of_attempt(tmp_path, 0).watch()
    project = ProjectConfiguration("project", automatic_checkpoint_naming=True)
    for accelerator, arguments in (
        (accelerate.Accelerator(cpu=True), ["step_1"]),
        (accelerate.Accelerator(cpu=True, project_config=project), []),
    ):
        model = torch.nn.Linear(2, 1)
        accelerator.prepare(model, torch.optim.Adam(model.parameters()))
        whole = Path(accelerator.save_state(*arguments))
        assert whole.is_dir()
        shutil.move(whole, "whole")
        killed_at("random_states")
        if not arguments:
            accelerator.project_configuration.iteration = 0
        with pytest.raises(Killed):
            accelerator.save_state(*arguments)
        killed_at("none")
        assert whole.is_dir()
        of_attempt(tmp_path, 1).remove()
        assert not whole.exists()
        shutil.rmtree("whole")


@pytest.mark.parametrize("objects", [0, 2])
def test_the_state_of_an_accelerator_that_is_whole_by_now_is_left(
    objects: int, tmp_path: Path, killed_at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that was saved again outside of a job."""
    import accelerate  # takes seconds

    save_state = accelerate.Accelerator.save_state
    monkeypatch.setattr(accelerate.Accelerator, "save_state", save_state)
    of_attempt(tmp_path, 0).watch()
    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    accelerator.prepare(model)
    for _ in range(objects):
        accelerator.register_for_checkpointing(torch.nn.Linear(1, 1))
    last = f"custom_checkpoint_{objects - 1}" if objects else "random_states_0"
    for is_whole in (False, True):
        killed_at(last)
        with pytest.raises(Killed):
            accelerator.save_state("step_1")
        assert list(Path("step_1").iterdir())
        killed_at("none")
        if is_whole:
            save_state(accelerator, "step_1")
        of_attempt(tmp_path, 1).remove()
        assert Path("step_1").exists() == is_whole


@pytest.mark.parametrize("name", [TRAINER, ACCELERATOR, DEEPSPEED])
def test_modules_of_a_script_may_have_the_names_of_the_libraries(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[str] = []

    def after_import(library: str, action: Callable[[], None]) -> None:
        if library == name:
            watched.append(library)
            action()

    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(unfinished_saves, "after_import", after_import)
    of_attempt(tmp_path, 0).watch()
    assert watched == [name]
