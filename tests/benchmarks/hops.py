"""How far a reader has to walk: the functions and modules of ddp_trainer that one step, and one save, pass through.

    python -m tests.benchmarks.hops [--show step|save] [TRAINING FLAGS]

Trains on one rank with a profiler (sys.setprofile) and counts each function once. The step is a plain one: no snapshot,
no validation, with one write of the heartbeat. The save is a periodic one, in the training thread and its own thread. A
mirror, not a limit: moving lines to lower a count helps no reader.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import ddp_trainer
from ddp_trainer.contract import heartbeat
from ddp_trainer.rank.world import describe_world, process_group
from ddp_trainer.snapshots.session import Snapshots
from ddp_trainer.train.build import build
from ddp_trainer.train.command_line import parse
from ddp_trainer.train.loop import TrainingLoop

PACKAGE = str(Path(str(ddp_trainer.__file__)).parent) + os.sep
STEP = 12
SAVE = 15
TRAIN_STEP: CodeType = TrainingLoop._train_step.__code__
SAVE_CALL: CodeType = Snapshots.save.__code__


class Tracer:
    """Functions of the package by what they were called for: `step` from one step to the next, `save` within a save."""

    def __init__(self) -> None:
        self.seen: dict[str, set[tuple[str, str]]] = {"step": set(), "save": set()}
        self._steps = 0
        self._is_saving = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(PACKAGE):
            return
        thread = threading.current_thread()
        in_training = thread is threading.main_thread()
        if in_training and code is SAVE_CALL:
            self._is_saving = event == "call" and self._steps == SAVE
        if event == "return":
            return
        if in_training and code is TRAIN_STEP:
            self._steps += 1
        called = (code.co_filename.removeprefix(PACKAGE), getattr(code, "co_qualname", code.co_name))
        if thread.name == f"snapshot-{SAVE}" or (in_training and self._is_saving):
            self.seen["save"].add(called)
        elif in_training and self._steps == STEP:
            self.seen["step"].add(called)


def trace(flags: list[str]) -> Tracer:
    """Train twenty steps in a temporary folder."""
    heartbeat.WRITE_INTERVAL_SECONDS = 0.0  # type: ignore[misc]
    tracer = Tracer()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(
            DDPJOB_SHARED=folder,
            DDPJOB_RUN_DIR=f"{folder}/run",
            DDPJOB_SNAPSHOT_EVERY=f"{SAVE}steps",
            DDPJOB_NAME="hops",
        )
        config = parse(["--max-steps", "20", "--validate-every", "never", "--log-every", "20", *flags])
        world = describe_world(device="cpu")
        with process_group(world, timeout_seconds=60):
            loop = build(config, world, heartbeat.Heartbeat.from_env())
            threading.setprofile(tracer)
            sys.setprofile(tracer)
            try:
                loop.run()
            finally:
                sys.setprofile(None)
                threading.setprofile(None)  # type: ignore[arg-type]
    return tracer


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.hops", description=__doc__)
    parser.add_argument("--show", choices=("step", "save"), help="list them")
    options, flags = parser.parse_known_args()
    tracer = trace(flags)
    for name, called in tracer.seen.items():
        print(f"{name}: {len(called)} functions in {len({module for module, _ in called})} modules")
    if options.show:
        by_module = defaultdict(list)
        for module, function in sorted(tracer.seen[options.show]):
            by_module[module].append(function)
        for module, functions in by_module.items():
            print(f"  {module}: {', '.join(functions)}")


if __name__ == "__main__":
    main()
