"""`make test` on a busy machine: five times in a row, beside four processes that always compute.

python -m tests.support.busy [RUNS [PROCESSES]]    prints time, counts and exit code of each run
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parents[2]
COUNTS = re.compile(r"^(?:=+ )?(\d+ (?:failed|passed|skipped|error).*?)(?: =+)?$", re.MULTILINE)


def main(runs: int = 5, processes: int = 4) -> int:
    """The number of runs that failed."""
    logs = ROOT / "build" / "busy"
    logs.mkdir(parents=True, exist_ok=True)
    failed = 0
    for run in range(1, runs + 1):
        log = logs / f"run-{run}.log"
        began = time.monotonic()
        with ExitStack() as busy, log.open("wb") as file:
            for _ in range(processes):
                computes = subprocess.Popen([sys.executable, "-c", "while True: pass"])
                busy.callback(computes.wait)
                busy.callback(computes.kill)
            code = subprocess.run(["make", "test"], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT).returncode
        found = COUNTS.findall(log.read_text(errors="replace"))
        counts = found[-1] if found else "no tests ran"
        load = os.getloadavg()[0]
        print(f"run {run}: exit code {code}, {time.monotonic() - began:.0f} s, load {load:.1f}: {counts}", flush=True)
        failed += code != 0
    print(f"{runs - failed} of {runs} runs passed beside {processes} busy processes; their output: {logs}")
    return failed


if __name__ == "__main__":
    sys.exit(min(1, main(*map(int, sys.argv[1:]))))
