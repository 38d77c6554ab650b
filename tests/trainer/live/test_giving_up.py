"""Where the ranks cannot go on by themselves: one process says why and ends, the others wait for the next attempt."""

from __future__ import annotations

import errno
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE_SECONDS

from ddp_trainer.contract.exit_codes import LiveRecoveryFailed
from ddp_trainer.contract.outcomes import classify
from ddp_trainer.live import deciding, questions, views
from ddp_trainer.live.deciding import Finished, Unreached
from ddp_trainer.live.membership import Membership
from ddp_trainer.live.register import Register
from ddp_trainer.live.views import Member, View

Start = Callable[..., Membership]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "views"


@pytest.fixture
def start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """A process of the gang; the waits are short."""
    monkeypatch.setattr(deciding, "ALONE_SECONDS", 0.1)
    monkeypatch.setattr(deciding, "UNREACHED_SECONDS", 0.5)
    monkeypatch.setattr(deciding, "VOLUME_SECONDS", 0.05)
    monkeypatch.setattr(views, "REPLACEMENT_SECONDS", 0.1)
    monkeypatch.setattr(views, "MINORITY_SECONDS", 0.1)
    started: list[Membership] = []

    def start(node_rank: int, *, least: int = 1) -> Membership:
        started.append(
            Membership(
                Register(folder),
                node_rank=node_rank,
                local_rank=0,
                host="127.0.0.1",
                least=least,
                timeout_seconds=60.0,
            )
        )
        return started[-1]

    yield start
    for one in started:
        one.stop()


def ended(node_rank: int) -> Member:
    """A process that has ended: its port is closed."""
    return Member(f"ended-{node_rank}", node_rank, 0, "127.0.0.1", free_port())


def propose(folder: Path, *members: Member) -> View:
    return Register(folder).propose(View(0, members, members[0].id, "127.0.0.1", 1))


def test_new_processes_give_up_where_no_process_with_the_state_is_left(start: Start, folder: Path) -> None:
    propose(folder, ended(0), ended(1))
    first, second = start(0), start(1)
    Register(folder).enter(second.own)
    with pytest.raises(LiveRecoveryFailed, match="no rank that has the state answers") as failed:
        first.begin(2)
    assert classify(failed.value) == (1, "LiveRecoveryFailed")
    with pytest.raises(RuntimeError, match="no rank that has the state answers") as peer_lost:
        second.begin(2)
    assert classify(peer_lost.value) == (1, "PeerLost"), "its pod would not wait for the next attempt"


