"""One rank of a script or a module, as torchrun starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.trainer.forked.start import TORCH, forked

from ddp_trainer.contract.unfinished import END_SECONDS

ROOT = Path(__file__).parents[3]


def run_rank(
    script: str,
    folder: Path,
    kind: str = "script",
    name: str = "script.py",
    *,
    has_torch: bool = False,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """One rank of one, as torchrun starts it; its output goes to a pipe, and is lost unless it is flushed. One that
    `has_torch` is forked from a process that has imported it, and leaves no more to the end of the interpreter.
    """
    path = folder / "script.py"
    path.write_text(script)
    own = {
        **{name: value for name, value in os.environ.items() if not name.startswith("DDPJOB_")},
        "PYTHONPATH": f"{ROOT / 'trainer_image'}:{folder}",
        "DDPJOB_RUN_DIR": str(folder / "run"),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        **variables,
    }
    worker = ("-m", "ddp_trainer.rank.worker", kind, str(path) if kind == "script" else name)
    command = forked(*worker, imported=TORCH) if has_torch else [sys.executable, *worker]
    # less than END_SECONDS: a rank that is ended by that limit has not ended by itself
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=0.8 * END_SECONDS)
