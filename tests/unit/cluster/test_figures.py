"""What /metrics shows of a job."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.cluster.cache import Key
from ddpjob_operator.cluster.figures import figures
from ddpjob_operator.metrics import JobFigures
from ddpjob_operator.wire.jobs import parse_job

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
KEY = Key("team", "digits")


def of(spec: dict[str, Any], status: dict[str, Any]) -> JobFigures:
    metadata = {"name": "digits", "namespace": "team", "uid": "u", "creationTimestamp": "2026-01-01T12:00:00Z"}
    job = parse_job({"metadata": metadata, "spec": spec, "status": status})
    return figures(KEY, job, job.status, "trainer:default")


def test_a_new_job_shows_what_it_asks_for() -> None:
    found = of({"nodes": 2, "resources": {"limits": {"nvidia.com/gpu": 8}}}, {})
    assert (found.phase, found.nodes, found.gpus, found.image, found.queue) == (
        Phase.PENDING, 2, 16, "trainer:default", "",
    )  # fmt: skip
    assert (found.created, found.started, found.completed, found.eta) == (NOON, None, None, None)


def test_a_smaller_gang_of_an_elastic_job_has_fewer_gpus() -> None:
    spec = {"nodes": 4, "elastic": {"minNodes": 1}, "resources": {"limits": {"amd.com/gpu": 2}}}
    assert of(spec, {"phase": "Running", "nodes": {"ready": 3, "total": 3}}).gpus == 6


def test_image_and_queue_are_those_of_the_spec() -> None:
    found = of({"nodes": 1, "image": "mine:2", "scheduling": {"gang": "Kueue", "queue": "research"}}, {})
    assert (found.image, found.queue) == ("mine:2", "research")


@pytest.mark.parametrize(("phase", "shown"), [("Running", NOON), ("Restarting", None), ("Succeeded", None)])
def test_an_end_is_expected_only_of_a_job_that_runs(phase: str, shown: datetime | None) -> None:
    assert of({"nodes": 1}, {"phase": phase, "progress": {"step": 3, "eta": "2026-01-01T12:00:00Z"}}).eta == shown


def test_only_conditions_that_need_attention_are_shown_and_only_while_they_are_true() -> None:
    def condition(name: str, status: str) -> dict[str, Any]:
        return {"type": name, "status": status, "reason": "Because", "lastTransitionTime": "2026-01-01T12:00:00Z"}

    conditions = [condition("Degraded", "True"), condition("Running", "True"), condition("SnapshotsFailing", "False")]
    assert of({"nodes": 1}, {"conditions": conditions}).conditions == {"Degraded": "Because"}


def test_a_job_whose_spec_cannot_be_read_shows_its_status() -> None:
    found = figures(KEY, None, DDPJobStatus(phase=Phase.FAILED, restarts=2), "trainer:default")
    assert (found.phase, found.restarts, found.nodes, found.gpus, found.image) == (Phase.FAILED, 2, 0, 0, "")