def test_a_new_process_waits_for_the_pods_that_take_the_places_of_the_others(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that had the state are lost, and one of the new pods still starts. If this one ended, that would count."""
    monkeypatch.setattr(deciding, "UNREACHED_SECONDS", PATIENCE_SECONDS)
    propose(folder, ended(0), ended(1))
    first, looks, are_gone = start(0), [], Register.are_gone

    def looked(register: Register, members: tuple[Member, ...]) -> bool:
        looks.append(are_gone(register, members))
        if len(looks) == 2:
            register.enter(Member("late", 1, 0, "127.0.0.1", free_port()))
        return looks[-1]

    monkeypatch.setattr(Register, "are_gone", looked)
    with pytest.raises(LiveRecoveryFailed, match="no rank that has the state answers"):
        first.begin(2)
    assert looks == [False, False, True]


def test_a_new_process_gives_up_where_all_that_had_the_state_have_ended_in_place(start: Start, folder: Path) -> None:
    """They lost a peer before they could go on, as while the snapshot was loaded. Their pods wait for the next attempt,
    so that no other process gets their place. Of two ranks in a pod, torchrun has ended one before it could say so.
    """
    first, second, third = start(0), start(1), start(2)
    mate = replace(ended(1), id="mate", local_rank=1)
    for member in (first.own, second.own, mate):
        Register(folder).enter(member)
    propose(folder, first.own, second.own, mate)
    first.stop()
    second.stop()
    with pytest.raises(LiveRecoveryFailed, match="no rank that has the state answers"):
        third.begin(4)


@pytest.mark.parametrize("error", [ConnectionRefusedError, TimeoutError])
def test_a_new_process_that_reaches_none_of_those_that_train_ends_alone(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    """Its pod's network does not work yet: a policy or a proxy drops its connections, or refuses them."""
    monkeypatch.setattr(views, "SILENT_SECONDS", 0.1)
    first, second = start(0), start(1)
    for member in (first.own, second.own):
        Register(folder).enter(member)
    first.view = second.view = propose(folder, first.own, second.own)
    cut_off, connect = start(2), socket.create_connection

    def refused(address: tuple[str, int], *arguments: object, **options: object) -> socket.socket:
        if threading.current_thread().name == "live watch":
            return connect(address, timeout=PATIENCE_SECONDS)
        raise error(address)

    with monkeypatch.context() as patch:
        patch.setattr(socket, "create_connection", refused)
        with pytest.raises(Unreached, match="this pod reaches none of the 2 ranks of view 0") as failed:
            cut_off.begin(3)
    assert classify(failed.value) == (1, "WorkerException"), "the operator would not replace this pod alone"
    assert Register(folder).given_up is None
    assert questions.ask(first.own, {"ask": "alive"}) is questions.Heard.ANSWER


def test_a_new_process_that_cannot_use_its_volume_ends_alone(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mount of one pod may be stale, or read-only."""
    propose(folder, start(0).own)
    new = start(1)

    def stale(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Register, "enter", stale)
    with pytest.raises(OSError, match="Stale file handle") as failed:
        new.begin(2)
    assert classify(failed.value) == (1, "WorkerException"), "the operator would not replace this pod alone"
    assert Register(folder).given_up is None


def test_a_new_process_that_was_answered_looks_again_as_long_as_at_first(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks may be between two views more than once while it looks."""
    view, new = propose(folder, ended(0)), start(1)
    found = iter([None, view, None, replace(view, number=1, members=(new.own,))])

    def asked(*_: object) -> View | None:
        time.sleep(2 * deciding.ALONE_SECONDS)
        return next(found)

    monkeypatch.setattr(new._deciding, "_asked", asked)
    assert new._deciding.joined(view, is_new=True).number == 1


def test_a_new_process_does_not_give_up_where_training_is_complete(start: Start, folder: Path) -> None:
    propose(folder, ended(0), ended(1))
    Register(folder).finish()
    with pytest.raises(Finished):
        start(0).begin(2)


def test_fewer_than_must_take_part_give_up_where_no_replacement_comes(start: Start, folder: Path) -> None:
    left = start(0, least=2)
    left.view = propose(folder, left.own, ended(1))
    with pytest.raises(LiveRecoveryFailed, match="1 of the 2 ranks that must take part"):
        left.next_view()


def test_fewer_than_must_take_part_give_up_as_soon_as_they_are_asked_to_stop(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "REPLACEMENT_SECONDS", 1000.0)
    left, other = start(0, least=3), start(1, least=3)
    left.view = other.view = propose(folder, left.own, other.own, ended(2))
    asked = iter([False, True])
    left.is_asked_to_stop = lambda: next(asked)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(other.next_view)
        with pytest.raises(LiveRecoveryFailed, match="asked to stop while 2 of the 3 ranks") as stopped:
            left.next_view()
        with pytest.raises(RuntimeError, match="asked to stop while") as peer_lost:
            waiting.result(PATIENCE_SECONDS)
    assert classify(stopped.value) == (143, "Preempted")
    assert classify(peer_lost.value) == (1, "PeerLost"), "its pod would not wait for the next attempt"


def test_fewer_than_must_take_part_end_where_training_is_complete(start: Start, folder: Path) -> None:
    """The others have come to the end while this one was cut off."""
    left = start(0, least=2)
    left.view = propose(folder, left.own, ended(1))
    Register(folder).finish()
    with pytest.raises(Finished):
        left.next_view()


def test_without_the_volume_nobody_goes_on(start: Start, folder: Path) -> None:
    left = start(0)
    left.view = propose(folder, left.own, ended(1))
    shutil.rmtree(folder)
    with pytest.raises(LiveRecoveryFailed, match="the volume"):
        left.next_view()


def test_the_reason_is_on_record_once(folder: Path) -> None:
    register = Register(folder)
    said = [register.give_up(f"reason {number}") for number in range(3)]
    assert (said, register.given_up) == ([True, False, False], "reason 0")


def test_a_process_whose_link_was_made_although_it_was_refused_is_the_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of NFS that has lost the reply asks again, and finds its own link."""
    register, link = Register(folder), Path.hardlink_to

    def refused(path: Path, target: Path) -> None:
        with suppress(FileExistsError):
            link(path, target)
        raise FileExistsError(path)

    monkeypatch.setattr(Path, "hardlink_to", refused)
    said = [register.give_up(f"reason {number}") for number in range(2)]
    assert (said, register.given_up) == ([True, False], "reason 0")


def test_the_smaller_half_goes_on_once_it_has_waited(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three, two stand still: their listeners accept, and do not answer."""
    monkeypatch.setattr(views, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(questions, "SILENT_SECONDS", 0.1)
    silent = [_silent_member(rank) for rank in (1, 2)]
    left = start(0)
    left.view = propose(folder, left.own, *(member for member, _ in silent))
    formed: list[View] = []
    monkeypatch.setattr(left, "_form", formed.append)
    left.next_view()
    for _, close in silent:
        close()
    assert [view.members for view in formed] == [(left.own,)]


def _silent_member(node_rank: int) -> tuple[Member, Callable[[], None]]:
    listening = socket.create_server(("127.0.0.1", 0), backlog=64)
    return Member(f"silent-{node_rank}", node_rank, 0, "127.0.0.1", listening.getsockname()[1]), listening.close
