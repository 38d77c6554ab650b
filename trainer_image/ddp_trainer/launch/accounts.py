"""What the launchers of a gang tell each other when ranks fall silent, over the shared volume.

A hang shows on all nodes at once and has its cause on one. So the launcher whose ranks are late asks: it writes a file
that all others look for, and each answers with an account of its ranks: phase, step, silence, stack. The first that
finds a rank to be stalled publishes that as the verdict of the whole gang, so that all pods name the same rank. The
others leave it to the one that has asked: if each of a thousand launchers read the accounts of all, that would be a
million files.

    logs/<job>/stalls/<uid>-<attempt>/asked           changes with each question; empty before the first
    logs/<job>/stalls/<uid>-<attempt>/node-<N>.json   the account of a node
    logs/<job>/stalls/<uid>-<attempt>/verdict.json    the rank that is stalled; written once

A volume may hang, so a thread of its own does all of this, and the launcher never waits for it. A client of NFS may
remember for a minute that a name was not there (nfs(5), acdirmax), until it changes the folder itself: so the file of
the questions is there from the start, and a launcher that waits for another file touches the folder before it looks.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ddp_trainer.contract.environment import PodEnvironment
from ddp_trainer.contract.json_files import read_json, write_json
from ddp_trainer.launch.exit.report import log

ASKED: Final = "asked"
VERDICT: Final = "verdict.json"
LOOK_SECONDS: Final = 1.0
ASKING_LOOK_SECONDS: Final = 0.2
ANSWER_SECONDS: Final = 15.0
"""How long a node may take to answer: its launcher looks once a second, and a stack takes up to a second."""

OTHERS_SECONDS: Final = 60.0
"""For how long after another launcher has asked this one does not: by then the other has answers, or asks again."""

TOUCH_SECONDS: Final = 60.0
"""How long after a question each launcher looks for the verdict with fresh eyes."""

Account = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answers:
    """The accounts of the nodes that answered, this one among them, and the node ranks of the others."""

    accounts: tuple[Account, ...]
    missing: tuple[int, ...]


class Folder:
    """The folder of one attempt's stalls, as this node sees it."""

    def __init__(self, path: Path, node_rank: int | None) -> None:
        self._path, self._own = path, f".node-{node_rank}"

    def make(self) -> None:
        """With the file of the questions, unless another launcher was first."""
        self._path.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (self._path / ASKED).touch(exist_ok=False)

    def touch(self) -> None:
        """Change the folder, so that names are looked up which were not there before."""
        with contextlib.suppress(OSError):
            os.utime(self._path)

    def question(self) -> str:
        """The last one, empty before the first."""
        try:
            return (self._path / ASKED).read_text()
        except FileNotFoundError:
            return ""

    def ask(self, question: str) -> None:
        temporary = self._path / f"{self._own}-{ASKED}"
        temporary.write_text(question)
        temporary.replace(self._path / ASKED)

    def read(self, name: str) -> dict[str, Any] | None:
        return read_json(self._path / name)

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        write_json(self._path / name, value)

    def write_once(self, name: str, value: Mapping[str, Any]) -> Mapping[str, Any]:
        """What is in the file then: `value`, unless another launcher was first."""
        path, temporary = self._path / name, self._path / f"{self._own}-{name}"
        write_json(temporary, value)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return read_json(path) or value
        except OSError:  # a volume without hard links: the last one wins
            temporary.replace(path)
            return value
        finally:
            temporary.unlink(missing_ok=True)
        return value


