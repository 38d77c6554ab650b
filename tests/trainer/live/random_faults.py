"""Ranks that recover live, under faults at random for as long as it takes, and what must be true in the end.

    python -m tests.trainer.live.random_faults --seed 1 --faults 200 [--own-loop]

Four launchers on this machine train one model, in the built-in loop or in a script with `attach_live`. Ranks and whole
pods are killed, alone or two at once, stopped and continued, or asked to stop, at moments that follow from the seed:
also while another rank joins, validates or saves. A pod that ends is started again, as the operator does it. In the
end every pod has succeeded. Each step has the loss, the learning rate and the samples, each once, of a run of one rank
that nothing happens to; no two histories of the ranks go on from different weights after the same step; and the last
snapshot has the weights of the last step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tests.support.waiting import eventually
from tests.trainer.launch.conftest import Pod
from tests.trainer.live.recorded_task import HISTORY, digest

from ddp_trainer.contract import processes
from ddp_trainer.logs.losses import read_losses
from ddp_trainer.snapshots.codec.state import parse_files, read_files
from ddp_trainer.snapshots.trust.store import SnapshotStore

NODES = 4
ROOT = Path(__file__).parents[3]
MOST_DIFFERENCE = 1e-5
"""Between the losses of a step, in fp32: the order of sums differs."""
STOPPED_SECONDS = (1.0, 12.0)
"""How long a rank is stopped: shorter than the others wait for it, about as long as they take to go on, and longer."""
SECONDS = 600.0
OVER = [-1]
"""In place of the pods that train."""


@dataclass(frozen=True)
class Step:
    """One optimizer step of one process, in the membership view `view`."""

    view: int
    step: int
    weights: str
    """A digest."""
    lr: float = 0.001


@dataclass(frozen=True)
class History:
    """What one process has done."""

    steps: list[Step]
    parts: list[tuple[int, int, list[int]]]
    """Of gradients, also of steps that were dropped: view, step, samples."""


class Gang:
    """The pods of a job on this machine, of which `keep_alive` starts those that have ended again."""

    def __init__(self, folder: Path, argv: list[str]) -> None:
        self.folder, self.shared, self.history = folder, folder / "shared", folder / "history"
        self.history.mkdir(parents=True)
        self._argv = argv
        self._started = 0
        self.ends: Counter[str] = Counter()
        """Of pods that were started again, by the reason in their termination message."""
        self.pods = [self._start(rank) for rank in range(NODES)]

    def _start(self, node_rank: int) -> Pod:
        directory = self.folder / f"pod{self._started}"
        directory.mkdir()
        self._started += 1
        environment = {
            "DDPJOB_UID": "0b0c",
            "DDPJOB_SHARED": str(self.shared),
            "DDPJOB_NODES": str(NODES),
            "DDPJOB_NODE_RANK": str(node_rank),
            "DDPJOB_LIVE": "true",
            "DDPJOB_SNAPSHOT_EVERY": "50steps",
            "DDPJOB_STALL_MIN_SECONDS": "300",
            "PYTHONPATH": python_path(),
            HISTORY: str(self.history),
        }
        return Pod(directory, self.shared, self._argv, environment)

    def keep_alive(self) -> None:
        for rank, pod in enumerate(self.pods):
            code = pod.process.poll()
            if code is None or code == 0:
                continue
            self.ends[self._reason(pod)] += 1
            pod.end()
            self.pods[rank] = self._start(rank)

    def _reason(self, pod: Pod) -> str:
        try:
            return str(pod.message["reason"])
        except (OSError, ValueError):  # the launcher was killed
            return "PodKilled"

    def training(self) -> list[int]:
        """Node ranks whose pod trains, or validates."""
        return [rank for rank, pod in enumerate(self.pods) if self.report(pod).get("phase") in ("train", "validate")]

    def step(self) -> int:
        return max(map(self.step_of, self.pods), default=0)

    def step_of(self, pod: Pod) -> int:
        """The last one that it has finished; 0 where it does not say."""
        return self.report(pod).get("step") or 0

    def report(self, pod: Pod) -> dict[str, Any]:
        if pod.process.poll() is not None or not (pod.run_dir / "port").exists():
            return {}
        try:
            return pod.status()
        except (OSError, ValueError):
            return {}

    def end(self) -> None:
        for pod in self.pods:
            pod.end()


class Faults:
    """What is done to a pod. Each rank of `victims` trains, and another one that does is left alone."""

    def __init__(self, gang: Gang, seed: int) -> None:
        self.gang, self.chance = gang, random.Random(seed)
        self.done: Counter[str] = Counter()
        self._stopped: list[tuple[float, list[int], Pod]] = []
        self._hit: set[Pod] = set()
        """One that was asked to stop, say, trains on for a step; the state must not be lost with the others."""
        self._continued: dict[Pod, int] = {}
        """Pods that were stopped, and the step at which they go on, if the others have not gone on without them."""

    def hit(self) -> bool:
        """One fault, once there are two pods that train. False where training is over."""
        training: list[int] = eventually(self._enough, "two pods train", SECONDS, self._state)
        if training == OVER:
            return False
        kind = self.chance.choice(("kill rank", "kill pod", "kill two", "stop rank", "ask to stop", "ask to stop"))
        count = 2 if kind == "kill two" and len(training) > 2 else 1
        for rank in self.chance.sample(training, count):
            self._hit.add(self.gang.pods[rank])
            self._one(kind, self.gang.pods[rank])
        self.done[kind] += 1
        return True

    def _enough(self) -> list[int] | None:
        found = self._training()
        if all(pod.process.poll() is not None for pod in self.gang.pods):
            return OVER
        gave_up = [path.read_text() for path in self.gang.shared.glob("checkpoints/digits/views/*/given-up")]
        assert not gave_up, gave_up
        return found if len(found) >= 2 else None

    def _training(self) -> list[int]:
        self.gang.keep_alive()
        self.go_on()
        for pod in [pod for pod, step in self._continued.items() if self.gang.step_of(pod) > step + 1]:
            del self._continued[pod]
            self._hit.discard(pod)
        return [rank for rank in self.gang.training() if self.gang.pods[rank] not in self._hit]

    def _state(self) -> str:
        """For people."""
        said = [f"after {dict(self.done)}, ends of pods: {dict(self.gang.ends)}"]
        for rank, pod in enumerate(self.gang.pods):
            report, hit = self.gang.report(pod), ", hit" if pod in self._hit else ""
            said.append(f"pod {rank}: {report.get('phase')}, step {report.get('step')}{hit}\n{pod.log[-2000:]}")
        return "\n".join(said)

    def _one(self, kind: str, pod: Pod) -> None:
        if kind == "ask to stop":
            pod.process.send_signal(signal.SIGTERM)
        elif kind == "kill pod":
            processes.send([pod.process.pid, *processes.descendants(pod.process.pid)], signal.SIGKILL)
        elif kind == "stop rank":
            pids = self._ranks(pod)
            processes.send(pids, signal.SIGSTOP)
            self._stopped.append((time.monotonic() + self.chance.uniform(*STOPPED_SECONDS), pids, pod))
        else:
            processes.send(self._ranks(pod), signal.SIGKILL)

    def _ranks(self, pod: Pod) -> list[int]:
        return list(pod.pids().values()) if pod.process.poll() is None else []

    def go_on(self) -> None:
        """Continue ranks that were stopped for long enough: the others have gone on without them."""
        for item in [item for item in self._stopped if item[0] < time.monotonic()]:
            _, pids, pod = item
            self._continued[pod] = self.gang.step_of(pod)
            processes.send(pids, signal.SIGCONT)
            self._stopped.remove(item)

    def is_at_rest(self) -> bool:
        self.go_on()
        return not self._stopped


def python_path() -> str:
    return os.pathsep.join([str(ROOT / "trainer_image"), str(Path(__file__).parent)])


@dataclass(frozen=True)
class Program:
    """What the launcher is to run, and what it takes besides to train one rank without waiting."""

    argv: list[str]
    alone: list[str]


def built_in(steps: int) -> Program:
    """The built-in loop."""
    args = ["--task", "recorded_task:Recorded", "--global-batch", "24", "--lr", "0.001", "--scheduler", "cosine"]
    args += ["--epochs", str(steps), "--max-steps", str(steps)]
    alone = ["--strategy", "single", "--task-options", "seconds=0"]
    return Program(["--module", "ddp_trainer.train", "--", *args], alone)


def own_loop(steps: int) -> Program:
    """A script with `attach_live`, which goes on with one rank."""
    script = str(Path(__file__).with_name("own_script.py"))
    return Program(["--script", script, "--", "--steps", str(steps), "--ranks", "1"], ["--seconds", "0"])


def train_alone(folder: Path, program: Program) -> tuple[dict[int, float], list[History]]:
    """Losses and the history of one rank that nothing happens to."""
    history, shared = folder / "history", folder / "shared"
    history.mkdir(parents=True)
    environment = {"DDPJOB_SHARED": str(shared), "PYTHONPATH": python_path(), HISTORY: str(history)}
    pod = Pod(folder, shared, program.argv + program.alone, environment)
    try:
        assert pod.wait(SECONDS * 3) == 0, pod.log
    finally:
        pod.end()
    return losses_of(shared), histories(history)


def losses_of(shared: Path) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in read_losses(shared / "logs" / "digits")}


def histories(folder: Path) -> list[History]:
    """Of each process; a line that a kill cut short is left out."""
    found = []
    for path in folder.iterdir():
        lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        steps = [Step(one["view"], one["step"], one["weights"], one["lr"]) for one in lines if "weights" in one]
        parts = [(one["view"], one["step"], one["samples"]) for one in lines if "samples" in one]
        found.append(History(steps, parts))
    return found


def split_brain(found: list[list[Step]]) -> list[str]:
    """Steps after which processes went on from different weights.

    A rank that is lost may have finished a step that the others have made again: it takes no further one.
    """
    went_on: dict[int, set[tuple[int, str]]] = defaultdict(set)
    for steps in found:
        for one in steps[:-1]:
            went_on[one.step].add((one.view, one.weights))
    return [f"after step {step} ranks went on from {len(states)} different states"
            for step, states in sorted(went_on.items()) if len(states) > 1]  # fmt: skip


def wrong_steps(found: list[History], unbroken: list[History]) -> Iterator[str]:
    """Steps that were not on the samples of that step, each once, or had another learning rate. A step that was dropped
    is not on record as one.
    """
    # a rank that is alone warms up on its first batch before it trains on it
    expected = {key: sorted(set(samples)) for key, samples in samples_of(unbroken).items()}
    rates = {one.step: one.lr for history in unbroken for one in history.steps}
    samples = samples_of(found)
    taken = {(one.view, one.step, one.lr) for history in found for one in history.steps}
    for view, step, lr in sorted(taken):
        if samples[view, step] != expected[0, step]:
            yield f"step {step} of view {view} was on samples {samples[view, step]}, not {expected[0, step]}"
        if lr != rates[step]:
            yield f"step {step} of view {view} had learning rate {lr}, not {rates[step]}"
    if missing := rates.keys() - {step for _, step, _ in taken}:
        yield f"steps {sorted(missing)[:20]} were never taken"


def samples_of(found: list[History]) -> dict[tuple[int, int], list[int]]:
    """Of all ranks together, by view and step."""
    samples: dict[tuple[int, int], list[int]] = defaultdict(list)
    for history in found:
        for view, step, part in history.parts:
            samples[view, step] += part
    return {key: sorted(found) for key, found in samples.items()}


def wrong_snapshot(shared: Path, found: list[History], last: int) -> Iterator[str]:
    """What is wrong with the newest snapshot: it is of the last step, and has the weights that the ranks ended with."""
    newest = SnapshotStore(shared / "checkpoints/digits", keep=1, fence=None).load_newest(read_files)
    if newest is None or newest[0].step != last:
        yield f"the newest snapshot is of step {newest and newest[0].step}, not {last}"
        return
    saved = digest(parse_files(newest[1])["model"].values())
    ended = {one.weights for history in found for one in history.steps if one.step == last}
    if ended != {saved}:
        yield f"the last snapshot has weights {saved}, and the ranks ended with {ended}"


def problems(
    gang: Gang, faults: Faults, alone: tuple[dict[int, float], list[History]], events: list[dict[str, Any]]
) -> Iterator[str]:
    codes = [pod.process.poll() for pod in gang.pods]
    if codes != [0] * NODES:
        yield f"pods ended with {codes}"
    unbroken, unbroken_history = alone
    found, last = losses_of(gang.shared), max(unbroken)
    missing = sorted(unbroken.keys() - found.keys())
    if len(missing) > faults.done.total():
        yield f"{len(missing)} losses are missing, after {faults.done.total()} faults: {missing[:20]}"
    wrong = {step: abs(loss - unbroken[step]) for step, loss in found.items()}
    worst = max(wrong, key=wrong.__getitem__)
    if wrong[worst] > MOST_DIFFERENCE:
        first = min(step for step, difference in wrong.items() if difference > MOST_DIFFERENCE)
        yield f"the loss of step {worst} differs by {wrong[worst]:.2g}; step {first} is the first that differs"
    done = histories(gang.history)
    yield from split_brain([history.steps for history in done])
    yield from islice(wrong_steps(done, unbroken_history), 20)
    yield from wrong_snapshot(gang.shared, done, last)
    if any(event["event"] == "resumed" for event in events):
        yield "a snapshot was read"


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ddpjob-faults-", dir="/dev/shm"))
    try:
        yield folder
    finally:
        with suppress(OSError):
            shutil.rmtree(folder)


def run(program: Program, seed: int, count: int, steps: int, folder: Path) -> list[str]:
    """What was wrong; prints figures."""
    alone = train_alone(folder / "alone", program)
    unbroken, _ = alone
    began = time.monotonic()
    gang = Gang(folder, program.argv)
    faults = Faults(gang, seed)
    try:
        while faults.done.total() < count and faults.hit():
            until = time.monotonic() + faults.chance.uniform(0.2, 8.0)
            while time.monotonic() < until:
                time.sleep(0.1)
                gang.keep_alive()
                faults.go_on()
        print(
            f"{faults.done.total()} faults in {time.monotonic() - began:.0f} s, at step {gang.step()} of {steps}",
            flush=True,
        )

        def over() -> bool:
            gang.keep_alive()
            return faults.is_at_rest() and all(pod.process.poll() == 0 for pod in gang.pods)

        eventually(over, "all pods succeed", steps * 0.2 + SECONDS, lambda: "\n".join(pod.log for pod in gang.pods))
        lines = (gang.shared / "logs/digits/events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        found = losses_of(gang.shared)
        waits = [event["seconds"] for event in events if event["event"] == "recovered"]
        pauses = [event["seconds"] for event in events if event["event"] == "joined"]
        print(f"faults: {dict(faults.done)}; ends of pods: {dict(gang.ends)}")
        print(f"{steps} steps; losses missing: {len(unbroken.keys() - found.keys())}; greatest difference of a loss: "
              f"{max(abs(loss - unbroken[step]) for step, loss in found.items()):.2g}")  # fmt: skip
        for what, seconds in (("from step to step over a loss", waits), ("over a new rank", pauses)):
            if seconds:
                print(f"{what}: {statistics.median(seconds):.2f} s, at most {max(seconds):.2f} s, of {len(seconds)}")
        if faults.done.total() < count:
            print(f"training was over before the last of {count} faults: it needs more --steps")
        return list(problems(gang, faults, alone, events))
    finally:
        gang.end()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.trainer.live.random_faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--steps", type=int, default=20000, help="more than there is time for until the last fault")
    parser.add_argument("--own-loop", action="store_true", help="a script with attach_live, not the built-in loop")
    given = parser.parse_args()
    program = (own_loop if given.own_loop else built_in)(given.steps)
    with folder_in_memory() as folder:
        wrong = run(program, given.seed, given.faults, given.steps, folder)
    print("\n".join(wrong) or "nothing is wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
