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
from pathlib import Path

from tests.benchmarks.job import ROOT, RunningJob, running
from tests.benchmarks.table import Cost, Ratio, report
from tests.benchmarks.turns import Player, referee

from ddp_trainer.contract import processes
from ddp_trainer.logs.losses import read_losses

MAX_RATIO = 1.02
SNAPSHOT_EVERY = 50
TURN = 10
BARE_TURN = 5
BATCH = 16
"""Samples a rank. With fewer a step is shorter, and what surrounds it, which costs the same, weighs more."""
WARM_UP = 5
"""Steps before the first turn that counts; not a multiple of TURN, so that no snapshot falls on a turn's end."""


def ratio(ranks: int, rounds: int, batch: int, device: str = "cpu") -> Ratio:
    """Measure with so many ranks and so many samples a rank, on cpu or cuda."""
    with tempfile.TemporaryDirectory(prefix="bench-step-") as folder, ExitStack() as stack:
        directory = Path(folder)
        judge, environ = stack.enter_context(referee(directory))
        arguments = ["--task=tests.benchmarks.step_task:TinyLMInTurns", "--validate-every=never", "--weight-decay=0.01"]
        arguments += [f"--global-batch={batch * ranks}", f"--max-steps={WARM_UP + rounds * SNAPSHOT_EVERY + 1}"]
        arguments += [f"--strategy={'ddp' if ranks > 1 else 'single'}", f"--device={device}"]
        spec = {
            "procsPerNode": ranks,
            "args": arguments,
            "snapshots": {"every": f"{SNAPSHOT_EVERY}steps"},
        }
        job = stack.enter_context(running(directory, spec, environ))
        product = judge.seat("product", job.process.pid, ranks)
        product.play(WARM_UP)
        bare = judge.seat("bare", stack.enter_context(_bare_loop(ranks, batch, device, environ)), ranks)
        bare.play(WARM_UP)
        found = [_round(product, bare, job) for _ in range(rounds)]
        product.let_go()
        _check(job, rounds)
        return Ratio(
            f"a step at {ranks} rank{'s' if ranks > 1 else ''}",
            "bare loop",
            [cost / SNAPSHOT_EVERY for cost, _ in found],
            [floor / (SNAPSHOT_EVERY * BARE_TURN / TURN) for _, floor in found],
            MAX_RATIO,
        )


def _round(product: Player, bare: Player, job: RunningJob) -> tuple[Cost, Cost]:
    """Sums over the turns of one round: the product's and the bare loop's."""
    costs, floors = [], []
    for _ in range(SNAPSHOT_EVERY // TURN):
        costs.append(product.play(TURN, meanwhile=lambda: _scrape(product)))
        floors.append(bare.play(BARE_TURN))
    return _sum(costs), _sum(floors)


def _scrape(product: Player) -> None:
    """As Prometheus does every 15 or 30 seconds, here once a turn."""
    environ = Path(f"/proc/{product.ranks[0]}/environ").read_text().split("\0")
    port = next(entry.partition("=")[2] for entry in environ if entry.startswith("DDPJOB_STATUS_PORT="))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
        assert b"ddpjob_train_step{" in page.read()


def _check(job: RunningJob, rounds: int) -> None:
    """That everything was on: or else what was measured is not what was promised."""
    code = job.end()
    saved = [event["step"] for event in job.events("snapshot_saved")]
    wanted = [SNAPSHOT_EVERY * (number + 1) for number in range(rounds)]
    curves = list((job.logs / "tensorboard").iterdir())
    losses = len(read_losses(job.logs))
    if code or saved[:rounds] != wanted or not curves or losses <= wanted[-1]:
        raise SystemExit(f"not everything was on: exit code {code}, saved {saved}, curves {curves}, {losses} losses")


@contextmanager
def _bare_loop(ranks: int, batch: int, device: str, environ: dict[str, str]) -> Iterator[int]:
    """The process id of a bare loop, which is killed in the end."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    paths = os.pathsep.join(map(str, (ROOT / "trainer_image", ROOT)))
    process = subprocess.Popen(
        [sys.executable, *torchrun, str(Path(__file__).with_name("bare_loop.py")), str(batch), device],
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
