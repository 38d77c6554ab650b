"""Which pods are kept for the next attempt, and as which node rank."""

from __future__ import annotations

from collections.abc import ItemsView
from dataclasses import replace
from random import Random

import pytest
from builders import NOW, ended, failed, in_phase, later, make_job, make_pod, make_report
from hypothesis import given
from hypothesis import strategies as st

from ddpjob_operator.api.status import DDPJobStatus, Internal, NodeCount, Phase
from ddpjob_operator.core.gang.in_place import assign
from ddpjob_operator.core.gang.members import can_be_kept, ended_before, left_over
from ddpjob_operator.core.values.job import Defaults
from ddpjob_operator.core.values.look import Look
from ddpjob_operator.core.values.observed import Observed, PodPhase, PodView


def spare(index: int) -> PodView:
    return PodView(f"digits-0-s{index}", f"spare-{index}", 0, None, PodPhase.RUNNING)


@pytest.mark.parametrize(
    ("survivors", "spares", "size", "kept"),
    [
        pytest.param([0, 2], [], 3, {"digits-0-0": 0, "digits-0-2": 2}, id="each keeps its rank"),
        pytest.param([1], [], 2, {"digits-0-1": 1}, id="the loss of node rank 0 moves nobody"),
        pytest.param([1, 2], [], 2, {"digits-0-1": 1, "digits-0-2": 0}, id="a smaller gang: the last takes the gap"),
        pytest.param([0, 1, 2], [], 2, {"digits-0-0": 0, "digits-0-1": 1}, id="a smaller gang has no place for all"),
        pytest.param([0, 1], [], 4, {"digits-0-0": 0, "digits-0-1": 1}, id="a larger gang"),
        pytest.param([1], [1, 0], 2, {"digits-0-1": 1, "digits-0-s0": 0}, id="a spare takes the lost place"),
        pytest.param([2], [0], 2, {"digits-0-2": 0, "digits-0-s0": 1}, id="survivors before spares"),
        pytest.param([], [], 2, {}, id="nobody is left"),
    ],
)
def test_ranks_go_to_those_who_had_them_then_to_whoever_waits(
    survivors: list[int], spares: list[int], size: int, kept: dict[str, int]
) -> None:
    assert assign([make_pod(rank) for rank in survivors], [spare(index) for index in spares], size) == kept


@given(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)), st.integers(1, 8), st.randoms())
def test_no_rank_is_given_twice_and_none_is_left_free_while_somebody_waits(
    survivors: set[int], spares: set[int], size: int, order: Random
) -> None:
    pods, waiting = [make_pod(rank) for rank in survivors], [spare(index) for index in spares]
    order.shuffle(pods)
    order.shuffle(waiting)
    kept = assign(pods, waiting, size)
    assert len(set(kept.values())) == len(kept) == min(size, len(survivors) + len(spares))
    assert set(kept.values()) <= set(range(size))
    assert kept == assign(reversed(pods), reversed(waiting), size), "whatever the order they are seen in"


@pytest.mark.parametrize(
    ("pod", "lives_on"),
    [
        pytest.param(make_pod(), True, id="runs"),
        pytest.param(make_pod(phase="Pending", scheduled=True), True, id="is about to run"),
        pytest.param(make_pod(phase="Pending"), False, id="waits for a node"),
        pytest.param(make_pod(deleting=True), False, id="is being deleted"),
        pytest.param(make_pod(termination=ended(0)), False, id="its trainer is done, a sidecar goes on"),
        pytest.param(failed(0, 1), False, id="has failed"),
        pytest.param(make_pod(phase="Succeeded"), False, id="has succeeded"),
        pytest.param(make_pod(phase="Unknown"), False, id="is out of reach"),
    ],
)
def test_only_a_pod_that_nobody_wants_gone_lives_on(pod: PodView, lives_on: bool) -> None:
    assert can_be_kept(pod) is lives_on


KEPT: DDPJobStatus = in_phase(Phase.RUNNING, attempt=3, attempt_start_time=later(-30), kept_pods={"digits-3-0": 0})


@pytest.mark.parametrize(
    ("name", "termination", "before"),
    [
        pytest.param("digits-3-0", ended(1, make_report(attempt=2), ago=1), True, id="its last words are of old"),
        pytest.param("digits-3-0", ended(1, make_report(attempt=3), ago=60), False, id="its last words are of now"),
        pytest.param("digits-3-0", ended(137, ago=31), True, id="without a word, before the attempt was decided on"),
        pytest.param("digits-3-0", ended(137, ago=29), False, id="without a word, since then"),
        pytest.param("digits-3-0", ended(137, ago=None), False, id="nobody knows when"),
        pytest.param("digits-3-0", None, False, id="it runs"),
        pytest.param("digits-3-1", ended(1, make_report(attempt=2), ago=1), False, id="a new pod that lies"),
    ],
)
def test_the_end_of_a_kept_pod_belongs_to_the_attempt_that_it_knew_of(
    name: str, termination: object, before: bool
) -> None:
    pod = replace(make_pod(attempt=3, termination=termination), name=name)
    assert ended_before(pod, KEPT) is before


class Counted(dict[str, int]):
    """Counts how often it is gone through."""

    asked = 0

    def items(self) -> ItemsView[str, int]:
        self.asked += 1
        return super().items()


def test_the_kept_pods_are_gone_through_once_and_not_for_each_rank() -> None:
    kept = Counted({f"digits-0-{rank}": rank for rank in range(64)})
    internal = Internal().model_copy(update={"kept_pods": kept, "spec_digests": {}})
    status = DDPJobStatus(phase=Phase.RUNNING, attempt=1, nodes=NodeCount(total=64), internal=internal)
    pods = [replace(make_pod(rank), name=f"digits-0-{rank}", attempt=1) for rank in range(64)]
    job = replace(make_job(nodes=64), status=status)
    look = Look(job, Observed(pods=tuple(pods)), NOW, Defaults(), status)
    assert left_over(look) == ()
    assert kept.asked == 1
