"""Fixtures: a volume of one's own, and runs that several tests look at."""

from __future__ import annotations

import json
import runpy
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.support.starting import starts_processes
from tests.trainer.train.volume import HERE, Volume

from ddp_trainer.client import run as client_run
from ddp_trainer.contract.heartbeat import Heartbeat
from ddp_trainer.rank.world import World, process_group
from ddp_trainer.train.build import build
from ddp_trainer.train.command_line import parse


@pytest.fixture
def group() -> Iterator[World]:
    """A process group of this process alone."""
    with process_group(World(), timeout_seconds=30):
        yield World()


@pytest.fixture(scope="session")
@starts_processes
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Volume]:
    """One of the undisturbed runs in `runs.py`; the first of a number of ranks trains all of that number."""
    roots: dict[int, Path] = {}
    table = runpy.run_path(str(HERE / "runs.py"))["RUNS"]

    def trained(ranks: int, name: str) -> Volume:
        if ranks not in roots:
            root = roots[ranks] = tmp_path_factory.mktemp("runs")
            (root / "runs.json").write_text(json.dumps(table[ranks]))
            done = Volume(root, fresh=ranks == 2).train(ranks, "several.py", str(root / "runs.json"))
            assert done.returncode == 0, done.stdout + done.stderr
            (root / "output.txt").write_text(done.stdout)
            (root / "errors.txt").write_text(done.stderr)
        return Volume(roots[ranks], name)

    return trained


@pytest.fixture(scope="session")
@starts_processes
def resumed(run: Callable[[int, str], Volume]) -> Callable[[str], tuple[Volume, Volume]]:
    """One of RESUMED in `runs.py`: the run that was started twice, and the one that was not."""
    table = runpy.run_path(str(HERE / "runs.py"))["RESUMED"]
    done: list[str] = []

    def pair(name: str) -> tuple[Volume, Volume]:
        broken = run(2, f"{name}-broken")
        if not done:
            again = broken.root / "again.json"
            rest = {
                f"{job}-broken": (*arguments, "--max-steps", str(end)) for job, (arguments, _, end) in table.items()
            }
            again.write_text(json.dumps(rest))
            broken.trained(2, "several.py", str(again), DDPJOB_ATTEMPT="1")
            done.append(str(again))
        assert [event["step"] for event in broken.events("resumed")] == [table[name][1]]
        return broken, run(2, f"{name}-unbroken")

    return pair


def largest_difference(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    assert one.keys() == other.keys()
    return max(abs(one[step] - other[step]) for step in one)


@pytest.fixture(scope="session")
def difference() -> Callable[[Mapping[int, float], Mapping[int, float]], float]:
    """The largest difference between two runs' losses of one step; they must have the same steps."""
    return largest_difference


@pytest.fixture
def train_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Volume]]:
    """Train with the built-in loop on one rank, in this process, as the next attempt of a job on its own volume."""
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setattr(client_run, "leave_as_preempted", lambda step: None)
    attempts = iter(range(9))

    def trained(*flags: str, **variables: str) -> Volume:
        volume = Volume(tmp_path)
        with pytest.MonkeyPatch.context() as environ, process_group(World(), timeout_seconds=30):
            for name, value in volume.environment(DDPJOB_ATTEMPT=str(next(attempts)), **variables).items():
                if name.startswith("DDPJOB_"):
                    environ.setenv(name, value)
            try:
                config = parse(["--strategy=single", "--no-deterministic", *flags])
                loop = build(config, World(), Heartbeat.from_env())
                loop.run()
                # a loop is in a cycle: its workers would stay, with all that this process has open
                del loop.loader
            except BaseException:
                dist.destroy_process_group()  # for the next attempt
                raise
        return volume

    yield trained
    signal.signal(signal.SIGTERM, handler)
