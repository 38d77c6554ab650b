"""How members come to the next view, over real sockets: their groups are not formed."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE_SECONDS, eventually

from ddp_trainer.live import deciding, questions, views
from ddp_trainer.live.deciding import Excluded, Finished
from ddp_trainer.live.membership import Membership
from ddp_trainer.live.questions import receive, send
from ddp_trainer.live.register import Register
from ddp_trainer.live.views import Member, View

SILENT_SECONDS = 0.3


class Relay:
    """Stands before a member, as a network that loses everything until it is `open`."""

    def __init__(self, member: Member) -> None:
        self._to = member.address
        self.open = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.open.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        lost = []
        with suppress(OSError):
            while True:
                near, _ = self._socket.accept()
                if not self.open.is_set():
                    lost.append(near)
                    continue
                far = socket.create_connection(self._to)
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=_copy, args=(one, other), daemon=True).start()


def _copy(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)
    with suppress(OSError):
        other.shutdown(socket.SHUT_WR)


Start = Callable[..., Membership]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "views"


@pytest.fixture
def start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """A member, whose next view is formed as soon as it knows it."""
    monkeypatch.setattr(questions, "SILENT_SECONDS", SILENT_SECONDS)
    monkeypatch.setattr(views, "SILENT_SECONDS", SILENT_SECONDS)
    monkeypatch.setattr(questions, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(Membership, "_form", lambda *_: None)
    started: list[Membership] = []

    def start(node_rank: int, local_rank: int = 0, **of_pod: Any) -> Membership:
        place: dict[str, Any] = {"node_rank": node_rank, "local_rank": local_rank, "host": "127.0.0.1"}
        started.append(Membership(Register(folder), **place, least=1, timeout_seconds=60.0, **of_pod))
        return started[-1]

    yield start
    for one in started:
        one.stop()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def in_view(folder: Path, ranks: list[Membership], *, instead: dict[str, Member] | None = None) -> View:
    """View 0 of these; `instead` has members as the others know them."""
    members = [one.own for one in ranks]
    view = Register(folder).propose(View(0, tuple(members), members[0].id, "127.0.0.1", 1))
    known = replace(view, members=tuple((instead or {}).get(one.id, one) for one in members))
    for rank in ranks:
        rank.view = known if instead and rank.own.id not in instead else view
    return view


def decided(members: list[Future[None]], ranks: list[Membership]) -> list[tuple[int, set[str]]]:
    for one in members:
        one.result(PATIENCE_SECONDS)
    found = [rank.view for rank in ranks]
    return [(view.number, {member.id for member in view.members}) for view in found if view is not None]


@pytest.mark.parametrize("size", [2, 3])
def test_members_that_did_not_hear_the_coordinator_come_to_it_once_they_do(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor, size: int
) -> None:
    monkeypatch.setattr(views, "MINORITY_SECONDS", 10 * PATIENCE_SECONDS)  # the others do not go on alone
    ranks = [start(rank) for rank in range(size)]
    first, others = ranks[0], ranks[1:]
    relay = Relay(first.own)
    in_view(folder, ranks, instead={first.own.id: replace(first.own, port=relay.port)})
    judged, coordinates = views.judged, threading.Event()

    def noted(view: View, own: str, *args: Any, **named: Any) -> views.Verdict:
        if own == others[0].own.id:  # only one that coordinates asks
            coordinates.set()
        verdict = judged(view, own, *args, **named)
        return verdict if own == first.own.id or size == 2 else views.Verdict.WAIT

    monkeypatch.setattr(deciding, "judged", noted)
    going_on = [pool.submit(rank.next_view) for rank in ranks]
    try:
        assert coordinates.wait(PATIENCE_SECONDS)
    finally:
        relay.open.set()  # else the pool would wait for ranks that wait for each other
    everyone = {rank.own.id for rank in ranks}
    assert decided(going_on, ranks) == [(1, everyone)] * size
    relay.close()


def test_a_new_member_that_ended_before_the_proposal_is_not_in_it(start: Start, folder: Path) -> None:
    left = start(0)
    in_view(folder, [left])
    newcomer = Member("newcomer", 1, 0, "127.0.0.1", free_port())
    question = {"to": left.own.id, "ask": "next", "view": 0, "member": asdict(newcomer), "isNew": True, "silent": []}
    with socket.create_connection(left.own.address) as connection:
        send(connection, question)
        eventually(lambda: left.has_newcomer, "it waits")
    eventually(lambda: not left.has_newcomer, "it is known to wait no longer")
    left.next_view()
    assert left.view is not None
    assert left.view.members == (left.own,)


def start_pod(start: Start, node_rank: int, pod: str = "") -> list[Membership]:
    """Both ranks of a pod."""
    return [start(node_rank, local_rank, pod=pod, procs=2) for local_rank in range(2)]


def test_a_rank_whose_pod_has_lost_one_ends_and_the_whole_pods_go_on(
    start: Start, folder: Path, pool: ThreadPoolExecutor
) -> None:
    ranks = [rank for node_rank in range(3) for rank in start_pod(start, node_rank)]
    in_view(folder, ranks)
    ranks[1].stop()  # of the pod of the coordinator, which would host the store
    broken = pool.submit(ranks[0].next_view)
    going_on = [pool.submit(rank.next_view) for rank in ranks[2:]]
    with pytest.raises(Excluded, match="another rank of this pod is lost"):
        broken.result(PATIENCE_SECONDS)
    ranks[0].stop()
    whole = {rank.own.id for rank in ranks[2:]}
    assert decided(going_on, ranks[2:]) == [(1, whole)] * 4


def test_a_rank_whose_pod_has_lost_one_ends_well_where_training_is_complete(start: Start, folder: Path) -> None:
    """The other rank of a pod that was cut off has found that first, and has ended."""
    ranks = start_pod(start, 0)
    in_view(folder, [*ranks, start(1)])
    Register(folder).finish()
    ranks[0].stop()
    with pytest.raises(Finished):
        ranks[1].next_view()


def test_a_new_pod_is_let_in_once_all_of_its_ranks_wait(start: Start, folder: Path, pool: ThreadPoolExecutor) -> None:
    ranks = start_pod(start, 0)
    in_view(folder, ranks)
    new = start_pod(start, 1, pod="new")
    joining = [pool.submit(new[0].begin, 4)]
    eventually(lambda: ranks[0]._listener.newcomers(0), "the first waits")
    is_let_in_alone = ranks[0].has_newcomer
    joining.append(pool.submit(new[1].begin, 4))
    eventually(lambda: ranks[0].has_newcomer, "both wait at one member")
    going_on = [pool.submit(rank.next_view) for rank in ranks]
    everyone = {rank.own.id for rank in (*ranks, *new)}
    assert decided([*going_on, *joining], [*ranks, *new]) == [(1, everyone)] * 4
    assert not is_let_in_alone


def test_a_rank_that_asks_a_later_member_turns_to_the_first_once_that_answers(
    start: Start, folder: Path, pool: ThreadPoolExecutor
) -> None:
    """Where the other rank of its pod waits: apart from each other, both would wait for good."""
    first, second = start_pod(start, 0)
    relay = Relay(first.own)
    in_view(folder, [first, second], instead={first.own.id: replace(first.own, port=relay.port)})
    view = second.view
    assert view is not None
    new = start(1, 0, pod="new", procs=2)
    asking = pool.submit(new._deciding.joined, view, is_new=True)
    eventually(lambda: second._listener.newcomers(0), "the first did not answer")
    assert not first._listener.newcomers(0)
    relay.open.set()
    eventually(lambda: first._listener.newcomers(0), "it asks the first")
    relay.close()
    for rank in (first, second):
        rank.stop()
    Register(folder).finish()
    with pytest.raises(Finished):
        asking.result(PATIENCE_SECONDS)


def test_a_member_that_wants_a_later_view_than_was_decided_waits_on(start: Start, folder: Path) -> None:
    """It knows the decision already, and has found that the new view has lost a member, too."""
    left, ahead = start(0), Member("ahead", 1, 0, "127.0.0.1", free_port())
    in_view(folder, [left])
    wait = {"to": left.own.id, "ask": "next", "member": asdict(ahead), "isNew": False, "silent": []}
    with socket.create_connection(left.own.address) as connection:
        send(connection, {**wait, "view": 1})
        eventually(lambda: left._listener.arrivals(1), "it has come")
        left.next_view()
        assert left._listener.arrivals(1).keys() == {"ahead"}


def test_members_that_are_silent_are_asked_at_the_same_time(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(views, "MINORITY_SECONDS", 0.0)
    left = start(0)
    listening = [socket.create_server(("127.0.0.1", 0), backlog=64) for _ in range(32)]
    silent = [Member(f"silent-{n}", n + 1, 0, "127.0.0.1", one.getsockname()[1]) for n, one in enumerate(listening)]
    left.view = Register(folder).propose(View(0, (left.own, *silent), left.own.id, "127.0.0.1", 1))
    began = time.monotonic()
    left.next_view()
    assert time.monotonic() - began < 16.0, "one after the other they take 32 s"
    for one in listening:
        one.close()


def test_what_the_watch_has_found_in_an_earlier_view_says_nothing_of_a_later_one(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = start(0)
    in_view(folder, [left])
    after = left._deciding.after
    found: list[set[str]] = []

    def noted(view: View, found_silent: frozenset[str]) -> View:
        found.append(set(found_silent))
        return after(view, found_silent)

    monkeypatch.setattr(left._deciding, "after", noted)
    left._next_is_lost(0, {"slow"})
    left.next_view()
    left._next_is_lost(0, {"slow"})  # by a thread that was late
    left.next_view()
    assert found == [{"slow"}, set()]


def test_only_the_rank_that_proposes_the_first_view_reads_what_all_have_written(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    """Else the files that a gang reads grow with the square of its ranks."""
    ranks = [start(rank) for rank in range(3)]
    entered, readers = Register.entered, set[int]()

    def noted(register: Register) -> dict[tuple[int, int], Member]:
        readers.add(id(register))
        return entered(register)

    monkeypatch.setattr(Register, "entered", noted)
    beginning = [pool.submit(rank.begin, 3) for rank in ranks[1:]]
    eventually(lambda: len(list(folder.glob("present-*.json"))) == 2, "the others wait for the first view")
    beginning.append(pool.submit(ranks[0].begin, 3))
    assert decided(beginning, ranks) == [(0, {rank.own.id for rank in ranks})] * 3
    assert readers == {id(ranks[0]._register)}


@pytest.mark.parametrize(("members", "seconds"), [(2, 0.1), (100, 0.1), (500, 0.5), (1024, 1.0), (65536, 1.0)])
def test_many_ranks_look_for_the_first_view_less_often_each(members: int, seconds: float) -> None:
    assert deciding.begin_look_seconds(members) == seconds


def test_the_next_view_is_encoded_once_for_all_that_wait(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the coordinator, which the others wait for, takes time that grows with the square of the ranks."""
    left, others = start(0), [Member(f"other-{rank}", rank, 0, "127.0.0.1", free_port()) for rank in range(1, 4)]
    to_json, encoded = View.to_json, list[int]()

    def noted(view: View) -> dict[str, Any]:
        encoded.append(view.number)
        return to_json(view)

    with ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(left.own.address)) for _ in others]
        for connection, member in zip(connections, others, strict=True):
            question = {"ask": "next", "view": 0, "member": asdict(member), "isNew": False, "silent": []}
            send(connection, {"to": left.own.id, **question})
        eventually(lambda: len(left._listener.arrivals(0)) == 3, "all wait")
        # not before: a member that stays long in a view that has lost one ends its process
        left.view = Register(folder).propose(View(0, (left.own, *others), left.own.id, "127.0.0.1", 1))
        monkeypatch.setattr(View, "to_json", noted)
        left.next_view()
        answers = [receive(connection) for connection in connections]
    assert [(answer["number"], len(answer["members"])) for answer in answers] == [(1, 4)] * 3
    assert encoded == [1, 1], "for the volume, and for those that wait"
