"""torchrun with a report: `python -m ddp_trainer.rank.agent` takes torchrun's own arguments, or `--prepared`.

torchrun exits 1 for everything, and writes its error file only where the rank wrote one, which a rank that was
killed could not. Its exception does know the exit code or signal of each rank; this process leaves them in
`$DDPJOB_RUN_DIR/torchrun/report.json` for the launcher.

Prepared means that the arguments come later: torch, which takes seconds to import, is imported meanwhile. The end of
standard input without a line ends this process.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ddp_trainer.contract.environment import first_live_rank, parse_agent
from ddp_trainer.contract.heartbeat import read_heartbeats
from ddp_trainer.contract.processes import die_with
from ddp_trainer.contract.run_dir import (
    JOIN_TIMEOUT_SECONDS,
    PREPARED,
    read_agent_orders,
    registrations,
    reserve_agent_report,
    write_agent_report,
)
from ddp_trainer.rank.garbage import import_torch_without_collections

TRY_SECONDS = 1.0
PAUSE_SECONDS = 0.1
_SHUTDOWN = "--shutdown-timeout"


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


def main(argv: Sequence[str]) -> int:
    own = parse_agent(os.environ)
    run_dir = own.run_dir
    die_with(own.launcher_pid)
    os.environ["DDPJOB_AGENT_PID"] = str(os.getpid())
    # torch takes seconds to import; by now this process already ends with the launcher
    import_torch_without_collections()
    try:
        from torch.distributed import DistNetworkError, DistStoreError
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
        from torch.distributed.elastic.rendezvous import RendezvousError

        from ddp_trainer.rank import rendezvous
    except Exception as error:  # an OSError where a library of CUDA is missing
        write_agent_report(run_dir, {"torch": f"{type(error).__name__}: {error}"})
        raise

    spare_helpers(SubprocessHandler)
    await_saves(SubprocessHandler, partial(_is_saving, run_dir), own.shutdown_seconds)
    if list(argv) == [PREPARED]:
        argv = _await_orders(run_dir)
    first_rank = first_live_rank(os.environ)
    reserve_agent_report(run_dir)
    known = torchrun.get_args_parser().format_help()
    arguments = torchrun.parse_args(understood(argv, known))  # type: ignore[no-untyped-call]
    is_first = int(arguments.node_rank) == 0
    rendezvous.use(arguments)
    deadline = time.monotonic() + JOIN_TIMEOUT_SECONDS
    while True:
        try:
            if not is_first:
                await_endpoint(arguments.rdzv_endpoint, deadline - time.monotonic())
            torchrun.run(arguments)  # type: ignore[no-untyped-call]
            return 0
        except ChildFailedError as error:
            failures = [
                {
                    "rank": first_rank + rank,
                    "localRank": failure.local_rank,
                    "pid": failure.pid,
                    "exitCode": failure.exitcode,
                    "time": failure.timestamp,
                }
                for rank, failure in error.failures.items()
            ]
            write_agent_report(run_dir, {"failures": failures})
        except (DistNetworkError, DistStoreError, RendezvousError, TimeoutError) as error:
            # The Service has no endpoint until node rank 0 runs, which may take an image pull longer; and for a
            # moment after a restart it may still lead to the store of the old attempt, which then goes away.
            if not registrations(run_dir) and time.monotonic() < deadline:
                print(f"rendezvous: {_cause(error)}; trying again", file=sys.stderr, flush=True)
                time.sleep(1.0)
                continue
            write_agent_report(run_dir, {"rendezvous": _cause(error)})
        return 1


def spare_helpers(handler: Any) -> None:
    """Have `handler`, the class of torchrun's that ends a rank, send SIGTERM to the rank alone.

    Once a rank has failed, torchrun sends it to the whole process groups of the others, data loader workers included.
    torch takes such a worker for one that has died, and raises that in the rank, in the middle of its last save. What
    the ranks have started is ended by the launcher.
    """
    end_group = handler.close

    def end(self: Any, death_sig: signal.Signals | None = None) -> None:
        if death_sig == signal.SIGKILL:
            end_group(self, death_sig)
        else:
            self.proc.send_signal(death_sig or signal.SIGTERM)

    handler.close = end


def await_saves(handler: Any, is_saving: Callable[[int], bool], seconds: float) -> None:
    """Have `handler` wait until a rank has saved before it kills it, for `seconds` at most, which begin with the first.

    torchrun kills what is left of the ranks 30 s after one has failed, whatever its `--shutdown-timeout`, as of torch
    2.13. The launcher ends a rank that saves too long before that time is up, and knows that nothing else has. Only a
    rank that the kernel holds on to is still there then; torchrun kills it up to three times.
    """
    end_now = handler.close
    deadlines: list[float] = []

    def end(self: Any, death_sig: signal.Signals | None = None) -> None:
        if death_sig == signal.SIGKILL:
            deadlines.append(time.monotonic() + seconds)
            while self.proc.poll() is None and is_saving(self.proc.pid) and time.monotonic() < deadlines[0]:
                time.sleep(PAUSE_SECONDS)
            if self.proc.poll() is not None:
                return
        end_now(self, death_sig)

    handler.close = end


def _is_saving(run_dir: Path, pid: int) -> bool:
    return any(beat["pid"] == pid and beat["phase"] == "save" for beat in read_heartbeats(run_dir))


def understood(arguments: Sequence[str], torchrun_help: str) -> list[str]:
    """The arguments that this torchrun has: `--shutdown-timeout` is newer than torch 2.11. It counts where torchrun
    itself fails beside ranks that are at work.
    """
    if _SHUTDOWN in torchrun_help:
        return list(arguments)
    ours = arguments.index("--module")  # what follows belongs to the script
    return [part for part in arguments[:ours] if not part.startswith(_SHUTDOWN)] + list(arguments[ours:])


def _await_orders(run_dir: Path) -> Sequence[str]:
    """Torchrun's arguments, once the launcher has them; the environment then names the place that they are for."""
    if not sys.stdin.readline():
        os._exit(0)  # no place, and no launcher any more
    with open(os.devnull) as nothing:  # noqa: PTH123 - a descriptor, for the ranks
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    orders = read_agent_orders(run_dir)
    os.environ.update(orders["environment"])
    arguments: Sequence[str] = orders["arguments"]
    return arguments


def _cause(error: BaseException) -> str:
    inner = error.__cause__ or error
    return f"{type(error).__name__}: {inner}".strip().splitlines()[0]


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # The report is written; taking torch apart would only delay the restart.
    os._exit(code)
