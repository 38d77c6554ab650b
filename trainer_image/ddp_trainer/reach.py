"""Waiting until an address answers, before torch connects to it.

torch's store opens one connection and waits for that one. If its first packet gets ahead of the Service's rules on this
node, the kernel has settled that this connection is translated nowhere (NAT is decided once a connection), and every
retransmission vanishes alike: two minutes of silence until TCP gives up, at a start or restart that takes seconds.
"""

from __future__ import annotations

import socket
import time

TRY_SECONDS = 1.0
PAUSE_SECONDS = 0.1


def await_endpoint(endpoint: str, seconds: float) -> None:
    """Return as soon as `endpoint` (`host:port`) accepts a connection; each try is a connection of its own.

    Raises TimeoutError, with what went wrong last, after `seconds`.
    """
    host, _, port = endpoint.rpartition(":")
    address = (host.strip("[]"), int(port))
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(address, timeout=TRY_SECONDS).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing answered at {endpoint} within {seconds:g} s: {error}") from error
        time.sleep(PAUSE_SECONDS)
