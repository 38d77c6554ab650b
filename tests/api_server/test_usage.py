"""What the operator counts of jobs that are gone, beside an account that the test keeps by its own clock."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.api_server.conftest import StartOperator
from tests.api_server.fleet import Fleet, ended, fleet
from tests.api_server.harness import Cluster, Operator
from tests.support.waiting import eventually_async

WAVE = 40
GPUS = 8
ROUNDED = 0.01
"""Seconds of a job that are lost or gained where the operator counts in milliseconds."""


Seconds = Counter[tuple[str, str]]
"""By cause and outcome."""


async def counted(operator: Operator, metric: str) -> Seconds:
    """Of all namespaces, as Prometheus would scrape it. Jobs that have not ended have no outcome."""
    families = {family.name: family for family in text_string_to_metric_families(await operator.metrics())}
    found: Seconds = Counter()
    for sample in families[metric].samples:
        if sample.name == f"{metric}_total":
            found[sample.labels["cause"], sample.labels.get("outcome", "")] += sample.value  # type: ignore[assignment]
    return found


def by(label: int, found: Seconds) -> Counter[str]:
    """The seconds by one of the two labels."""
    sums: Counter[str] = Counter()
    for labels, seconds in found.items():
        sums[labels[label]] += seconds
    return sums


async def series_of_jobs(operator: Operator) -> set[str]:
    """All series that a job has on its page: names and labels."""
    lines = [line for line in (await operator.metrics()).splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0] for line in lines if 'ddpjob="' in line}


@dataclass(frozen=True)
class Span:
    """When something has happened, on this test's own clock: not before, and not after."""

    first: float
    last: float


@dataclass(eq=False)
class Account:
    """For how many seconds jobs held a node, by outcome, by what this test has done and seen."""

    least: Counter[str] = field(default_factory=Counter)
    """From the latest start that is possible to the earliest end."""
    most: Counter[str] = field(default_factory=Counter)
    """From the earliest start to the latest end."""
    jobs: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: str, began: Span, ended: Span) -> None:
        self.least[outcome] += max(0.0, ended.first - began.last)  # type: ignore[assignment]
        self.most[outcome] += ended.last - began.first  # type: ignore[assignment]
        self.jobs[outcome] += 1

    def check(self, found: Counter[str], each: int, what: str) -> None:
        """That seconds by outcome are possible, for `each` of a job's. An outcome of "" stands for all."""
        for outcome, seconds in found.items():
            least, most, jobs = (
                sums[outcome] if outcome else sums.total() for sums in (self.least, self.most, self.jobs)
            )
            assert least - jobs * ROUNDED <= seconds / each <= most + jobs * ROUNDED, f"{what} of {outcome or 'all'}"


async def begin(cluster: Cluster, seen: Fleet, names: list[str]) -> dict[str, Span]:
    """When each job began to run: after its pod was first seen, which this test says runs, and before the operator's
    status said so. They have run for four times as long as the two are apart.
    """
    job = {"nodes": 1, "resources": {"limits": {"nvidia.com/gpu": GPUS}}, "restart": {"maxRestarts": 0}}
    await asyncio.gather(*(cluster.apply_job(name, **job) for name in names))
    await seen.until_each(names, lambda name: seen.phase(name) == "Running", "all jobs of the wave run")
    began = {name: Span(seen.seen[f"{name}-0-0"], seen.reached[name, "Running"]) for name in names}
    unsure = sum(span.last - span.first for span in began.values())
    known = sum(seen.loop_time - span.last for span in began.values())
    await asyncio.sleep(max(0.0, 4 * unsure - known) / len(names))
    return began


async def one_that_stays(operator: Operator, cluster: Cluster, seen: Fleet) -> set[str]:
    """A job that succeeds and is not deleted; its series."""
    await cluster.apply_job("stays", nodes=1)
    await seen.until(lambda: seen.phase("stays") == "Running", "the job that stays runs")
    await seen.report("stays-0-0", ended(0))
    found: set[str] = set()

    async def settled() -> bool:
        found.clear()
        found.update(await series_of_jobs(operator))
        return any('phase="Succeeded"' in series for series in found)

    await eventually_async(settled, "the end of the job that stays is on the page")
    return found


