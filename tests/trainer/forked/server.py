"""Forks processes from one in which torch has been imported.

    server.py SOCKET MODULE…

Importing torch and its compiler, which every optimizer does, costs a rank three seconds of processor time, and
torchrun's agent one; what a test has them do afterwards costs a tenth of that. A forked process runs the same script
or module from its first line: nothing of this repository is imported before. `start.py` forks torchrun and its ranks
so, and a launcher, which then forks its agent (`children`): the agent, its store, the variables, and what becomes of
ranks after a failure are torch's own. Operators (tests/api_server/forked.py) have imported their own modules, too.

What the processes of one server share is the seed of Python's hashes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import json
import os
import runpy
import select
import signal
import socket
import sys
import weakref
from pathlib import Path
from typing import Any

import children  # beside this script

Request = dict[str, Any]


def serve(listener: socket.socket) -> Request:
    """Fork for each client, until standard input ends. Returns in a forked process only, with what it is to run."""
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if sys.stdin in ready:
            os._exit(0)
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return start(client)
        client.close()


def start(client: socket.socket) -> Request:
    """Fork what the client asks for, and return there; this process says its pid, relays until it has ended, says its
    exit code, and ends.
    """
    _, descriptors, _, _ = socket.recv_fds(client, 1, maxfds=2)
    with client.makefile() as lines:
        request: Request = json.loads(lines.readline())
    pid = os.fork()
    if pid == 0:
        client.close()
        become(request, descriptors)
        return request
    for descriptor in descriptors:  # else a reader would not see the end of what the process writes
        os.close(descriptor)
    with contextlib.suppress(OSError):
        client.sendall(b"%d\n" % pid)
    code = relay(client, pid)
    with contextlib.suppress(OSError):
        client.sendall(b"%d\n" % code)
    os._exit(0)


def become(request: Request, descriptors: list[int]) -> None:
    """Give this process the session, output, folder and environment that it would have had."""
    os.setsid()
    for descriptor, target in zip([os.open(os.devnull, os.O_RDONLY), *descriptors], (0, 1, 2), strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])


def relay(client: socket.socket, pid: int) -> int:
    """Pass on the signals that the client gets, and SIGKILL if it was killed. The exit code of the process."""
    ended = os.pidfd_open(pid)
    while ended not in (ready := select.select([ended, client], [], [])[0]):
        if client in ready:
            numbers = client.recv(16)
            for number in numbers or [signal.SIGKILL]:
                os.kill(pid, number)
            if not numbers:
                break
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def remember_modules() -> None:
    """For `inspect.stack`, which the rendezvous of torchrun calls for each event: it looks through all modules for that
    of a file which it has not found before, such as runpy's, a frozen one.
    """
    inspect.stack()
    inspect.modulesbyfile[runpy.run_path.__code__.co_filename] = runpy.__name__


def leave_at_exit() -> None:
    """A process that ends does not finalize what was imported before it was forked. torch would take all its operators
    apart, which copies more of the memory that is shared with this process than all that most of them do.
    """
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False


if __name__ == "__main__":
    gc.disable()
    for name in sys.argv[2:]:
        importlib.import_module(name)
    remember_modules()
    leave_at_exit()
    # A process that ends does not look through all of torch for garbage, nor a rank for files: that would copy it all.
    gc.freeze()
    gc.unfreeze = lambda: None  # type: ignore[assignment]
    gc.enable()
    children.fork_children()
    address = socket.socket(socket.AF_UNIX)
    unseen = Path(f"{sys.argv[1]}.new")
    address.bind(str(unseen))
    address.listen(64)
    unseen.rename(sys.argv[1])  # a client that sees it may connect
    asked_for = serve(address)
    children.end_after(lambda: children.run(asked_for["command"]))
