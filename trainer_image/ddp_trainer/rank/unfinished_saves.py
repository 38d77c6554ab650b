"""A checkpoint that a library saves file by file is not found half done by the next attempt.

`Trainer` of transformers, `Accelerator.save_state`, SpeechBrain's `Checkpointer`, DeepSpeed's engine and
`torch.distributed.checkpoint.save` write a checkpoint as a folder, and a script resumes from the newest folder. A rank
that is killed in between leaves one that no attempt can load, and the job fails though older checkpoints are whole. So
a rank notes the folder before such a save, and takes the note back after it. Before its script, each rank removes the
folders that earlier attempts have not finished.

DeepSpeed resumes from the folder that the file `latest` names, which rank 0 writes once its own part is written, while
other ranks may still write theirs: `latest` names the folder before it again. Nothing in such a folder tells whether it
is whole, so it is left where another job may have saved into it since.

Only a folder that was empty before the save is removed: in any other there may be files that are not of the save. One
that was saved over is named: it may lack files, or have parts of two checkpoints, from which some libraries go on
without an error.

A folder that has the file that its library writes last is whole: what the library does afterwards, as removing older
checkpoints, may be what the rank was killed in. A later save into the folder, or below it, that comes to its end takes
back the note, whichever rank and attempt has left it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from ddp_trainer.contract.standard_error import say
from ddp_trainer.rank.after_import import after_import

TRAINER: Final = "transformers.trainer"
ACCELERATOR: Final = "accelerate.accelerator"
DCP: Final = "torch.distributed.checkpoint"
SPEECHBRAIN: Final = "speechbrain.utils.checkpoints"
DEEPSPEED: Final = "deepspeed.runtime.engine"
LATEST: Final = "latest"
"""A file of DeepSpeed's, beside the folders of its checkpoints: the name of the one to resume from."""
LIGHTNING: Final = ".ckpt"
"""How a folder is called that Lightning has DeepSpeed save one checkpoint in, with a LATEST of its own."""
_RANK: Final = "-rank-"
_REMOVED: Final = ".json"
_OVER: Final = ".over"
"""How the names of notes end: of a folder that is removed, and of one that was saved over, which is not. Earlier
versions remove what any `.json` there names.
"""
_OF_THE_SAVE: Final = re.compile(r"(rng_state|random_states)_\d+\.\w+|checkpoint-is-incomplete\.txt")
"""A file that each rank writes, and another one may have written by now; and one by which transformers marks a
checkpoint that it saves at SIGTERM (enable_jit_checkpoint), before the save, and that it ignores when it looks for the
newest.
"""


class _Note(NamedTuple):
    folder: Path
    last: str | None
    """The file that makes it whole, if one does."""
    pointer: Path | None
    """A file that may name the folder before it is whole, if there is such a file."""
    before: str | None
    """What that file has named before the save."""
    is_over: bool
    """The save was over what was in the folder."""


