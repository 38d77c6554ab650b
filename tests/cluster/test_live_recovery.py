"""restart.scope Live on real nodes: the others train on, and spares take the places of those that are lost.

Nothing is read from a snapshot, and every loss is that of one rank which was left alone.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

from tests.cluster.history import untrue_steps
from tests.cluster.kube import describe
from tests.cluster.scenario import Scenario
from tests.cluster.test_in_place import is_ready, uid
from tests.support.waiting import CLUSTER_SECONDS, eventually

NODES = 3
STEPS = 300
HIT = 20
"""A snapshot is saved by then, which could be read."""
SECONDS = 0.3
"""Of each step until the test is done with the job."""
SLOWLY, SLOW_SECONDS = 150, 1.0
"""From which step of a process on they take longer: on a slow machine, too, replacements come before the end."""

TASK = f"""
import time
from pathlib import Path
from ddp_trainer.tasks.digits import Digits

class Paced(Digits):
    def __init__(self, paced: bool = True) -> None:
        super().__init__(width=8, dropout=0.0)
        self._is_paced, self._paced = paced, 0

    def model(self):  # in 64 bits: in 32 the order of a sum shows after hundreds of steps on some processors
        return super().model().double()

    def inputs(self, batch):
        return super().inputs(batch).double()

    def loss(self, output, batch):
        if self._is_paced and output.requires_grad:
            self._is_paced, self._paced = not Path("/mnt/shared/hurry").exists(), self._paced + 1
            time.sleep({SECONDS} if self._paced < {SLOWLY} else {SLOW_SECONDS})
        return super().loss(output, batch)
"""

HURRY = "import pathlib; pathlib.Path('/mnt/shared/hurry').touch()"


def test_spares_take_the_places_of_a_killed_rank_and_of_a_deleted_pod_and_no_snapshot_is_read(
    scenario: Scenario,
) -> None:
    scenario.kubectl.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "code"}, "data": {"paced.py": TASK}}
    )
    alone = replace(scenario, name="alone")
    train(alone, "--strategy=single", "--task-options", "paced=false", nodes=1)
    train(scenario, "--strategy=ddp", nodes=NODES, spares=1, restart={"scope": "Live"})
    await_ready(scenario, "digits-0-s0")
    scenario.wait_trained(HIT)
    survivor = uid(scenario, 0, attempt=0)

    scenario.kill_rank(1)
    await_ranks(scenario, joined=1)
    await_ready(scenario, "digits-0-s1")
    scenario.delete_pod(2)
    await_ranks(scenario, joined=2)
    scenario.kubectl.python("digits-0-0", HURRY, container="trainer")

    status = scenario.wait_phase("Succeeded")
    assert uid(scenario, 0, attempt=0) == survivor, "its ranks trained on"
    assert (status.get("attempt", 0), status["restarts"], status["liveRecoveries"]) == (0, 2, 2)
    assert status["lastFailure"]["reason"] == "PodDeleted"
    assert status["internal"]["keptPods"] == {"digits-0-s0": 1, "digits-0-s1": 2}
    assert untrue_steps(scenario.statuses) == []
    assert told(scenario) == [(1, "digits-0-s0"), (2, "digits-0-s1")]
    records = scenario.records()
    assert [one for one in records.events if one["event"] == "resumed"] == [], "a snapshot was read"
    assert len([one for one in records.events if one["event"] == "recovered"]) == 2
    found = {line["step"]: line["loss"] for line in records.losses}
    steps = sorted(found)
    assert (steps[0], steps[-1]) == (1, STEPS)
    assert len(steps) >= STEPS - 1, "more is missing than the loss that was under way when a rank was killed"
    assert all(later - earlier <= 2 for earlier, later in pairwise(steps))
    alone.wait_phase("Succeeded")
    unbroken = {line["step"]: line["loss"] for line in alone.records().losses}
    assert max(abs(loss - unbroken[step]) for step, loss in found.items()) < 1e-9


def train(scenario: Scenario, *args: str, **spec: Any) -> None:
    code = {"name": "code", "configMap": {"name": "code"}}
    mount = {"name": "trainer", "volumeMounts": [{"name": "code", "mountPath": "/opt/user"}]}
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": "/opt/user"}
    scenario.apply(
        args=["--task=paced:Paced", "--device=cpu", "--global-batch=48", f"--max-steps={STEPS}", "--epochs=100", *args],
        env=[{"name": name, "value": value} for name, value in variables.items()],
        podTemplate={"spec": {"volumes": [code], "containers": [mount]}},
        **spec,
    )


def await_ready(scenario: Scenario, pod: str) -> None:
    scenario.history.wait(lambda: is_ready(scenario.history.latest("pods", pod)), f"{pod} waits")


def await_ranks(scenario: Scenario, joined: int) -> None:
    """Until all ranks train together, and new ones have joined so often."""

    def together() -> bool:
        phase, report = scenario.status.get("phase"), scenario.report()
        assert phase not in ("Succeeded", "Failed"), f"{phase} before it could be hit; last report: {report}"
        live = (report or {}).get("live")
        return live is not None and (live["ranks"], live["recoveries"]["joined"]) == (NODES, joined)

    what = f"{NODES} ranks train, after {joined} joined"
    eventually(together, what, CLUSTER_SECONDS, lambda: describe(scenario.kubectl))


def told(scenario: Scenario) -> list[tuple[int, str]]:
    """The node ranks and the spares that events of the job name, in the order of the ranks."""
    out = scenario.kubectl.run("get", "events", "--field-selector", "reason=RecoveringLive", "-o", "json").stdout
    said = [str(event["message"]) for event in json.loads(out)["items"]]
    return sorted(
        (rank, name)
        for message in said
        for rank in range(NODES)
        for name in ("digits-0-s0", "digits-0-s1")
        if f"spare {name} takes the place of node rank {rank}" in message
    )
