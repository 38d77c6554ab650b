"""The wait for node rank 0's store: it ends when something listens, and what hangs meanwhile is given up. And what is
done differently from torchrun.
"""

from __future__ import annotations

import itertools
import signal
import socket
import threading
import time

import pytest
from tests.support.ports import free_port

from ddp_trainer.rank.agent import await_endpoint, await_saves, spare_helpers, understood


def test_an_endpoint_that_begins_to_listen_is_found() -> None:
    port = free_port()
    found = threading.Event()

    def wait() -> None:
        await_endpoint(f"127.0.0.1:{port}", 60)
        found.set()

    threading.Thread(target=wait, daemon=True).start()
    assert not found.wait(0.5)
    with socket.create_server(("127.0.0.1", port)):
        assert found.wait(60)


def test_a_connection_that_times_out_is_tried_again() -> None:
    """Linux drops what comes in on a listener whose queue is full: as silent as a Service without rules."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        with socket.create_connection(listener.getsockname()):
            accepted: list[socket.socket] = []
            later = threading.Timer(1.5, lambda: accepted.append(listener.accept()[0]))
            later.start()
            await_endpoint(endpoint, 60)
            later.join()
            accepted[0].close()


def test_an_endpoint_that_stays_silent_is_named_with_what_went_wrong() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=rf"{endpoint} within 0\.5 s: .*refused"):
        await_endpoint(endpoint, 0.5)
    assert time.monotonic() - began < 10


def test_an_address_of_ip_version_6_is_understood() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        await_endpoint(f"[::1]:{listener.getsockname()[1]}", 60)


OURS = ["--nnodes=2", "--shutdown-timeout=45", "--module", "ddp_trainer.rank.worker", "script", "train.py"]


def test_an_older_torchrun_gets_no_argument_that_it_does_not_have() -> None:
    given = [*OURS, "--shutdown-timeout=7"]
    assert understood(given, "--nnodes NNODES --shutdown-timeout SECONDS") == given
    assert understood(given, "--nnodes NNODES") == ["--nnodes=2", *OURS[2:], "--shutdown-timeout=7"]


class Process:
    """Of a rank, which has ended after so many looks at it."""

    pid = 71

    def __init__(self, looks: int = 0) -> None:
        self.got: list[int] = []
        self._looks = looks

    def send_signal(self, number: int) -> None:
        self.got.append(number)

    def poll(self) -> int | None:
        self._looks -= 1
        return None if self._looks >= 0 else 0


def test_torchruns_sigterm_is_for_a_rank_and_its_sigkill_for_all_that_the_rank_has_started() -> None:
    class Handler:
        def __init__(self) -> None:
            self.proc = Process()
            self.group: list[signal.Signals | None] = []

        def close(self, death_sig: signal.Signals | None = None) -> None:
            self.group.append(death_sig)

    spare_helpers(Handler)
    rank = Handler()
    rank.close(death_sig=signal.SIGTERM)
    rank.close(death_sig=signal.SIGKILL)
    rank.close()
    assert (rank.proc.got, rank.group) == ([signal.SIGTERM, signal.SIGTERM], [signal.SIGKILL])


@pytest.mark.parametrize(
    ("looks", "saves", "seconds", "killed"),
    [
        pytest.param(3, 99, 60.0, False, id="it has saved and left"),
        pytest.param(99, 2, 60.0, True, id="it has saved and stays"),
        pytest.param(99, 99, 0.0, True, id="its time is up"),
    ],
)
def test_torchrun_kills_no_rank_that_still_may_save(looks: int, saves: int, seconds: float, killed: bool) -> None:
    class Handler:
        def __init__(self) -> None:
            self.proc = Process(looks)
            self.got: list[signal.Signals | None] = []

        def close(self, death_sig: signal.Signals | None = None) -> None:
            self.got.append(death_sig)

    asked = itertools.count()
    await_saves(Handler, lambda pid: pid == Process.pid and next(asked) < saves, seconds)
    rank = Handler()
    rank.close(death_sig=signal.SIGTERM)
    rank.close(death_sig=signal.SIGKILL)
    assert rank.got == [signal.SIGTERM, *([signal.SIGKILL] if killed else [])]


def test_ranks_that_torchrun_kills_one_after_another_have_the_time_to_save_together() -> None:
    class Handler:
        def __init__(self) -> None:
            self.proc = Process(999)
            self.got: list[signal.Signals | None] = []

        def close(self, death_sig: signal.Signals | None = None) -> None:
            self.got.append(death_sig)

    asked: list[int] = []

    def saves(pid: int) -> bool:
        asked.append(pid)
        return True

    await_saves(Handler, saves, 0.2)
    first, second = Handler(), Handler()
    first.close(death_sig=signal.SIGKILL)
    so_far = len(asked)
    second.close(death_sig=signal.SIGKILL)
    second.close(death_sig=signal.SIGKILL)
    assert (len(asked) - so_far, first.got, second.got) == (2, [signal.SIGKILL], [signal.SIGKILL, signal.SIGKILL])
