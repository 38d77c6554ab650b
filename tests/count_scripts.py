"""Counts how often scripts on transformers, Lightning and Accelerate end as they should, as jobs of two nodes.

    python -m tests.count_scripts --runs 30              # before a release: two hours on two cores
    python -m tests.count_scripts --runs 3 --busy 4      # beside four processes that always compute
    python -m tests.count_scripts --only struck lightning

Untouched: tests/fixtures/untouched, which know nothing of DDPJob. A run counts if it has Succeeded without a restart,
within SECONDS of the last line of the script on any rank, and if its status had the step, the loss, the samples per
second, the ETA where the library knows the total, and a goodput within SHARE of a stopwatch: the
time from the script's first forward pass to its last step, of the time that the command took.

Struck: tests/trainer/integrations, with the one-line integrations; a rank gets SIGKILL at a random moment. A run counts
if it has Succeeded and all its losses are those of a run without the signal, to the last bit.

Held up: four nodes, of which a random one sleeps, skips a collective or has fewer batches than the others. A run counts
if its failure names that rank, and its message has that rank's own stack.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tests.local.test_stalls import run as hanging
from tests.support import local_run
from tests.support.local_run import new_job

from ddp_trainer.contract import processes
from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.local.display import PlainDisplay
from ddpjob_operator.local.observed import RunView
from ddpjob_operator.local.volume import open_shared

ROOT = Path(__file__).parents[1]
UNTOUCHED = ROOT / "tests/fixtures/untouched"
INTEGRATED = ROOT / "tests/trainer/integrations"
KINDS = ("untouched", "struck", "held-up")
LIBRARIES = ("transformers", "lightning", "accelerate")
FAULTS = {"sleeps": "read_a_broken_file", "skips": "save_together", "has fewer batches": "<module>"}
"""Where the script of tests/local/test_stalls.py then stands."""
KNOW_THEIR_TOTAL = ("transformers", "lightning")
SECONDS, SHARE = 10.0, 0.05
RANK_MODULE = "ddp_trainer.rank.worker"
EVERY = {"transformers": "4steps", "lightning": "1epochs", "accelerate": "4steps"}
"""How often a struck script saves. Lightning begins the data of an epoch anew when it resumes in its middle."""
PACE = 0.8
"""Seconds of a step of a struck script, so that a random moment is one of its training as a rule."""


@dataclass
class Seen(PlainDisplay):
    """What the status had at some time of a run."""

    fields: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__(io.StringIO())

    def show(self, view: RunView) -> None:
        progress = view.status.progress
        if progress is not None and view.status.phase is Phase.RUNNING:
            self.fields |= {name for name, value in progress if value is not None}


@dataclass(frozen=True)
class Run:
    """How one run ended; `problems` is empty for one that counts."""

    problems: tuple[str, ...]
    after_last_line: float | None = None
    deviation: float | None = None
    """Of the goodput from the stopwatch, as a share."""


async def _run(folder: Path, script: Path, *, strike: Strike | None = None, **spec: Any) -> tuple[DDPJobStatus, Seen]:
    shared = open_shared(folder / "shared")
    shutil.copy(script, shared / "train.py")
    whole = {"nodes": 2, "entrypoint": {"script": "/mnt/shared/train.py"}, **spec}
    seen = Seen()
    striking = asyncio.create_task(strike()) if strike is not None else None
    outcome = await local_run.run(new_job("counted", whole), shared, seen)
    if striking is not None:
        striking.cancel()
    return outcome.status, seen


@dataclass
class Strike:
    """SIGKILL for one rank, once that many seconds are over and there is one."""

    seconds: float
    rank_pid: int = 0
    """Whom it hit; 0 for none."""

    async def __call__(self) -> None:
        await asyncio.sleep(self.seconds)
        while not self.rank_pid:
            if ranks := [pid for pid in processes.descendants(os.getpid()) if _is_rank(pid)]:
                self.rank_pid = random.choice(ranks)
                os.kill(self.rank_pid, signal.SIGKILL)
            await asyncio.sleep(0.05)


def _is_rank(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    return words[1:4] == ["-u", "-m", RANK_MODULE] or words[1:3] == ["-m", RANK_MODULE]


def untouched(library: str, folder: Path) -> Run:
    began = time.time()
    status, seen = asyncio.run(_run(folder, UNTOUCHED / f"{library}.py"))
    ended = time.time()
    if status.phase is not Phase.SUCCEEDED:
        failure = status.last_failure
        return Run((f"{status.phase}: {failure.reason if failure else ''}: {failure.message if failure else ''}",))
    notes = [json.loads((folder / "shared" / f"done-{rank}.json").read_text()) for rank in (0, 1)]
    late = ended - max(note["lastLine"] for note in notes)
    goodput = status.goodput.ratio if status.goodput is not None else 0.0
    deviation = (goodput or 0.0) / (notes[0]["training"] / (ended - began)) - 1
    wanted = {"step", "loss", "samples_per_second"} | ({"eta"} if library in KNOW_THEIR_TOTAL else set())
    step = status.progress.step if status.progress is not None else None
    found = {
        f"{status.restarts} restarts": status.restarts,
        f"ended {late:.1f} s after the last line": late > SECONDS,
        f"the status never had {', '.join(sorted(wanted - seen.fields))}": wanted - seen.fields,
        f"ended at step {step} of {notes[0]['steps']}": step != notes[0]["steps"],
        f"goodput {goodput}, off by {deviation:+.1%}": abs(deviation) > SHARE,
    }
    return Run(tuple(text for text, is_wrong in found.items() if is_wrong), late, deviation)


def struck(library: str, folder: Path, whole: dict[int, Any], seconds: float) -> Run:
    """After a random time below `seconds`; a run that was over before is made again, with less time."""
    after = random.uniform(0, seconds)
    strike = Strike(after)
    status, _ = asyncio.run(_integrated(library, folder, strike))
    if not strike.rank_pid:
        shutil.rmtree(folder)
        return struck(library, folder, whole, after)
    if status.phase is not Phase.SUCCEEDED:
        failure = status.last_failure
        return Run((f"{status.phase} after SIGKILL at {after:.1f} s: {failure.message if failure else ''}",))
    losses = _losses(folder)
    differ = sorted(step for step in losses.keys() | whole.keys() if losses.get(step) != whole.get(step))
    problem = f"other losses, first at step {differ[0]}, after SIGKILL at {after:.1f} s" if differ else None
    return Run((problem,) if problem else ())


def _integrated(library: str, folder: Path, strike: Strike | None = None) -> Any:
    return _run(
        folder,
        INTEGRATED / f"with_{library}.py",
        strike=strike,
        env=[{"name": "PACE", "value": str(PACE)}],
        snapshots={"every": EVERY[library], "keep": 2},
        restart={"backoff": {"initialSeconds": 0}},
    )


def _losses(folder: Path) -> dict[int, Any]:
    """By step, of a step that was computed again the last."""
    lines = (folder / "shared" / "losses.jsonl").read_text().splitlines()
    return {step: values for step, *values in map(json.loads, lines)}


def held_up(fault: str, folder: Path) -> Run:
    guilty = random.randrange(4)
    status = hanging(folder, 4, fault, guilty)
    failure = status.last_failure
    if failure is None or (failure.reason, failure.rank) != ("Stalled", guilty):
        return Run((f"rank {guilty} held it up: {failure}",))
    place = f"Stack of rank {guilty}: {FAULTS[fault]} (train.py"
    return Run(() if place in failure.message else (f"not {place!r}: {failure.message}",))


@contextmanager
def _busy(count: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(count):
            computes = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(computes.wait)
            stack.callback(computes.kill)
        yield


def _count(kind: str, what: str, runs: int, folder: Path) -> list[Run]:
    found: list[Run] = []
    whole: dict[int, Any] = {}
    seconds = 0.0
    if kind == "struck":
        began = time.monotonic()
        status, _ = asyncio.run(_integrated(what, folder / f"whole-{what}"))
        assert status.phase is Phase.SUCCEEDED, status.last_failure
        whole, seconds = _losses(folder / f"whole-{what}"), time.monotonic() - began
    for number in range(1, runs + 1):
        place = folder / f"{kind}-{what}-{number}"
        match kind:
            case "untouched":
                run = untouched(what, place)
            case "struck":
                run = struck(what, place, whole, seconds)
            case _:
                run = held_up(what, place)
        found.append(run)
        late = "" if run.after_last_line is None else f" {run.after_last_line:.1f} s after the last line"
        print(f"{kind} {what} {number}: {'; '.join(run.problems) or 'as it should be'}{late}", flush=True)
        if run.problems:
            print(f"  kept: {place}", flush=True)
        else:
            shutil.rmtree(place)
    return found


def _row(kind: str, what: str, runs: Sequence[Run]) -> str:
    good = sum(not run.problems for run in runs)
    late = [run.after_last_line for run in runs if run.after_last_line is not None]
    off = [run.deviation for run in runs if run.deviation is not None]
    ends = f"{median(late):.1f}, {max(late):.1f}" if late else ""
    return (
        f"| {kind} | {what} | {good} of {len(runs)} | {ends} | {max(map(abs, off)):.1%} |"
        if off
        else (f"| {kind} | {what} | {good} of {len(runs)} | {ends} | |")
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--busy", type=int, default=0, help="processes that always compute, beside")
    parser.add_argument("--only", nargs="*", default=[], help="of untouched, struck, held-up, and the libraries")
    parser.add_argument("--seed", type=int, default=1, help="of the random moments")
    given = parser.parse_args(argv)
    random.seed(given.seed)
    kinds = [kind for kind in KINDS if kind in given.only] or list(KINDS)
    libraries = [library for library in LIBRARIES if library in given.only] or list(LIBRARIES)
    folder = Path(tempfile.mkdtemp(prefix="count-scripts-"))
    rows, failed = [], 0
    with _busy(given.busy):
        for kind in kinds:
            for what in FAULTS if kind == "held-up" else libraries:
                found = _count(kind, what, given.runs, folder)
                failed += sum(bool(run.problems) for run in found)
                rows.append(_row(kind, what, found))
    print("| Kind | Of | As it should be | Seconds after the last line: median, most | Goodput off by, most |")
    print("|---|---|---|---|---|")
    print("\n".join(rows))
    if not failed:
        shutil.rmtree(folder)
    return min(1, failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