class Accounts:
    """This node's part in it. `give` makes the account of its ranks, on the thread of this object."""

    def __init__(self, pod: PodEnvironment, give: Callable[[], Account], folder: Folder | None = None) -> None:
        self._node_rank, self._nodes, self._is_live = pod.node_rank, pod.nodes, pod.live
        path = pod.log_dir / "stalls" / f"{pod.uid}-{pod.attempt}"
        self._folder = folder or Folder(path, pod.node_rank)
        self._give = give
        self._is_made = False
        self._question = ""
        """The last one that this node has answered. One that was there before this node is open, too: another launcher
        may ask before this one has looked for the first time."""
        self._questioned_at = -TOUCH_SECONDS
        self._own_question = ""
        self._others_asked_at = -OTHERS_SECONDS
        """When this node answered a question of another one last."""
        self._lock = threading.Lock()
        self._asked_at: float | None = None
        self._read_at = 0.0
        """When the volume has last given an account, or said that there is none."""
        self._open: float | None = None
        """When the question was asked that this node's file has."""
        self._current: set[str] = set()
        """That question and those that other nodes have asked since: an answer to any of them is one to it."""
        self._found: dict[int, Account] = {}
        self._answers: Answers | None = None
        self._to_publish: Callable[[], Mapping[str, Any]] | None = None
        self.verdict: Mapping[str, Any] | None = None
        """What the gang has agreed on, once a launcher has published it."""
        self._wake, self._looked, self._closed = threading.Event(), threading.Event(), False
        self._failed = False
        threading.Thread(target=self._run, name="accounts", daemon=True).start()

    @property
    def is_asking(self) -> bool:
        return self._asked_at is not None

    def ask(self) -> None:
        """Ask all nodes, unless another one has; `answers` has them later."""
        if self._is_left_to_another:
            return
        with self._lock:
            self._asked_at, self._answers = time.monotonic(), None
        self._wake.set()

    def answers(self) -> Answers | None:
        """Once all nodes have answered, or the time is up; then the question is closed."""
        with self._lock:
            if self._asked_at is None:
                return None
            silent = time.monotonic() - max(self._asked_at, self._read_at)
            if self._answers is None and silent > ANSWER_SECONDS + LOOK_SECONDS:
                self._answers = Answers((), tuple(range(self._nodes)))  # the volume hangs
            found = self._answers
            if found is not None:
                self._asked_at = None
            return found

    def publish(self, make: Callable[[], Mapping[str, Any]]) -> None:
        """Have what `make` returns, on the thread of this object, be the verdict of the gang, unless another launcher
        was first.
        """
        self._to_publish = make
        self._wake.set()

    def final(self, seconds: float) -> Mapping[str, Any] | None:
        """The verdict, if there is one by now; waits that long for one more look at most."""
        self._looked.clear()
        self._wake.set()
        self._looked.wait(seconds)
        return self.verdict

    def close(self) -> None:
        """The attempt is over."""
        self._closed = True
        self._wake.set()

    @property
    def _is_left_to_another(self) -> bool:
        """Whether another launcher is about to find the verdict. Nodes that recover live each find their own."""
        return not self._is_live and time.monotonic() - self._others_asked_at < OTHERS_SECONDS

    def _run(self) -> None:
        while not self._closed:
            try:
                self._look()
            except OSError:
                pass  # a volume that fails now may answer later
            except Exception as error:  # without this thread the others would take this node to be gone
                if not self._failed:
                    log(f"the launchers of the other nodes cannot be answered: {error!r}")
                self._failed = True
            self._looked.set()
            self._wake.wait(LOOK_SECONDS if self._asked_at is None else ASKING_LOOK_SECONDS)
            self._wake.clear()

    def _look(self) -> None:
        if not self._is_made:
            self._folder.make()
            self._is_made = True
        asked_at = self._asked_at
        if asked_at is not None or time.monotonic() - self._questioned_at < TOUCH_SECONDS:
            self._folder.touch()
        if self.verdict is None:
            self.verdict = self._folder.read(VERDICT)
        if self._to_publish is not None and self.verdict is None:
            self.verdict = self._folder.write_once(VERDICT, self._to_publish())
        self._answer_last()
        if asked_at is not None and asked_at != self._open:
            if self._is_left_to_another:
                self._asked_at = asked_at = None
            else:
                self._own_question = os.urandom(8).hex()
                self._folder.ask(self._own_question)
                self._open, self._current, self._found = asked_at, {self._own_question}, {}
                self._answer_last()
        if asked_at is not None and self._answers is None:
            self._current.add(self._question)
            self._collect(asked_at)

    def _answer_last(self) -> None:
        """Answer the last question. Only then is the verdict left to another launcher, which without the answer could
        find none on the ranks of this node.
        """
        question = self._folder.question()
        if question in ("", self._question):
            return
        self._questioned_at = time.monotonic()
        self._answer(question)
        self._question = question  # last: one whose answer failed is answered at the next look
        if question != self._own_question:
            self._others_asked_at = time.monotonic()

    def _collect(self, asked_at: float) -> None:
        began_at = time.monotonic()  # to read the accounts of many nodes takes long: each may answer before that
        for node in range(self._nodes):
            if node not in self._found:
                account = self._folder.read(_file_of(node))
                self._read_at = time.monotonic()
                if account is not None and account.get("version") == 1 and account["question"] in self._current:
                    self._found[node] = account
        missing = tuple(node for node in range(self._nodes) if node not in self._found)
        with self._lock:
            if self._asked_at == asked_at and (not missing or began_at - asked_at > ANSWER_SECONDS):
                self._answers = Answers(tuple(self._found[node] for node in sorted(self._found)), missing)

    def _answer(self, question: str) -> None:
        account = {"version": 1, "question": question, "nodeRank": self._node_rank, **self._give()}
        self._folder.write(_file_of(self._node_rank), account)


def _file_of(node: int | None) -> str:
    return f"node-{node}.json"
