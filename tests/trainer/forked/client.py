"""A forked process as if this one were it: its output, its exit code, and the signals that this one gets.

client.py SOCKET -m MODULE|SCRIPT ARG…
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

RELAYED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main(address: str, *command: str) -> int:
    """Have `server.py` fork a process that runs the command; its exit code, negative if a signal ended it."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)

        def relay(number: int, _: object) -> None:
            with suppress(OSError):  # it has ended
                server.send(bytes([number]))

        for number in RELAYED:
            signal.signal(number, relay)
        socket.send_fds(server, [b"F"], [1, 2])
        request = {"command": command, "folder": str(Path.cwd()), "environment": dict(os.environ)}
        server.sendall(json.dumps(request).encode() + b"\n")
        with server.makefile() as lines:
            lines.readline()  # its pid
            return int(lines.readline())  # no further: the end may be an error, of a signal that came too late for it


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
