"""The account of a job: its ledger, weighted with the size of its gangs."""

from __future__ import annotations

from ddpjob_operator.api.status import DDPJobStatus, Goodput, NodeCount
from ddpjob_operator.core.ledger.goodput import seconds_of
from ddpjob_operator.core.ledger.usage import HELD, with_usage


def status(nodes: int, **seconds: float) -> DDPJobStatus:
    return DDPJobStatus(nodes=NodeCount(total=nodes), goodput=Goodput(**seconds))


def account(*statuses: DDPJobStatus) -> tuple[dict[str, float], dict[str, float]]:
    """Of nodes and of GPUs, four a node, after writes of these statuses."""
    last = DDPJobStatus()
    for each in statuses:
        after = each.model_copy(update={"internal": last.internal})  # a plan begins with what is on record
        last = with_usage(last, after, 4)
    return last.internal.node_seconds, last.internal.gpu_seconds


def test_of_a_gang_of_one_size_the_account_is_the_ledger_times_its_size() -> None:
    last = status(3, queued=9.0, pulling=1.5, training=40.0, recovering=25.0, suspended=7.0)
    nodes, gpus = account(status(3, queued=9.0), status(3, queued=9.0, pulling=1.5, training=60.0), last)
    ledger = {name: spent for name, spent in seconds_of(last.goodput or Goodput()).items() if spent and name in HELD}
    assert nodes == {name: spent * 3 for name, spent in ledger.items()}
    assert gpus == {name: spent * 12 for name, spent in ledger.items()}


def test_a_gang_that_shrinks_holds_fewer_nodes_from_then_on() -> None:
    nodes, _ = account(status(4, training=20.0), status(2, training=22.0), status(2, training=25.0))
    assert nodes == {"training": 22.0 * 4 + 3.0 * 2}, (
        "the write that shrinks it has the last seconds of the larger gang"
    )


def test_no_cause_goes_below_zero_where_a_larger_gang_loses_the_training_of_a_smaller_one() -> None:
    nodes, _ = account(status(1, training=10.0), status(4, training=10.0), status(4, recovering=12.0))
    assert nodes == {"recovering": 10.0 + 2.0 * 4}


def test_the_account_of_a_status_without_one_begins_with_its_ledger() -> None:
    before = status(2, queued=5.0, training=30.0)  # by an operator that kept no accounts
    assert with_usage(before, status(2, queued=5.0, training=31.0), 0).internal.node_seconds == {"training": 62.0}


def test_a_status_without_an_account_is_not_written_for_the_sake_of_one() -> None:
    before = status(2, training=30.0)
    assert with_usage(before, before, 8) == before


def test_a_job_without_gpus_has_no_account_of_them() -> None:
    assert with_usage(DDPJobStatus(), status(2, training=1.0), 0).internal.gpu_seconds == {}
