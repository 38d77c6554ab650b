"""What it costs to observe a script that knows nothing of DDPJob: the hooks in torch, and the heartbeat of each step.

    python -m tests.benchmarks.bench_observing [--rounds 5]

A loop with a DataLoader, a backward pass and an optimizer, as small as they can be, makes its steps with the observer
and without, in turns. What a step takes longer with it does not depend on how long the step is. It is shown as a share
of one of 10 ms, and the heartbeat is written as often as in such steps.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from tests.benchmarks.table import Cost, Ratio, measured, report
from torch.utils.data import DataLoader, TensorDataset

from ddp_trainer.contract.heartbeat import Heartbeat, heartbeat_dir
from ddp_trainer.rank.observe import close_observer, observe

MAX_RATIO = 1.005
STEP_SECONDS = 0.010
START_SECONDS = 300.0
READS_AT_THE_START = 3
BEFORE, TURN, TURNS = 20, 100, 100
"""Steps of a turn before the clock starts, and after; turns of a round. The machine's own speed changes within seconds
by more than what is measured: turns are short, and each is compared with the one before it.
"""
MEMORY = Path("/dev/shm")


def ratio(rounds: int) -> Ratio:
    """The share of a step of STEP_SECONDS."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        heartbeat_dir(Path(folder)).mkdir()
        _train()
        extra = [_round(Path(folder)) for _ in range(rounds)]
    floor = Cost(STEP_SECONDS, STEP_SECONDS)
    costs = [Cost(STEP_SECONDS + cost.clock, STEP_SECONDS + cost.processor) for cost in extra]
    return Ratio("a step of 10 ms that is observed", "not observed", costs, [floor] * rounds, MAX_RATIO)


def _round(run_dir: Path) -> Cost:
    """What a step costs more with the observer."""
    extra = []
    for _ in range(TURNS):
        plain = _train()
        heartbeat = Heartbeat(heartbeat_dir(run_dir), observed=True, clock=_as_if_steps_were_longer())
        observer = observe(heartbeat, world_size=2)
        observed = _train()
        assert observer.step == BEFORE + TURN, f"{observer.step} steps were observed"
        close_observer()
        extra.append(((observed.clock - plain.clock) / TURN, (observed.processor - plain.processor) / TURN))
    clock, processor = (statistics.median(seconds) for seconds in zip(*extra, strict=True))
    return Cost(clock, processor)


def _as_if_steps_were_longer() -> Callable[[], float]:
    """A clock for the heartbeat, which reads it once a step: its writes come as often as in steps of STEP_SECONDS, some
    minutes after the start. It costs what the real one costs.
    """
    at_the_start = itertools.repeat(0.0, READS_AT_THE_START)
    return itertools.chain(at_the_start, itertools.count(START_SECONDS, STEP_SECONDS)).__next__


def _train() -> Cost:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    samples = 2 * (BEFORE + TURN)
    batches = iter(DataLoader(TensorDataset(torch.ones(samples, 4), torch.ones(samples, 1)), batch_size=2))

    def steps(count: int) -> None:
        for inputs, targets in itertools.islice(batches, count):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()

    steps(BEFORE)
    return measured(lambda: steps(TURN))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bench_observing", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="measurements (default: %(default)s)")
    torch.set_num_threads(1)
    return report([ratio(parser.parse_args().rounds)])


if __name__ == "__main__":
    sys.exit(main())
