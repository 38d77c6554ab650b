"""What live recovery costs while nothing fails: steps of 50 ms with `restart.scope: Live`, beside DDP under torchrun.

    python -m tests.benchmarks.bench_live_step [--rounds 3] [--ranks 2 4]

As `bench_step`: all features are on, snapshots included, as often as by default, and the two programs take turns, in
each of which metrics are scraped once. Steps leave the processor free, as where a device computes, or four ranks would
wait for two cores. The same job with scope Gang is measured too: the difference is the price of live recovery, the rest
that of everything else. The last row of each size is the loop by hand with nothing but the small reduction of a step:
the least that ranks can do which agree on each step.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.benchmarks.bench_step import WARM_UP, Comparison, bare_loop
from tests.benchmarks.paced_loop import REDUCES
from tests.benchmarks.table import Ratio, report
from tests.benchmarks.turns import referee

MAX_RATIO = 1.01
BATCH = 8
"""Samples a rank."""
TURN = 300
"""Steps: 15 s, as often as Prometheus asks."""
SNAPSHOT_EVERY = 1200
"""Steps: 60 s, as by default."""


def ratio(ranks: int, rounds: int, scope: str) -> Ratio:
    """Measure with so many pods of a rank each."""
    spec = {"nodes": ranks, "restart": {"scope": scope}}
    arguments = ["--task=tests.benchmarks.paced_task:Paced", "--strategy=ddp", "--device=cpu"]
    arguments += [f"--global-batch={BATCH * ranks}", "--epochs=1000"]
    found = Comparison(
        spec, arguments, "paced_loop.py", [str(BATCH)], ranks, snapshot_every=SNAPSHOT_EVERY, turn=TURN
    ).rounds(rounds)
    costs, floors = zip(*found, strict=True)
    return Ratio(f"a step of 50 ms at {ranks} ranks, scope {scope}", "DDP by hand", costs, floors, MAX_RATIO)


def ratio_of_reduction(ranks: int, rounds: int) -> Ratio:
    """Of the loop by hand that also reduces a few numbers in each step."""
    players = {"bare": [str(BATCH)], REDUCES: [str(BATCH), REDUCES]}
    with tempfile.TemporaryDirectory(prefix="bench-live-step-") as folder, ExitStack() as stack:
        judge, environ = stack.enter_context(referee(Path(folder)))
        seated = []
        for name, arguments in players.items():
            loop = stack.enter_context(bare_loop(ranks, "paced_loop.py", arguments, environ))
            seated.append(judge.seat(name, loop, ranks))
            seated[-1].play(WARM_UP)
        found = [[player.play(TURN) / TURN for player in seated] for _ in range(rounds * SNAPSHOT_EVERY // TURN)]
    floors, costs = zip(*found, strict=True)
    return Ratio(f"DDP by hand at {ranks} ranks, with a reduction", "DDP by hand", costs, floors, MAX_RATIO)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bench_live_step", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of 1,200 steps (default: %(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    found = []
    for ranks in options.ranks:
        found += [ratio(ranks, options.rounds, scope) for scope in ("Live", "Gang")]
        found.append(ratio_of_reduction(ranks, options.rounds))
    return report(found)


if __name__ == "__main__":
    sys.exit(main())