class UnfinishedSaves:
    """The notes of one rank, in a folder that all attempts see. `attempt` is a name that no other one has: the job's
    UID, a hyphen and a number.
    """

    def __init__(self, notes: Path, attempt: str, rank: int) -> None:
        self._notes, self._prefix = notes, f"{attempt}{_RANK}"
        self._job = _job_of(self._prefix)
        self._own, self._own_over = (notes / f"{self._prefix}{rank}{suffix}" for suffix in (_REMOVED, _OVER))
        self._under_way: list[Path] = []

    def remove(self) -> None:
        """Remove what earlier attempts have left unfinished. Every rank does before its script: so none sees it. Later
        ones may be saving already, where a pod of this attempt begins late.
        """
        if not os.access(self._notes, os.W_OK):
            return  # a note that stays would have a folder removed again, which is whole by then
        for note in sorted(self._all_notes()):
            if note.name.startswith(self._prefix) or _is_later(note.name, self._prefix):
                continue
            noted = _unfinished(note)
            may_be_whole = noted is not None and self._may_be_whole(note, noted)
            if noted is not None and not noted.is_over and not may_be_whole:
                _point_back(noted)
                shutil.rmtree(noted.folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                note.unlink()  # which the first of the ranks can
                if noted is not None:
                    _say_of(noted, may_be_whole=may_be_whole)

    def _may_be_whole(self, note: Path, noted: _Note) -> bool:
        """Whether another job may have saved into a folder of DeepSpeed's since: the note is of another job, whose end
        may be long ago, or the file `latest` names a third folder by now.
        """
        pointer = noted.pointer
        if pointer is None:
            return False
        named = "" if pointer.is_relative_to(noted.folder) else _named_in(pointer)
        is_moved = bool(named) and named != noted.before and pointer.parent / str(named) != noted.folder
        return is_moved or _job_of(note.name) != self._job

    @contextlib.contextmanager
    def saving(self, folder: Path, last: str | None = None, pointer: Path | None = None) -> Iterator[None]:
        """Around a save into `folder`, which stays noted if that fails: the rank may end by it. The save may consist of
        others, into folders in it. `last` is the file that makes it whole, if one does; `pointer` is one elsewhere that
        may name it before it is.
        """
        folder = folder.absolute()
        if any(folder.is_relative_to(other) for other in self._under_way):
            yield
            return
        if _is_new(folder):
            self._note(folder, last, pointer)
        elif all(noted is None or noted.folder != folder for noted in map(_read, self._all_notes())):
            self._note_over(folder)
        self._under_way.append(folder)
        try:
            yield
        finally:
            self._under_way.remove(folder)
        self._take_back(folder)

    def _note(self, folder: Path, last: str | None, pointer: Path | None = None) -> None:
        noted: dict[str, str | None] = {"folder": str(folder), "last": last}
        with contextlib.suppress(OSError):  # the save itself may be to another volume
            if pointer is not None:
                noted |= {"pointer": str(pointer.absolute()), "before": _named_in(pointer)}
            self._notes.mkdir(parents=True, exist_ok=True)
            self._own.write_text(json.dumps(noted))

    def _note_over(self, folder: Path) -> None:
        with contextlib.suppress(OSError):
            self._notes.mkdir(parents=True, exist_ok=True)
            self._own_over.write_text(json.dumps({"folder": str(folder), "last": None}))

    def _take_back(self, saved: Path) -> None:
        """What was noted of a folder with what is whole now: by this rank, or by one that did not come so far."""
        for note in self._all_notes():
            noted = _read(note)
            if noted is not None and saved.is_relative_to(noted.folder):
                with contextlib.suppress(OSError):
                    note.unlink()

    def _all_notes(self) -> list[Path]:
        try:
            return [note for suffix in (_REMOVED, _OVER) for note in self._notes.glob(f"*{_RANK}*{suffix}")]
        except OSError:  # the volume fails, and the save is to another one
            return []

    def watch(self) -> None:
        """From now on; call it in a rank before its script."""
        after_import(TRAINER, self._watch_trainer)
        after_import(ACCELERATOR, self._watch_accelerator)
        after_import(DCP, self._watch_dcp)
        after_import(SPEECHBRAIN, self._watch_speechbrain)
        after_import(DEEPSPEED, self._watch_deepspeed)

    def _watch_trainer(self) -> None:
        # a module of the script may have the same name
        trainer = getattr(sys.modules[TRAINER], "Trainer", None)
        self._wrap(trainer, "_save_checkpoint", _of_trainer, lambda *_: "trainer_state.json")

    def _watch_accelerator(self) -> None:
        accelerator = getattr(sys.modules[ACCELERATOR], "Accelerator", None)
        self._wrap(accelerator, "save_state", _of_state, _last_of_state)

    def _watch_dcp(self) -> None:
        package = sys.modules[DCP]
        self._wrap(package, "save", _of_dcp, lambda *_: ".metadata")
        package.state_dict_saver.save = package.save  # which async_save calls

    def _watch_speechbrain(self) -> None:
        """It gives its folder a name with the time, and takes it for a checkpoint from the first file on."""
        checkpointer: Any = getattr(sys.modules[SPEECHBRAIN], "Checkpointer", None)
        begin, save = (getattr(checkpointer, name, None) for name in ("_save_checkpoint_metafile", "save_checkpoint"))
        if begin is None or save is None:
            return
        begun: list[Path] = []

        @functools.wraps(begin)
        def noting(own: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
            with contextlib.suppress(Exception):
                folder = Path(path).parent.absolute()
                begun.append(folder)  # also one in which a save has failed before
                if _is_new(folder):
                    self._note(folder, None)
            return begin(own, path, *args, **kwargs)

        @functools.wraps(save)
        def whole(*args: Any, **kwargs: Any) -> Any:
            begun.clear()
            saved = save(*args, **kwargs)
            for folder in begun:
                self._take_back(folder)
            return saved

        checkpointer._save_checkpoint_metafile, checkpointer.save_checkpoint = noting, whole

    def _watch_deepspeed(self) -> None:
        engine = getattr(sys.modules[DEEPSPEED], "DeepSpeedEngine", None)
        self._wrap(engine, "save_checkpoint", _of_deepspeed, lambda *_: None, _latest_of_deepspeed)

    def _wrap(
        self,
        owner: Any,
        name: str,
        saved: Callable[..., Path | None],
        last: Callable[..., str | None],
        pointer: Callable[..., Path] | None = None,
    ) -> None:
        save = getattr(owner, name, None)
        if save is None:
            return

        @functools.wraps(save)
        def noted(*args: Any, **kwargs: Any) -> Any:
            around: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            with contextlib.suppress(Exception):  # what the libraries have inside may change
                if (place := saved(*args, **kwargs)) is not None:
                    names = None if pointer is None else pointer(*args, **kwargs)
                    around = self.saving(place, last(*args), names)
            with around:
                return save(*args, **kwargs)

        setattr(owner, name, noted)


def _read(note: Path) -> _Note | None:
    """What it says; None if it cannot be read."""
    try:
        noted = json.loads(note.read_bytes())
        folder, last = Path(noted["folder"]), noted["last"]
        pointer, before = noted.get("pointer"), noted.get("before")
        pointer = Path(pointer) if pointer else None
        return _Note(folder, last, pointer, str(before) if before else None, is_over=note.suffix == _OVER)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _unfinished(note: Path) -> _Note | None:
    """What it says, if the folder that it names is there and not whole."""
    if (noted := _read(note)) is None:
        return None
    try:
        is_whole = noted.last and _is_written(noted.folder / noted.last)
        return noted if noted.folder.is_dir() and not is_whole else None
    except (OSError, ValueError, TypeError):
        return None


def _job_of(name: str) -> str:
    """The UID in the name of a note."""
    return name.rpartition(_RANK)[0].rpartition("-")[0]


def _is_later(note: str, own: str) -> bool:
    """Whether a note is of a later attempt than the own ones of the same job, whose names begin with `own`."""
    theirs, number = (name.rpartition(_RANK)[0].rpartition("-")[2] for name in (note, own))
    return _job_of(note) == _job_of(own) and theirs.isdecimal() and number.isdecimal() and int(theirs) > int(number)


def _say_of(noted: _Note, *, may_be_whole: bool) -> None:
    if noted.is_over:
        say(
            f"ddp_trainer: an earlier attempt ended while it saved into {noted.folder}, which had files before: that "
            "may be unfinished, or have parts of two checkpoints. Save each into a folder of its own"
        )
        return
    if may_be_whole:
        say(
            f"ddp_trainer: {noted.folder} is left, which an earlier attempt had not finished when it ended: another "
            "job may have done so since. If none has, remove it, and resume from an older one"
        )
        return
    done = "cannot remove" if noted.folder.exists() else "removed"
    say(f"ddp_trainer: {done} {noted.folder}, which an earlier attempt had not finished when it ended")


def _point_back(noted: _Note) -> None:
    """Where a file names the folder, which goes, have it name the one before; no file is left if that is gone too. An
    empty file was just being written.
    """
    pointer, before = noted.pointer, noted.before
    named = None if pointer is None else _named_in(pointer)
    if pointer is None or named is None or (named and pointer.parent / named != noted.folder):
        return
    with contextlib.suppress(OSError):
        if before and pointer.parent / before != noted.folder and (pointer.parent / before).is_dir():
            new = pointer.with_name(f".{pointer.name}-{os.urandom(4).hex()}")
            new.write_text(before)
            new.replace(pointer)
        else:
            pointer.unlink()


def _named_in(pointer: Path) -> str | None:
    try:
        return pointer.read_text().strip()
    except (OSError, ValueError):
        return None


def _is_written(file: Path) -> bool:
    """Whether it is there; of JSON and what torch.save writes, whole."""
    try:
        if file.suffix == ".pkl":
            return zipfile.is_zipfile(file)
        content = file.read_bytes()
        if file.suffix == ".json":
            json.loads(content)
    except (OSError, ValueError):
        return False
    return True


def _is_new(folder: Path) -> bool:
    """Whether all that is in it after the save is the save's."""
    try:
        with contextlib.suppress(FileNotFoundError):  # a working directory that is gone is not below the folder
            if Path.cwd().is_relative_to(folder.resolve()):
                return False
        return all(_OF_THE_SAVE.fullmatch(path.name) for path in folder.iterdir())
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _of_trainer(trainer: Any, model: Any, trial: Any, *_: Any, **__: Any) -> Path | None:
    """Where this rank is about to save the checkpoint of a Trainer; None where another rank does."""
    if not trainer.args.should_save:
        return None
    return Path(trainer._get_output_dir(trial=trial), f"checkpoint-{trainer.state.global_step}")


def _of_state(accelerator: Any, output_dir: Any = None, *_: Any, **__: Any) -> Path | None:
    """Where this rank is about to save the state of an Accelerator; None where another rank does."""
    if not accelerator.is_main_process:
        return None
    if accelerator.project_configuration.automatic_checkpoint_naming:
        return Path(accelerator.project_dir, "checkpoints", f"checkpoint_{accelerator.save_iteration}")
    return Path(output_dir).expanduser()


def _last_of_state(accelerator: Any, *_: Any) -> str:
    """What the main process writes last: the objects that the script has registered, after its random numbers."""
    objects = len(accelerator._custom_objects)
    return f"custom_checkpoint_{objects - 1}.pkl" if objects else f"random_states_{accelerator.process_index}.pkl"


def _of_dcp(
    state_dict: Any, *, checkpoint_id: Any = None, storage_writer: Any = None, no_dist: bool = False, **_: Any
) -> Path | None:
    """The folder of a distributed checkpoint, if this rank is the one that completes it."""
    from torch import distributed

    if not no_dist and distributed.is_available() and distributed.is_initialized() and distributed.get_rank():
        return None
    place = checkpoint_id if checkpoint_id is not None else getattr(storage_writer, "path", None)
    return Path(place) if isinstance(place, str | Path) else None


def _of_deepspeed(engine: Any, save_dir: Any, tag: Any = None, *_: Any, **__: Any) -> Path | None:
    """Where the ranks are about to save the checkpoint of an engine, if this is the one that names it in LATEST."""
    if engine.global_rank:
        return None
    if Path(save_dir).suffix == LIGHTNING and tag == "checkpoint":
        return Path(save_dir)
    return Path(save_dir, f"global_step{engine.global_steps}" if tag is None else str(tag))


def _latest_of_deepspeed(engine: Any, save_dir: Any, *_: Any, **__: Any) -> Path:
    return Path(save_dir, LATEST)
