"""What everything around a step costs: TinyTransformerLM under `ddpjob run` beside a bare hand-written loop.

    python -m tests.benchmarks.bench_step [--rounds 5] [--batch 16] [--ranks 1 2]

Everything is on: launcher, status page asked by the runner, /metrics scraped, heartbeats, watchdog, TensorBoard, loss
log, and a snapshot every 50 steps. The bare loop is what people write by hand; with 2 ranks it is torch's DDP under
torchrun. The two train side by side in processes of their own and take turns of ten and five steps (`turns`), so both
see the same machine. A round is as many steps as lie between two snapshots, and each snapshot falls into the middle of
one of the product's turns.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.job import ROOT, RunningJob, running
from tests.benchmarks.table import Cost, Ratio, report
from tests.benchmarks.turns import Player, referee

from ddp_trainer.contract import processes
from ddp_trainer.logs.losses import read_losses

MAX_RATIO = 1.02
SNAPSHOT_EVERY = 50
TURN = 10
"""Steps of the product in a row; the bare loop makes half as many."""
BATCH = 16
"""Samples a rank. With fewer a step is shorter, and what surrounds it, which costs the same, weighs more."""
WARM_UP = 5
"""Steps before the first turn that counts; not a multiple of TURN, so that no snapshot falls on a turn's end."""


def ratio(ranks: int, rounds: int, batch: int, device: str = "cpu") -> Ratio:
    """Measure with so many ranks and so many samples a rank, on cpu or cuda."""
    arguments = ["--task=tests.benchmarks.step_task:TinyLMInTurns", "--weight-decay=0.01"]
    arguments += [f"--global-batch={batch * ranks}", f"--strategy={'ddp' if ranks > 1 else 'single'}"]
    found = Comparison(
        {"procsPerNode": ranks}, [*arguments, f"--device={device}"], "bare_loop.py", [str(batch), device], ranks
    ).rounds(rounds)
    costs, floors = zip(*found, strict=True)
    return Ratio(f"a step at {ranks} rank{'s' if ranks > 1 else ''}", "bare loop", costs, floors, MAX_RATIO)


@dataclass(frozen=True)
class Comparison:
    """A job of so many ranks, and the loop in the file `bare`."""

    spec: dict[str, Any]
    arguments: list[str]
    bare: str
    bare_arguments: list[str]
    ranks: int
    snapshot_every: int = SNAPSHOT_EVERY
    turn: int = TURN

    def rounds(self, rounds: int) -> list[tuple[Cost, Cost]]:
        """What a step of each took, in so many rounds."""
        with tempfile.TemporaryDirectory(prefix="bench-step-") as folder, ExitStack() as stack:
            directory = Path(folder)
            judge, environ = stack.enter_context(referee(directory))
            steps = WARM_UP + rounds * self.snapshot_every + 1
            spec = self.spec | {
                "args": [*self.arguments, "--validate-every=never", f"--max-steps={steps}"],
                "snapshots": {"every": f"{self.snapshot_every}steps"},
            }
            job = stack.enter_context(running(directory, spec, environ))
            product = judge.seat("product", job.process.pid, self.ranks)
            product.play(WARM_UP)
            loop = stack.enter_context(bare_loop(self.ranks, self.bare, self.bare_arguments, environ))
            bare = judge.seat("bare", loop, self.ranks)
            bare.play(WARM_UP)
            found = [self._round(product, bare) for _ in range(rounds)]
            product.let_go()
            _check(job, rounds, self.snapshot_every)
            return found

    def _round(self, product: Player, bare: Player) -> tuple[Cost, Cost]:
        """As many steps as lie between two snapshots, in turns: the product's and the bare loop's, for one step."""
        costs, floors = [], []
        for _ in range(self.snapshot_every // self.turn):
            costs.append(product.play(self.turn, meanwhile=lambda: _scrape(product)))
            floors.append(bare.play(self.turn // 2))
        return _sum(costs) / self.snapshot_every, _sum(floors) / (len(floors) * (self.turn // 2))


def _scrape(product: Player) -> None:
    """As Prometheus does every 15 or 30 seconds, here once a turn."""
    environ = Path(f"/proc/{product.ranks[0]}/environ").read_text().split("\0")
    port = next(entry.partition("=")[2] for entry in environ if entry.startswith("DDPJOB_STATUS_PORT="))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
        assert b"ddpjob_train_step{" in page.read()


def _check(job: RunningJob, rounds: int, every: int) -> None:
    """That everything was on: or else what was measured is not what was promised."""
    code = job.end()
    saved = [event["step"] for event in job.events("snapshot_saved")]
    wanted = [every * (number + 1) for number in range(rounds)]
    curves = list((job.logs / "tensorboard").iterdir())
    losses = len(read_losses(job.logs))
    if code or saved[:rounds] != wanted or not curves or losses <= wanted[-1]:
        raise SystemExit(f"not everything was on: exit code {code}, saved {saved}, curves {curves}, {losses} losses")


@contextmanager
def bare_loop(ranks: int, file: str, arguments: list[str], environ: dict[str, str]) -> Iterator[int]:
    """The process id of a bare loop, which is killed in the end."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    paths = os.pathsep.join(map(str, (ROOT / "trainer_image", ROOT)))
    process = subprocess.Popen(
        [sys.executable, *torchrun, str(Path(__file__).with_name(file)), *arguments],
        env={**environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
    )
    try:
        yield process.pid
    finally:
        processes.send([process.pid, *processes.descendants(process.pid)], 9)
        process.wait()


def _sum(costs: list[Cost]) -> Cost:
    return Cost(sum(cost.clock for cost in costs), sum(cost.processor for cost in costs))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bench_step", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of 50 steps of each (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=BATCH, help="samples a rank (default: %(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of both (default: %(default)s)")
    options = parser.parse_args()
    return report([ratio(ranks, options.rounds, options.batch, options.device) for ranks in options.ranks])


if __name__ == "__main__":
    sys.exit(main())
