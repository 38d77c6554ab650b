"""Metric writers: TensorBoard always, and Weights & Biases with `--wandb offline`.

Both are written by rank 0 below logs/<job> on the volume, and neither may end training: a volume that is full raises
OSError, which the caller reports, and the next point tries again. Nothing here talks to a network: what W&B has
written offline is uploaded by a person, with `wandb sync`.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

from ddp_trainer.contract.exit_codes import UserError

ROOM_BYTES: Final = 1 << 20
"""What must be free on a volume that was full before event files are tried again."""


class MetricWriter(Protocol):
    """Writes metrics below `directory`."""

    directory: Path

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of one step. Raises OSError where the volume refuses."""
        ...

    def close(self) -> None:
        """Write what is left; raises nothing."""
        ...


class TensorBoard:
    """Event files in `directory`. Points of earlier attempts beyond `resumed_at` are dropped: with 0 all of them, with
    None none.
    """

    def __init__(self, directory: Path, *, resumed_at: int | None = None) -> None:
        self.directory = directory
        self._resumed_at = resumed_at
        self._writer: Any = None
        self._made = 0
        """The second, since the epoch, of the newest event file."""
        self._failure: OSError | None = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        try:
            if self._writer is None:
                if self._failure is not None and int(time.time()) == self._made:
                    # Files are read in the order of their names, which begin with the second. Two of one second may
                    # be read in the wrong order, and the first one's purge would drop the points of the second.
                    raise self._failure.with_traceback(None)
                if self._failure is not None and shutil.disk_usage(self.directory).free < ROOM_BYTES:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                # The import takes 0.2 s: after the first steps, not before them.
                from torch.utils.tensorboard import SummaryWriter

                self._made = int(time.time())
                # what was logged before the first step is logged again
                purge = self._resumed_at and self._resumed_at + 1
                self._writer = SummaryWriter(str(self.directory), purge_step=purge)
                self._writer.flush()
                self._resumed_at = None  # another one, after an error, must not drop the points of this one
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
        except OSError as error:
            # Its thread has ended, with a traceback; the next point makes another one, once there is room for it.
            self._writer = None
            self._failure = error
            raise

    def close(self) -> None:
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close()
            self._writer = None


class OfflineWandb:
    """A W&B run of this attempt, in `directory`/wandb; the attempts of a job are one group."""

    def __init__(self, directory: Path, *, job: str, attempt: int, settings: Mapping[str, Any]) -> None:
        self.directory = directory
        self._job = job
        self._attempt = attempt
        self._settings = dict(settings)
        self._run: Any = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._run is None:
            wandb: Any = importlib.import_module("wandb")
            self.directory.mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                # by name, so that no WANDB_MODE of the environment sends anything anywhere
                mode="offline",
                dir=str(self.directory),
                project=os.environ.get("WANDB_PROJECT", "ddpjob"),
                group=self._job,
                name=f"{self._job}-attempt-{self._attempt}",
                config=self._settings,
                # neither its banner, nor its own copy of stdout, nor what it would find out about this machine
                settings=wandb.Settings(
                    silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=True
                ),
            )
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        if self._run is not None:
            with suppress(Exception):
                self._run.finish()
            self._run = None


def check_wandb() -> None:
    """Raises UserError where W&B is not installed: before training starts, and on every rank alike."""
    if importlib.util.find_spec("wandb") is None:
        raise UserError(
            "--wandb offline needs the package wandb, which this Python does not have: pip install wandb (in the "
            "image, on a cluster), or leave --wandb out; TensorBoard and the losses are written in any case"
        )
