"""What it costs to observe a script that knows nothing of DDPJob: the hooks in torch, and the heartbeat of each step.

    python -m tests.benchmarks.bench_observing [--rounds 5]

A loop with a DataLoader, a backward pass and an optimizer, as small as they can be, makes its steps with the observer
and without, in turns. What a step takes longer with it does not depend on how long the step is. It is shown as a share
of one of 10 ms, with what the writes of the heartbeat take in that time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from tests.benchmarks.table import Cost, Ratio, measured, report
from torch.utils.data import DataLoader, TensorDataset

from ddp_trainer.contract.heartbeat import WRITE_INTERVAL_SECONDS, Heartbeat, heartbeat_dir
from ddp_trainer.rank.observe import close_observer, observe

MAX_RATIO = 1.005
STEP_SECONDS = 0.010
TURN, TURNS = 500, 10
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
        plain = measured(_train)
        heartbeat = Heartbeat(heartbeat_dir(run_dir), observed=True)
        observer = observe(heartbeat, world_size=2)
        observed = measured(_train)
        assert observer.step == TURN, f"{observer.step} steps were observed"
        close_observer()
        write = measured(heartbeat.flush)
        extra.append((_a_step(plain, observed, write, "clock"), _a_step(plain, observed, write, "processor")))
    clock, processor = (statistics.median(seconds) for seconds in zip(*extra, strict=True))
    return Cost(clock, processor)


def _a_step(plain: Cost, observed: Cost, write: Cost, of: str) -> float:
    """What a step of STEP_SECONDS takes longer, with its share of the writes, which are due by the clock."""
    longer = (getattr(observed, of) - getattr(plain, of)) / TURN
    return float(longer + getattr(write, of) * STEP_SECONDS / WRITE_INTERVAL_SECONDS)


def _train() -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, targets in DataLoader(TensorDataset(torch.ones(TURN * 2, 4), torch.ones(TURN * 2, 1)), batch_size=2):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bench_observing", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="measurements (default: %(default)s)")
    torch.set_num_threads(1)
    return report([ratio(parser.parse_args().rounds)])


if __name__ == "__main__":
    sys.exit(main())
