"""What a spare does while it waits: it reads torch's files into the page cache, for its first life to start as fast as
one that follows another. A child imports them and exits; process 1 itself stays small.
"""

from __future__ import annotations

import os
import subprocess
import sys

from ddp_trainer.environment import Target

_OURS = "ddp_trainer."


def start_warming(target: Target) -> int | None:
    """Start the child, behind everything else that wants a processor; its pid, None if this machine gives no process.

    `processes.reap` collects it.
    """
    of_the_ranks = ["ddp_trainer.build"] if target.name.startswith(_OURS) else []
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "ddp_trainer.warming", str(os.getpid()), "torch.distributed.run", *of_the_ranks],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return None
    child.returncode = 0  # collected with every other child
    return child.pid


def _main(parent: int, modules: list[str]) -> None:
    import importlib

    from ddp_trainer.processes import die_with

    die_with(parent)
    os.nice(19)
    for name in modules:
        importlib.import_module(name)
    os._exit(0)  # taking torch apart would only cost time


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