async def finish(operator: Operator, cluster: Cluster, seen: Fleet, outcomes: dict[str, str]) -> dict[str, Span]:
    """End the jobs and delete them; when each has ended: after this test has said so, and before its status had it, or
    before a deleted one was gone from the metrics.
    """
    deleted = [name for name, outcome in outcomes.items() if outcome == "Deleted"]
    said: dict[str, float] = {}

    async def delete(name: str) -> None:
        said.setdefault(name, seen.loop_time)
        await cluster.delete_job(name)

    async def end(name: str, outcome: str) -> None:
        said[name] = seen.loop_time
        await seen.report(f"{name}-0-0", ended(int(outcome == "Failed")))

    async def known() -> bool:
        page = await operator.metrics()
        return all(f'ddpjob="{name}"' in page for name in outcomes)

    async def noticed() -> bool:
        page = await operator.metrics()
        return not any(f'ddpjob="{name}"' in page for name in deleted)

    # what is deleted before an operator has looked at it is deleted while none runs
    await eventually_async(known, "the operator has looked at the jobs")
    await asyncio.gather(*(delete(name) for name in deleted))
    await eventually_async(noticed, "the operator has noticed the deletions")
    gone = seen.loop_time
    ends = {name: outcome for name, outcome in outcomes.items() if outcome != "Deleted"}
    await asyncio.gather(*(end(name, outcome) for name, outcome in ends.items()))
    await seen.until(
        lambda: all(seen.phase(name) == outcome for name, outcome in ends.items()), "the jobs of the wave have ended"
    )
    await asyncio.gather(*(delete(name) for name in ends))
    await seen.until(lambda: not seen.jobs.keys() & outcomes.keys(), "the wave is gone")
    return {
        name: Span(said[name], gone if outcome == "Deleted" else seen.reached[name, outcome])
        for name, outcome in outcomes.items()
    }


async def test_gpu_seconds_of_jobs_that_are_gone_are_counted_across_a_restart_of_the_operator(
    cluster: Cluster, start_operator: StartOperator
) -> None:
    """Two waves; the operator is replaced while the jobs of the second one run. Half of them succeed, a quarter fails,
    and a quarter is deleted before its end. Of their series, none is left; a job that stays keeps each of its own."""
    first_wave = {f"first-{number}": "Succeeded" for number in range(WAVE)}
    ways = ("Succeeded", "Failed", "Succeeded", "Deleted")
    second_wave = {f"second-{number}": ways[number % len(ways)] for number in range(WAVE)}
    metrics = [f"ddpjob_{kind}_seconds" for kind in ("gpu", "node", "held_gpu", "held_node")]
    first = await start_operator()
    async with fleet(cluster) as seen:
        series = await one_that_stays(first, cluster, seen)
        of_the_one = {metric: await counted(first, metric) for metric in metrics}
        began = await begin(cluster, seen, list(first_wave))
        over = await finish(first, cluster, seen, first_wave)
        began |= await begin(cluster, seen, list(second_wave))
        before = {metric: await counted(first, metric) for metric in metrics}
        assert await first.stop() == 0
        second = await start_operator()
        over |= await finish(second, cluster, seen, second_wave)
        total = {metric: before[metric] + await counted(second, metric) - of_the_one[metric] for metric in metrics}
        left: set[str] = set()

        async def as_before() -> bool:
            left.clear()
            left.update(await series_of_jobs(second))
            return left == series

        # the operator may hear of the last deletions later than this test
        await eventually_async(as_before, "the series of jobs are those of before", instead=lambda: left ^ series)
    account = Account()
    for name, outcome in (first_wave | second_wave).items():
        account.add(outcome, began[name], over[name])
    for metric, each in zip(metrics, (GPUS, 1, GPUS, 1), strict=True):
        by_cause, by_outcome = by(0, total[metric]), by(1, total[metric])
        assert by_outcome.keys() == ({""} if "held" in metric else {"Succeeded", "Failed", "Deleted"}), metric
        account.check(by_outcome, each, metric)
        # no trainer answers here, so that ranks seem to look for each other all the time
        assert by_cause.keys() <= {"rendezvous", "pulling"}, metric
        assert by_cause["rendezvous"] >= 0.99 * by_cause.total(), metric
    # two ways to count the same seconds
    of_jobs, held = by(1, total[metrics[0]]), total[metrics[2]].total()
    assert held == pytest.approx(of_jobs.total(), rel=0.01)
