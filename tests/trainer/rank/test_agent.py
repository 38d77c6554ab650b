"""The wait for node rank 0's store: it ends when something listens, and what hangs meanwhile is given up."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from tests.support.ports import free_port

from ddp_trainer.rank.agent import await_endpoint, understood


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
        await_endpoint(f"[::1]:{listener.getsockname()[1]}", 5)


OURS = ["--nnodes=2", "--shutdown-timeout=45", "--module", "ddp_trainer.rank.worker", "script", "train.py"]


def test_an_older_torchrun_gets_no_argument_that_it_does_not_have() -> None:
    given = [*OURS, "--shutdown-timeout=7"]
    assert understood(given, "--nnodes NNODES --shutdown-timeout SECONDS") == given
    assert understood(given, "--nnodes NNODES") == ["--nnodes=2", *OURS[2:], "--shutdown-timeout=7"]
