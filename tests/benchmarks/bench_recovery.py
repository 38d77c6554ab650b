"""How long training stands still: from the command to the first step, from a SIGKILL of a rank to the next, and from a
rank that hangs to a new attempt.

    python -m tests.benchmarks.bench_recovery [--rounds 5]

Each round is one `ddpjob run` of the sample job, two nodes with a rank each, with caches warm: a cold start, then a
rank killed with SIGKILL after a snapshot, then one stopped with SIGSTOP. Steps are timed by the trainer, in its own
records. The floor of the recovery is the cold start of the same round; a stall has bounds instead: it must be noticed
within one look of the watchdog after what the job allows, and the new attempt must be started within two seconds.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.job import RunningJob, running
from tests.benchmarks.table import Bound, Cost, Finding, Ratio, processor_seconds, report

MAX_RECOVERY = 1.0
"""The most that a recovery may take, as a multiple of a cold start."""
MAX_NEW_ATTEMPT_SECONDS = 2.0
"""The most from noticing a stall to the start of the next attempt."""
LOOK_SECONDS = 0.5
"""How often the launcher looks at its ranks: a stall is noticed at the first look after it was allowed."""
LOOKING_SECONDS = 0.1
"""What a look itself may take, and what it takes this program to see it."""
STALL_SECONDS = 3

SPEC = {
    "nodes": 2,
    "args": ["--task=digits", "--epochs=100000"],
    "snapshots": {"every": "20steps"},
    "stall": {"minSeconds": STALL_SECONDS},
}


@dataclass(frozen=True, slots=True)
class Start:
    """An attempt's way to its first step: seconds from what caused it to its first pod, to the beginning of training
    there, and to the end of the first step; and the processor's seconds for all of it.
    """

    pod: float
    training: float
    step: float
    processor: float

    @property
    def cost(self) -> Cost:
        return Cost(self.step, self.processor)


@dataclass(frozen=True, slots=True)
class Round:
    """One job: two starts, and after a stall the seconds from the end of the allowance to noticing (`late`) and from
    there to the next attempt's first pod (`restart`).
    """

    cold: Start
    recovery: Start
    late: float
    restart: float


def measure_round(directory: Path) -> Round:
    """One job, from its cold start to the attempt after a stall."""
    with running(directory, SPEC) as job:
        cold = _start(job, 0, job.asked, 0.0)
        # The one before the last is known to every rank. A failure right behind a save of which nobody has heard yet is
        # one without progress, and waits for its back-off.
        job.wait(lambda: job.events("snapshot_saved")[1:], "two snapshots")
        victim = job.rank(1)
        before, killed = processor_seconds(job.process.pid), time.time()
        os.kill(victim, signal.SIGKILL)
        recovery = _start(job, 1, killed, before)
        job.wait_for_event("snapshot_saved", attempt=1)
        late, restart = _after_stop(job)
        return Round(cold, recovery, late, restart)


def _start(job: RunningJob, attempt: int, caused: float, processor_before: float) -> Start:
    job.wait(lambda: job.pod_log(attempt).exists() or None, f"a pod of attempt {attempt}")
    pod = time.time()
    began = job.wait_for_event("resumed" if attempt else "started", attempt)["time"]
    stepped = job.wait_for_event("first_step", attempt)["time"]
    processor = processor_seconds(job.process.pid) - processor_before
    return Start(pod - caused, began - caused, stepped - caused, processor)


def _after_stop(job: RunningJob) -> tuple[float, float]:
    """From SIGSTOP of rank 1 of attempt 1: seconds from the end of its allowance to noticing, and from there to the
    first pod of attempt 2.
    """
    logs = [job.pod_log(1, node_rank) for node_rank in range(2)]
    victim = job.rank(1, attempt=1)
    stopped = time.time()
    os.kill(victim, signal.SIGSTOP)
    reported = job.wait(lambda: next((found for log in logs if (found := _stalled(log))), None), "the stall is noticed")
    noticed = time.time()
    job.wait(lambda: job.pod_log(2).exists() or None, "attempt 2")
    return noticed - stopped - reported, time.time() - noticed


def _stalled(log: Path) -> float | None:
    """The seconds of silence that were allowed, once a launcher has said that a rank took more."""
    try:
        found = re.search(r"stalled: .* \(allowed: (\d+) s\)", log.read_text(errors="replace"))
    except FileNotFoundError:
        return None
    return max(float(STALL_SECONDS), float(found[1])) if found else None


def findings(count: int) -> list[Finding]:
    """Measure so many rounds."""
    rounds = []
    for number in range(count):
        with tempfile.TemporaryDirectory(prefix="bench-recovery-") as folder:
            seen = measure_round(Path(folder))
        print(f"round {number + 1} of {count}: {seen}", file=sys.stderr, flush=True)
        rounds.append(seen)
    return [
        Ratio(
            "SIGKILL of a rank to the next step",
            "cold start",
            [seen.recovery.cost for seen in rounds],
            [seen.cold.cost for seen in rounds],
            MAX_RECOVERY,
        ),
        Bound(
            "a stall is noticed",
            f"after the {STALL_SECONDS} s that the job allows: one look",
            [seen.late for seen in rounds],
            LOOK_SECONDS + LOOKING_SECONDS,
        ),
        Bound("and a new attempt begins", "after that", [seen.restart for seen in rounds], MAX_NEW_ATTEMPT_SECONDS),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bench_recovery", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    return report(findings(parser.parse_args().rounds))


if __name__ == "__main__":
    sys.exit(main())
