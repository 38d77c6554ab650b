"""What a job owns on this machine, as far as no process is needed to tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from ddpjob_operator.core.manifests.admitted import Admitted
from ddpjob_operator.core.manifests.pods import build_service
from ddpjob_operator.core.values.actions import (
    AssignPod,
    CreateChild,
    CreatePod,
    CreatePVC,
    CreateService,
    DeleteJob,
    DeletePod,
    PointService,
    ReadLog,
)
from ddpjob_operator.core.values.job import Defaults
from ddpjob_operator.core.values.trainer_report import TrainerReport
from ddpjob_operator.local.children import Children
from ddpjob_operator.local.environment import Endpoints, Machine
from ddpjob_operator.local.machine import seats
from ddpjob_operator.local.network import LOOPBACK
from ddpjob_operator.local.processes import LocalPod
from ddpjob_operator.local.record import PodPlace
from ddpjob_operator.local.volume import pod_log
from ddpjob_operator.wire.jobs import parse_job


def children_of(shared: Path, **spec: Any) -> Children:
    job = parse_job({"metadata": {"name": "digits", "uid": "u-1"}, "spec": {"nodes": 2, **spec}})
    return Children(job, Machine(host="laptop", shared=shared, environ={}, cores=2), changed=lambda: None)


@pytest.mark.parametrize(
    ("spec", "same"),
    [({}, False), ({"restart": {"scope": "InPlace"}}, True), ({"elastic": {"minNodes": 1}}, True)],
    ids=["every pod is replaced", "in place", "elastic"],
)
async def test_pods_that_outlive_an_attempt_find_the_next_at_the_port_that_they_know(
    tmp_path: Path, spec: dict[str, Any], same: bool
) -> None:
    children = children_of(tmp_path, **spec)
    job = parse_job({"metadata": {"name": "digits", "uid": "u-1"}, "spec": {}})
    assert await children.carry_out(CreateService(build_service(Admitted(job, Defaults()), 0)))
    before = children.observed(0).service
    assert await children.carry_out(PointService("digits-rdzv", 1, {}))
    after = children.observed(1).service
    assert before is not None
    assert after is not None
    assert (before.attempt, after.attempt) == (0, 1)
    assert (before.port == after.port) == same


async def test_what_only_a_cluster_enforces_is_asked_for_once(tmp_path: Path) -> None:
    children = children_of(tmp_path)
    assert await children.carry_out(CreateChild({"kind": "NetworkPolicy", "metadata": {"name": "digits"}}))
    assert children.observed(0).children == {("NetworkPolicy", "digits")}


async def test_a_job_that_is_a_file_is_not_deleted_and_not_looked_at_again_for_that(tmp_path: Path) -> None:
    assert not await children_of(tmp_path).carry_out(DeleteJob("u-1"))


async def test_a_log_is_read_from_the_shared_folder(tmp_path: Path) -> None:
    children = children_of(tmp_path)
    log = pod_log(tmp_path, "digits", "digits-0-1")
    log.parent.mkdir(parents=True)
    log.write_text("---- digits-0-1 (u-9) starts\nKilled\n")
    assert await children.carry_out(ReadLog("digits-0-1", "u-9"))
    assert await children.carry_out(ReadLog("digits-0-0", "u-8"))
    assert children.observed(0).logs == {"u-9": "Killed", "u-8": ""}


async def test_a_pod_that_is_gone_is_neither_told_anything_nor_deleted_again(tmp_path: Path) -> None:
    children = children_of(tmp_path)
    for action in (CreatePVC({}), AssignPod("digits-0-0", "u-9", 1, 0, 2), DeletePod("digits-0-0", "u-9", 2)):
        await children.carry_out(action)
    assert children.observed(1).pods == ()
    assert children.observed(1).pvc_exists


def with_pod(children: Children, scratch: Path, **more: Any) -> LocalPod:
    """One of node rank 1."""
    pod = LocalPod(
        "digits-0-1",
        "u-1",
        attempt=0,
        node_rank=1,
        host=LOOPBACK,
        endpoints=Endpoints(1, 2, scratch / "scratch"),
        log=scratch / "log",
        grace_seconds=1.0,
        changed=lambda: None,
        **more,
    )
    children._pods[pod.name] = pod
    return pod


async def test_every_place_of_a_pod_is_remembered(tmp_path: Path) -> None:
    """Its log goes on under the name that it has from its first."""
    children = children_of(tmp_path)
    pod = with_pod(children, tmp_path)
    pod.endpoints.assignment_dir.mkdir(parents=True)
    for attempt, node_rank in ((0, 1), (1, 1), (2, 0), (1, 0)):
        await children.carry_out(AssignPod(pod.name, pod.uid, attempt, node_rank, 2))
    del children._pods[pod.name]
    assert children.places == tuple(PodPlace("digits-0-1", *place) for place in ((0, 1), (2, 0), (1, 0)))


async def test_a_pod_that_is_made_has_its_place_at_once_but_a_spare_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(*_: object) -> None:
        pass

    monkeypatch.setattr("ddpjob_operator.local.children.build_command", lambda *_, **__: None)
    monkeypatch.setattr(LocalPod, "start", start)
    children = children_of(tmp_path)
    manifest = {"metadata": {"labels": {}}, "spec": {"terminationGracePeriodSeconds": 1, "containers": []}}
    for name, node_rank in (("digits-0-1", 1), ("digits-0-s0", None)):
        await children.carry_out(CreatePod(name, 0, node_rank, manifest))
    assert children.places == (PodPlace("digits-0-1", 0, 1),)


async def test_a_pod_that_ends_at_the_moment_at_which_it_is_deleted_stops_no_run(tmp_path: Path) -> None:
    """asyncio drops a process before it wakes what waits for its end."""

    class Ended:
        def send_signal(self, number: int) -> None:
            raise ProcessLookupError

    children = children_of(tmp_path)
    pod = with_pod(children, tmp_path, _process=cast("Any", Ended()))
    assert await children.carry_out(DeletePod("digits-0-1", "u-1", 2))
    assert pod.deleting
    pod.failed_to_start("ended")
    children.forget_deleted()
    assert children.pods == ()


@pytest.mark.parametrize(("scope", "step", "step_of_new"), [("Live", 40, 40), ("Gang", 28, None)])
def test_with_live_recovery_another_pod_reports_until_a_new_node_rank_0_trains(
    tmp_path: Path, scope: str, step: int, step_of_new: int | None
) -> None:
    children = children_of(tmp_path, restart={"scope": scope})
    for node_rank, at in ((0, 28), (1, 40)):
        pod = LocalPod(
            f"digits-0-{node_rank}",
            f"u-{node_rank}",
            attempt=0,
            node_rank=node_rank,
            host=LOOPBACK,
            endpoints=Endpoints(1, 2, tmp_path),
            log=tmp_path / "log",
            grace_seconds=1.0,
            changed=lambda: None,
        )
        pod.report = TrainerReport(attempt=0, step=at)
        children._pods[pod.name] = pod
    reported = children.observed(0).report
    assert reported is not None
    assert reported.step == 28
    lost = children._pods["digits-0-0"]
    new = replace(lost, uid="u-2", report=TrainerReport(attempt=0))
    lost.failed_to_start("killed")
    reported = children.observed(0).report
    assert reported is not None
    assert reported.step == step
    children._pods["digits-0-0"] = new
    reported = children.observed(0).report
    assert reported is not None
    assert reported.step == step_of_new


def test_a_spare_needs_gpus_of_its_own() -> None:
    spec = {"nodes": 2, "spares": 1, "restart": {"scope": "InPlace"}}
    assert seats(parse_job({"metadata": {"name": "digits"}, "spec": spec}).spec) == 3
