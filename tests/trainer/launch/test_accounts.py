"""Launchers that ask each other, over a volume that shows new files late, as NFS does."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.waiting import eventually

from ddp_trainer.contract import processes, run_dir
from ddp_trainer.contract.environment import PodEnvironment
from ddp_trainer.contract.heartbeat import Heartbeat, heartbeat_dir
from ddp_trainer.contract.json_files import write_json
from ddp_trainer.launch import accounts, gang_watch
from ddp_trainer.launch.accounts import Accounts, Answers, Folder
from ddp_trainer.launch.gang_watch import GangWatch, Stall
from ddp_trainer.launch.watchdog import Rank


class LateFolder(Folder):
    """What was not there stays so, until this client changes the folder itself (nfs(5): negative entries)."""

    def __init__(self, path: Path, node_rank: int) -> None:
        super().__init__(path, node_rank)
        self._absent: set[str] = set()
        self._lock = threading.Lock()

    def make(self):
        super().make()
        self._absent.clear()

    def touch(self):
        super().touch()
        self._absent.clear()

    def ask(self, question):
        super().ask(question)
        self._absent.clear()

    def write(self, name, value):
        super().write(name, value)
        self._absent.clear()

    def question(self):
        found = "" if "asked" in self._absent else super().question()
        if not (self._path / "asked").exists():
            self._absent.add("asked")
        return found

    def read(self, name):
        found = None if name in self._absent else super().read(name)
        if found is None:
            self._absent.add(name)
        return found


@pytest.fixture
def two(pod: PodEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Accounts, Accounts]]:
    # a busy machine may keep a thread waiting for longer than a node is given to answer
    monkeypatch.setattr("ddp_trainer.launch.accounts.ANSWER_SECONDS", 100.0)
    monkeypatch.setattr("ddp_trainer.launch.accounts.OTHERS_SECONDS", 0.0)
    nodes = [
        Accounts(replace_node(pod, node), lambda: {"ranks": []}, LateFolder(tmp_path / "stalls", node))
        for node in (0, 1)
    ]
    yield nodes[0], nodes[1]
    for node in nodes:
        node.close()


def replace_node(pod: PodEnvironment, node: int) -> PodEnvironment:
    return replace(pod, node_rank=node)


def answers_of(accounts: Accounts) -> Answers:
    found: list[Answers] = []

    def answered() -> bool:
        answers = accounts.answers()
        if answers is not None:
            found.append(answers)
        return answers is not None

    eventually(answered, "the answers")
    return found[0]


def test_nodes_that_see_new_files_late_answer_each_other_and_agree(two: tuple[Accounts, Accounts]) -> None:
    first, second = two
    for asking in (first, second, first):
        asking.ask()
        answers = answers_of(asking)
        assert answers.missing == ()
        assert [account["nodeRank"] for account in answers.accounts] == [0, 1]
    first.publish(lambda: {"version": 1, "rank": 1})
    eventually(lambda: second.verdict is not None, "the verdict on the other node")
    assert second.verdict == {"version": 1, "rank": 1}


def test_a_question_that_was_asked_before_a_node_looked_for_the_first_time_is_answered(pod, tmp_path) -> None:
    folder = tmp_path / "stalls"
    first = Accounts(replace_node(pod, 0), lambda: {"ranks": []}, Folder(folder, 0))
    first.ask()
    eventually((folder / "node-0.json").exists, "the question and its own answer")
    second = Accounts(replace_node(pod, 1), lambda: {"ranks": []}, Folder(folder, 1))
    assert answers_of(first).missing == ()
    first.close()
    second.close()


def test_an_account_that_answers_an_earlier_question_is_not_taken(pod, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("ddp_trainer.launch.accounts.ANSWER_SECONDS", 0.5)
    accounts = Accounts(pod, lambda: {"ranks": []}, Folder(tmp_path / "stalls", 0))
    write_json(tmp_path / "stalls" / "node-1.json", {"version": 1, "question": "old", "nodeRank": 1, "ranks": []})
    accounts.ask()
    assert answers_of(accounts).missing == (1,)
    accounts.close()


class Memory(Folder):
    """A volume for many nodes, and the time that it takes: `seconds` for an account."""

    def __init__(self, *, seconds: float = 0.0) -> None:
        super().__init__(Path("no-such-folder"), None)
        self.now = 1000.0
        self.seconds = seconds
        self.asked = ""
        self.questions = 0
        self.reads = 0
        self.files: dict[str, Mapping[str, Any]] = {}
        self.on_read: Callable[[], None] = lambda: None

    def make(self) -> None:
        pass

    def touch(self) -> None:
        pass

    def question(self) -> str:
        return self.asked

    def ask(self, question: str) -> None:
        self.asked, self.questions = question, self.questions + 1

    def read(self, name: str) -> Any:
        if name.startswith("node-"):
            self.reads += 1
            self.now += self.seconds
            self.on_read()
        return self.files.get(name)

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        self.files[name] = value


@pytest.fixture
def of_many(pod: PodEnvironment, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Memory], list[Accounts]]:
    """So many nodes, without their threads, by the clock of the volume."""

    def nodes(count: int, folder: Memory) -> list[Accounts]:
        monkeypatch.setattr(Accounts, "_run", lambda self: None)
        monkeypatch.setattr("ddp_trainer.launch.accounts.time", SimpleNamespace(monotonic=lambda: folder.now))
        pods = [replace(pod, node_rank=node, nodes=count) for node in range(count)]
        return [Accounts(one, lambda: {"ranks": []}, folder) for one in pods]

    return nodes


def test_of_many_launchers_whose_ranks_are_late_one_reads_the_accounts(of_many) -> None:
    folder = Memory()
    nodes = of_many(300, folder)

    def all_look() -> list[Answers | None]:
        folder.now += 1.0
        for node in nodes:
            node.ask()
        for _ in range(2):
            for node in nodes:
                node._look()
        return [node.answers() for node in nodes]

    first, *others = all_look()
    assert first is not None
    assert (len(first.accounts), first.missing) == (300, ())
    assert others == [None] * 299
    assert folder.questions == 1
    assert folder.reads < 3 * 300
    assert not any(node.is_asking for node in nodes)
    first, *others = all_look()
    assert first is not None, "the same one asks again"
    assert folder.questions == 2
    folder.now += accounts.OTHERS_SECONDS
    nodes.pop(0)
    assert all_look() == [None] * 299, "the node of the one that has asked is gone"
    assert [node.is_asking for node in nodes] == [True] + [False] * 298
    folder.now += accounts.ANSWER_SECONDS + 0.1
    nodes[0]._look()
    second = nodes[0].answers()
    assert second is not None
    assert (len(second.accounts), second.missing) == (299, (0,))


def test_a_node_that_cannot_give_its_account_leaves_nothing_to_another(of_many, monkeypatch) -> None:
    """Of its ranks the other one hears nothing: it has to judge them by itself."""
    folder = Memory()
    first, second = of_many(2, folder)
    first.ask()
    first._look()

    def fail(name: str, value: Mapping[str, Any]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", name)

    monkeypatch.setattr(folder, "write", fail)
    for _ in range(2):
        second.ask()
        with pytest.raises(OSError, match="No space left"):
            second._look()
    folder.now += accounts.ANSWER_SECONDS + accounts.LOOK_SECONDS + 0.1
    assert second.answers() == Answers((), (0, 1))


def test_each_of_the_nodes_that_recover_live_asks_for_itself(pod, of_many) -> None:
    """A rank that stands still is ended by its own node alone."""
    pod = replace(pod, live=True)
    folder = Memory()
    of_many(0, folder)
    nodes = [Accounts(replace_node(pod, node), lambda: {"ranks": []}, folder) for node in range(pod.nodes)]
    for _ in range(2):
        for node in nodes:
            node.ask()
            node._look()
    for node in nodes:
        node._look()
    assert None not in [node.answers() for node in nodes]


def test_accounts_that_take_longer_to_read_than_to_give_are_all_found(of_many) -> None:
    folder = Memory(seconds=0.1)
    first, *others = of_many(300, folder)

    def answer() -> None:
        if folder.reads == 150:
            for node in others:
                node._look()

    folder.on_read = answer
    first.ask()
    found = None
    for _ in range(3):
        first._look()
        found = found or first.answers()
    assert found is not None
    assert (len(found.accounts), found.missing) == (300, ())


WAITS = {"phase": "train", "step": 5, "silentSeconds": 100.0, "stepSecondsP99": 0.1} | {
    "stack": 'Current thread:\n  File "/site-packages/torch/distributed/c10d.py", line 1 in all_reduce\n'
}
LOOKS = {"phase": "script", "step": None, "silentSeconds": 1900.0, "observed": True} | {
    "stack": 'Current thread:\n  File "/opt/app/train.py", line 3 in wait\n'
}


@pytest.mark.parametrize("waits", [WAITS, LOOKS], ids=["in a collective", "for a file before its first step"])
def test_a_node_is_the_cause_only_once_it_has_been_missing_for_a_minute(pod, monkeypatch, waits) -> None:
    published = []

    class Asked:
        verdict = None
        is_asking = False

        def __init__(self, pod, give) -> None:
            self.next: Answers | None = None

        def answers(self) -> Answers | None:
            return self.next

        def ask(self) -> None:
            pass

        def publish(self, make) -> None:
            published.append(make())

    monkeypatch.setattr(gang_watch, "Accounts", Asked)
    watch = GangWatch(pod)
    gives = {"version": 1, "nodeRank": 0, "ranks": [waits | {"rank": 0}]}
    late, missing, all_here = True, Answers((gives,), (1,)), Answers((gives, gives | {"nodeRank": 1}), ())

    def looked(at: float, answers: Answers) -> int:
        silent = waits["silentSeconds"] if late else 0.0
        rank = Rank(0, waits["phase"], waits["step"], at - silent, waits.get("stepSecondsP99"))
        monkeypatch.setattr(watch, "_own_ranks", lambda now: [rank])
        watch._accounts.next = answers
        watch.look(at, may_ask=True)
        return len(published)

    assert looked(1000.0, missing) == 0
    assert looked(1050.0, missing) == 0
    late = False
    assert looked(1055.0, missing) == 0
    late = True
    assert looked(1061.0, missing) == 0, "it was not missing while all went well"
    assert looked(1122.0, missing) == 1
    assert published[0]["nodeRank"] == 1
    assert "the launcher of node rank 1 gives no account" in published[0]["message"]
    assert looked(1123.0, all_here) == 2
    assert published[1]["rank"] == 0


def test_the_message_names_the_file_of_all_nodes_only_where_it_was_saved(pod, monkeypatch) -> None:
    monkeypatch.setattr("ddp_trainer.launch.stacks.COPY_SECONDS", 100.0)  # a busy disk may take long
    watch, own = GangWatch(pod), f"stacks-attempt-{pod.attempt}-node-{pod.node_rank}.txt"
    watch._stacks = time.monotonic(), {0: 'Current thread:\n  File "/opt/app/train.py", line 3 in wait\n'}
    answers = Answers(({"version": 1, "nodeRank": 0, "ranks": [WAITS | {"rank": 0}]},), ())
    agreed = {"rank": 0, "nodeRank": 0, "message": "rank 0 stood in wait (train.py:3)", "stack": ""}
    all_saved = watch.save_stacks(watch._agreed(agreed | {"file": watch._save_all(answers, "title")}))
    assert all_saved.message.endswith(f"Stacks: {pod.log_dir / f'stacks-attempt-{pod.attempt}.txt'}")
    assert all_saved.message.count("rank 0 stood in") == 1
    eventually(lambda: watch._accounts._is_made, "the folder of the questions, which its thread makes")
    shutil.rmtree(pod.log_dir)
    pod.log_dir.write_text("no folder can be here")
    not_saved = watch.save_stacks(watch._agreed(agreed | {"file": watch._save_all(answers, "title")}))
    assert not_saved.message.endswith(f"Stacks: {pod.run_dir / own}")
    watch.close()


def test_a_stall_is_reported_without_its_stacks_where_no_thread_can_be_started(pod, monkeypatch) -> None:
    watch = GangWatch(pod)
    watch._stacks = time.monotonic(), {0: 'Current thread:\n  File "/opt/app/train.py", line 3 in wait\n'}
    stall = Stall(0, "rank 0 made no progress", here=True)

    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        message = watch.save_stacks(stall).message
    assert message.endswith("Stacks: could not be saved")
    watch.close()


def test_a_node_that_judges_alone_names_the_file_that_it_has_saved_and_where_its_ranks_stood(pod, monkeypatch) -> None:
    """The volume hangs: there is no file of all nodes, and no other launcher has said where the ranks stood."""
    monkeypatch.setattr("ddp_trainer.launch.stacks.COPY_SECONDS", 100.0)  # a busy disk may take long
    watch, stacks = GangWatch(pod), {0: 'Current thread:\n  File "/opt/app/train.py", line 3 in wait\n'}
    watch._stacks = time.monotonic(), stacks
    monkeypatch.setattr(watch, "_take_stacks", lambda: stacks)
    monkeypatch.setattr(watch, "_own_ranks", lambda now, again=False: [Rank(0, "train", 5, now - 10_000.0, 0.1)])
    monkeypatch.setattr(watch._accounts, "answers", lambda: Answers((), (0, 1)))
    pod.log_dir.parent.mkdir(parents=True, exist_ok=True)
    stall = watch.look(time.monotonic(), may_ask=True)
    assert stall is not None
    message = watch.save_stacks(stall).message
    assert message.endswith(f"Stacks: {pod.log_dir / f'stacks-attempt-{pod.attempt}-node-{pod.node_rank}.txt'}")
    assert "rank 0 stood in wait (train.py:3)" in message
    watch.close()


def test_a_rank_that_goes_on_as_it_is_asked_after_is_not_silent(pod, monkeypatch, tmp_path) -> None:
    """Its activity was last looked at seconds ago, and its stack is of now: it would be the one that waits for no
    other.
    """
    pod, began = replace(pod, nodes=1), time.monotonic() - 1000.0
    run_dir.register(pod.run_dir, 0, 0, os.getpid())
    monkeypatch.setattr(processes, "descendants", lambda pid: [])  # below this one are ranks of other tests
    Heartbeat(heartbeat_dir(pod.run_dir), rank=0, local_rank=0, observed=True, clock=lambda: began).flush()
    watch = GangWatch(pod)
    monkeypatch.setattr(watch, "_take_stacks", dict)
    watch.look(began, may_ask=False)
    watch.look(time.monotonic() - 1.0, may_ask=False)
    (silent,) = watch._ranks
    assert silent.progress_at == began
    (tmp_path / "line").write_text("it goes on")
    (asked,) = watch._account()["ranks"]
    assert asked["silentSeconds"] == 0.0


def test_of_many_nodes_that_give_no_account_few_are_named() -> None:
    """What else is in the message is cut off from 4 KiB on."""
    message = gang_watch._absent(range(1, 1024), ())["message"]
    assert " 14, 15, 16 and 1007 more gives no account" in message
    assert len(message) < 500


def test_a_pod_that_stood_still_does_not_count_that_time_as_silence_of_its_ranks(pod, monkeypatch) -> None:
    """As on a paused node. It may be asked before its ranks, and its launcher's own look, have gone on."""
    pod, began = replace(pod, nodes=1), time.monotonic() - 1000.0
    run_dir.register(pod.run_dir, 0, 0, os.getpid())
    monkeypatch.setattr(processes, "descendants", lambda pid: [])  # below this one are ranks of other tests
    Heartbeat(heartbeat_dir(pod.run_dir), rank=0, local_rank=0, clock=lambda: began).flush()
    monkeypatch.setattr(gang_watch, "STOOD_STILL_SECONDS", 400.0)  # longer than this test may take
    monkeypatch.setattr(gang_watch, "OVERDUE_SECONDS", 400.0)
    watch = GangWatch(pod)
    monkeypatch.setattr(watch, "_take_stacks", dict)

    def silent() -> float:
        (rank,) = watch._account()["ranks"]
        return rank["silentSeconds"]

    assert not watch.stood_still(time.monotonic())
    assert silent() >= 1000.0
    watch.stood_still(time.monotonic() - 990.0)  # ten seconds after it began
    found: list[bool] = []
    look = threading.Timer(0.2, lambda: found.append(watch.stood_still(time.monotonic())))
    look.start()
    assert silent() < 400.0
    look.join()
    assert found == [True]
    for _ in range(gang_watch.MOST_PAUSES):
        watch.stood_still(time.monotonic() - 401.0)
        assert watch.stood_still(time.monotonic())
    assert silent() < 400.0, "it stood still several times"
    watch._pauses = watch._pauses[-1:]
    assert 500.0 < silent() < 1000.0, "what was before counts"
    monkeypatch.setattr(gang_watch, "OVERDUE_SECONDS", 0.1)
    watch._pauses = ()
    watch.stood_still(time.monotonic() - 500.0)
    assert silent() >= 1000.0, "the launcher alone stands still"


@pytest.mark.parametrize(
    ("pauses", "silent"),
    [
        pytest.param([], 100.0, id="it did not stand still"),
        pytest.param([(-200.0, 30.0)], 100.0, id="before the last progress"),
        pytest.param([(-200.0, 30.0), (-50.0, 30.0), (-10.0, 20.0)], 50.0, id="twice after it"),
        pytest.param([(-10.0, 500.0)], 0.0, id="for longer than the rank is silent"),
    ],
)
def test_of_the_time_for_which_the_pod_stood_still_what_came_after_the_last_progress_does_not_count(
    pod, monkeypatch, pauses, silent
) -> None:
    watch, now = GangWatch(replace(pod, nodes=1)), 1000.0
    monkeypatch.setattr(gang_watch, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(watch, "_await_look", lambda: None)
    monkeypatch.setattr(watch, "_take_stacks", dict)
    monkeypatch.setattr(watch, "_own_ranks", lambda at, again: [Rank(0, "train", 7, now - 100.0)])
    watch._pauses = tuple((now + went_on_at, seconds) for went_on_at, seconds in pauses)
    (rank,) = watch._account()["ranks"]
    assert rank["silentSeconds"] == silent
