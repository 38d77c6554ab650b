"""Every benchmark of the trainer, and one table: `python -m tests.benchmarks`. Exit code 1 if a target is missed.

Takes about six minutes on two cores. Run it on a machine that does nothing else: the ratios survive some noise, the
seconds do not.
"""

from __future__ import annotations

import argparse
import sys

import torch
from tests.benchmarks import bench_observing, bench_recovery, bench_snapshots, bench_step
from tests.benchmarks.table import Finding, report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each (default: %(default)s)")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    found: list[Finding] = []
    for ranks in (1, 2):
        print(f"a step at {ranks} rank(s) ...", file=sys.stderr, flush=True)
        found.append(bench_step.ratio(ranks, rounds, bench_step.BATCH))
    print("observing ...", file=sys.stderr, flush=True)
    found.append(bench_observing.ratio(rounds))
    print("snapshots ...", file=sys.stderr, flush=True)
    found += bench_snapshots.findings(None, 1000, rounds)
    print("recovery ...", file=sys.stderr, flush=True)
    found += bench_recovery.findings(rounds)
    return report(found)


if __name__ == "__main__":
    sys.exit(main())
