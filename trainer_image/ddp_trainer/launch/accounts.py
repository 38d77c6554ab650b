"""What the launchers of a gang tell each other when ranks fall silent, over the shared volume.

A hang shows on all nodes at once and has its cause on one. So the launcher whose ranks are late asks: it writes a file
that all others look for, and each answers with an account of its ranks: phase, step, silence, stack. The first that
finds a rank to be stalled publishes that as the verdict of the whole gang, so that all pods name the same rank.

    logs/<job>/stalls/<uid>-<attempt>/asked           changes with each question
    logs/<job>/stalls/<uid>-<attempt>/node-<N>.json   the account of a node
    logs/<job>/stalls/<uid>-<attempt>/verdict.json    the rank that is stalled; written once

A volume may hang, so a thread of its own does all of this, and the launcher never waits for it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ddp_trainer.contract.environment import PodEnvironment
from ddp_trainer.contract.json_files import read_json, write_json
from ddp_trainer.launch.exit.report import log

LOOK_SECONDS: Final = 1.0
ASKING_LOOK_SECONDS: Final = 0.2
ANSWER_SECONDS: Final = 15.0
"""How long a node may take to answer: its launcher looks once a second, and a stack takes up to a second."""

Account = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answers:
    """The accounts of the nodes that answered, this one among them, and the node ranks of the others."""

    accounts: tuple[Account, ...]
    missing: tuple[int, ...]


class Accounts:
    """This node's part in it. `give` makes the account of its ranks, on the thread of this object."""

    def __init__(self, pod: PodEnvironment, give: Callable[[], Account]) -> None:
        self._node_rank, self._nodes = pod.node_rank, pod.nodes
        self._folder = pod.log_dir / "stalls" / f"{pod.uid}-{pod.attempt}"
        self._give = give
        self._question: str | None = None
        self._lock = threading.Lock()
        self._asked_at: float | None = None
        self._before: dict[int, Any] = {}
        self._found: dict[int, Account] = {}
        self._answers: Answers | None = None
        self._to_publish: Mapping[str, Any] | None = None
        self._before_publishing: Callable[[], None] = lambda: None
        self.verdict: Mapping[str, Any] | None = None
        """What the gang has agreed on, once a launcher has published it."""
        self._wake, self._looked, self._closed = threading.Event(), threading.Event(), False
        self._failed = False
        threading.Thread(target=self._run, name="accounts", daemon=True).start()

    @property
    def is_asking(self) -> bool:
        return self._asked_at is not None

    def ask(self) -> None:
        """Ask all nodes; `answers` has them later."""
        with self._lock:
            self._asked_at, self._answers = time.monotonic(), None
            self._before, self._found = {}, {}
        self._wake.set()

    def answers(self) -> Answers | None:
        """Once all nodes have answered, or the time is up; then the question is closed."""
        with self._lock:
            if self._asked_at is None:
                return None
            if self._answers is None and time.monotonic() - self._asked_at > ANSWER_SECONDS + LOOK_SECONDS:
                self._answers = Answers((), tuple(range(self._nodes)))  # the volume hangs
            found = self._answers
            if found is not None:
                self._asked_at = None
            return found

    def publish(self, verdict: Mapping[str, Any], before: Callable[[], None]) -> None:
        """Have `verdict` be the one of the gang, unless another launcher was first; `before` is called before that."""
        self._to_publish, self._before_publishing = verdict, before
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

    def _run(self) -> None:
        first = True
        while not self._closed:
            try:
                self._look(first)
            except OSError:
                pass  # a volume that fails now may answer later
            except Exception as error:  # without this thread the others would take this node to be gone
                if not self._failed:
                    log(f"the launchers of the other nodes cannot be answered: {error!r}")
                self._failed = True
            first = False
            self._looked.set()
            self._wake.wait(LOOK_SECONDS if self._asked_at is None else ASKING_LOOK_SECONDS)
            self._wake.clear()

    def _look(self, first: bool) -> None:
        if self.verdict is None:
            self.verdict = read_json(self._folder / "verdict.json")
        if self._to_publish is not None and self.verdict is None:
            self._before_publishing()
            self.verdict = self._published(self._to_publish)
        question = self._read_question()
        if first:
            self._question = question  # of a launcher that was here before this one
        elif question is not None and question != self._question:
            self._answer()
            self._question = question  # last: one whose answer failed is answered at the next look
        if self._asked_at is not None and self._answers is None:
            self._collect()

    def _collect(self) -> None:
        if not self._before:
            self._folder.mkdir(parents=True, exist_ok=True)
            known = ((node, self._read_account(node)) for node in range(self._nodes))
            self._before = {-1: None} | {node: account["id"] for node, account in known if account is not None}
            self._question = os.urandom(8).hex()
            temporary = self._folder / f".asked-{self._node_rank}"
            temporary.write_text(self._question)
            temporary.replace(self._folder / "asked")
            self._answer()
        for node in range(self._nodes):
            if node not in self._found:
                account = self._read_account(node)
                if account is not None and account["id"] != self._before.get(node):
                    self._found[node] = account
        missing = tuple(node for node in range(self._nodes) if node not in self._found)
        with self._lock:
            if self._asked_at is not None and (not missing or time.monotonic() - self._asked_at > ANSWER_SECONDS):
                self._answers = Answers(tuple(self._found[node] for node in sorted(self._found)), missing)

    def _answer(self) -> None:
        account = {"version": 1, "id": os.urandom(8).hex(), "nodeRank": self._node_rank, **self._give()}
        write_json(self._folder / f"node-{self._node_rank}.json", account)

    def _read_question(self) -> str | None:
        try:
            return (self._folder / "asked").read_text()
        except FileNotFoundError:
            return None

    def _read_account(self, node: int) -> Account | None:
        found = read_json(self._folder / f"node-{node}.json")
        return found if found is not None and found.get("version") == 1 else None

    def _published(self, verdict: Mapping[str, Any]) -> Mapping[str, Any]:
        path = self._folder / "verdict.json"
        temporary = self._folder / f".verdict-{self._node_rank}.json"
        write_json(temporary, verdict)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return read_json(path) or verdict
        except OSError:  # a volume without hard links: the last one wins
            temporary.replace(path)
            return verdict
        finally:
            temporary.unlink(missing_ok=True)
        return verdict
