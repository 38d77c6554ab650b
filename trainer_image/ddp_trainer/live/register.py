"""The views of one attempt on the volume. Each number is written once: the first proposal is the view.

    checkpoints/<job>/views/<fencing token>/00000003.json      view 3
    checkpoints/<job>/views/<fencing token>/present-0-0.json   the newest process in a place, before the first view
    checkpoints/<job>/views/<fencing token>/left-<id>          this process takes no part any more: it ends
    checkpoints/<job>/views/<fencing token>/finished           training has come to its end
    checkpoints/<job>/views/<fencing token>/given-up           why the ranks cannot go on in this attempt

A view gets its name by link(2), which fails if the name is taken, on NFS too. A client of NFS may have lost the reply
and be refused by its own link, so what counts is the file that then has the name. A later attempt has a folder of its
own.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Final

from ddp_trainer.contract.environment import JobEnvironment
from ddp_trainer.contract.exit_codes import LiveRecoveryFailed
from ddp_trainer.contract.json_files import read_json, write_json
from ddp_trainer.live.views import Member, View
from ddp_trainer.snapshots.trust.fence import Attempt
from ddp_trainer.snapshots.trust.names import job_directory

FOLDER: Final = "views"
LEFT: Final = "left-"
FINISHED: Final = "finished"
GIVEN_UP: Final = "given-up"


def views_of(job: JobEnvironment) -> Register:
    """Where the ranks of this attempt keep their views."""
    return Register(job_directory(job.shared, job.name) / FOLDER / Attempt(job.created, job.attempt, job.uid).name)


class Register:
    """The folder of one attempt. All methods raise OSError where the volume cannot be used."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def enter(self, member: Member) -> None:
        """Say that a process is there, in place of an earlier one in the same place."""
        write_json(self._present(member.place), asdict(member))

    def entered(self) -> dict[tuple[int, int], Member]:
        """The newest process in each place that has one."""
        self._touch()
        found = (read_json(path) for path in self._folder.glob("present-*.json"))
        members = [Member(**member) for member in found if member is not None]
        return {member.place: member for member in members}

    def leave(self, member: str) -> None:
        """Say that the process with this id takes no part any more."""
        (self._folder / f"{LEFT}{member}").touch()

    def are_gone(self, members: Sequence[Member]) -> bool:
        """Whether none of `members` goes on: of each pod one has left, or a newer process has its place, as the
        operator gives it only where the pod is lost.
        """
        self._touch()
        pods: dict[tuple[int, str], list[Member]] = {}
        for member in members:
            pods.setdefault((member.node_rank, member.pod), []).append(member)
        return all(any(map(self._is_gone, pod)) for pod in pods.values())  # mostly the first pod is not, of a thousand

    def _is_gone(self, member: Member) -> bool:
        if (self._folder / f"{LEFT}{member.id}").exists():
            return True
        newest = read_json(self._present(member.place))
        return newest is not None and newest["id"] != member.id

    def _present(self, place: tuple[int, int]) -> Path:
        return self._folder / f"present-{place[0]}-{place[1]}.json"

    def finish(self) -> None:
        """Say that training has come to its end: there will be no other view."""
        (self._folder / FINISHED).touch()

    @property
    def is_finished(self) -> bool:
        self._touch()
        return (self._folder / FINISHED).exists()

    def give_up(self, why: str) -> bool:
        """Say that there will be no other view, and why. Whether this is the first to do so."""
        with self._draft(why) as draft:
            try:
                (self._folder / GIVEN_UP).hardlink_to(draft)
            except FileExistsError:
                return os.path.samestat(draft.stat(), (self._folder / GIVEN_UP).stat())
        return True

    @property
    def given_up(self) -> str | None:
        """Why there will be no other view, if that was said."""
        try:
            return (self._folder / GIVEN_UP).read_text()
        except FileNotFoundError:
            return None

    def newest(self) -> View | None:
        """The view with the greatest number; None before the first."""
        self._touch()
        names = [entry.name for entry in os.scandir(self._folder) if entry.name[:1].isdigit()]
        return self._read(max(names)) if names else None

    def propose(self, view: View) -> View:
        """The view of this number: `view`, if nothing else was proposed before."""
        name = f"{view.number:08d}.json"
        with self._draft(json.dumps(view.to_json())) as draft, contextlib.suppress(FileExistsError):
            (self._folder / name).hardlink_to(draft)
        return self._read(name)

    @contextmanager
    def _draft(self, text: str) -> Iterator[Path]:
        """A file with this text, to be linked to its name: nobody reads half of it."""
        draft = self._folder / f".{uuid.uuid4().hex}"
        try:
            with draft.open("x") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            yield draft
        finally:
            draft.unlink(missing_ok=True)

    def _read(self, name: str) -> View:
        return View.from_json(json.loads((self._folder / name).read_text()))

    def _touch(self) -> None:
        """An NFS client may answer from its cache, until it changes the folder itself."""
        with contextlib.suppress(PermissionError):
            os.utime(self._folder)


@contextmanager
def volume_used() -> Iterator[None]:
    """Where the views are read and written. Raises LiveRecoveryFailed for a volume that cannot be used."""
    try:
        yield
    except OSError as error:
        raise LiveRecoveryFailed(f"the volume, which decides on the next view, cannot be used: {error}") from error
