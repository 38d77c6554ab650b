"""What the decision makes of an edited spec: a gang is made from one spec, whatever is changed meanwhile."""

from __future__ import annotations

import pytest
from builders import (
    failed,
    in_phase,
    make_job,
    make_pod,
    seen,
)
from looks import GANG, RUNNING, SNAPSHOT, condition, created, deleted, look

from ddpjob_operator.api.status import DDPJobStatus, NodeCount, Phase
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.job import Job


def edited(status: DDPJobStatus, **spec: object) -> Job:
    return make_job(status, generation=2, **spec)


@pytest.mark.fault(17)
@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RESTARTING])
@pytest.mark.parametrize("pods", [(), (make_pod(0, "Pending"),)], ids=["no pod is there", "one pod is there"])
def test_an_incomplete_gang_is_not_completed_from_another_spec(phase: Phase, pods: tuple[object, ...]) -> None:
    decided = look(edited(in_phase(phase), nodes=3), seen(*pods))  # type: ignore[arg-type]
    after = decided.status
    assert (after.attempt, after.restarts, after.nodes.total) == (1, 0, 3)
    assert decided.status_first
    assert created(decided) == ["digits-1-0", "digits-1-1", "digits-1-2"]
    assert deleted(decided) == (["digits-0-0"] if pods else [])


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RUNNING])
def test_a_complete_gang_goes_on_as_it_was_started(phase: Phase, nodes: int) -> None:
    decided = look(edited(in_phase(phase), nodes=nodes), seen(*GANG))
    assert decided.actions == ()
    assert decided.status.phase is Phase.RUNNING
    assert decided.status.nodes == NodeCount(ready=2, total=2)
    assert condition(decided.status, cond.DEGRADED) == ("True", "SpecChanged")


@pytest.mark.fault(17)
def test_the_next_attempt_uses_the_new_spec_throughout() -> None:
    decided = look(
        edited(RUNNING.model_copy(update={"snapshot": SNAPSHOT}), nodes=3), seen(make_pod(0), failed(1, 137))
    )
    assert created(decided) == ["digits-1-0", "digits-1-1", "digits-1-2"]
    assert condition(decided.status, cond.DEGRADED) is None
    assert look(edited(decided.status, nodes=3), seen(attempt=1)).status.phase is Phase.RESTARTING


def test_an_edit_that_is_taken_back_leaves_nothing_behind() -> None:
    degraded = look(edited(RUNNING, args=["--x"]), seen(*GANG)).status
    after = look(make_job(degraded, generation=3), seen(*GANG)).status
    assert condition(after, cond.DEGRADED) == ("False", "AsExpected")
    assert after.observed_generation == 3


def test_what_may_change_while_running_disturbs_nothing() -> None:
    job = edited(RUNNING, restart={"maxRestarts": 99}, snapshots={"every": "5steps"})
    decided = look(job, seen(*GANG))
    assert decided.actions == ()
    assert decided.status.conditions == ()
    assert decided.status.observed_generation == 2
