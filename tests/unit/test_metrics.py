"""The operator's /metrics: every row of the table, valid OpenMetrics, and no series of a deleted job."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from datetime import UTC, datetime, timedelta

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as parse_text

from ddpjob_operator import metrics
from ddpjob_operator.api.status import Phase
from ddpjob_operator.core.ledger.goodput import ACTIVITIES
from ddpjob_operator.metric_table import JOBS, MOST_SERIES, OPERATOR, TABLE
from ddpjob_operator.metrics import JobFigures

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
KNOWN = JobFigures(
    "team", "digits", Phase.RUNNING, attempt=4, restarts=6, nodes_ready=1, nodes=2, step=7, total_steps=10, loss=0.5,
    samples_per_second=9.5, snapshot_step=5, snapshot_time=NOON + timedelta(seconds=3), created=NOON,
    started=NOON + timedelta(seconds=1), completed=NOON + timedelta(seconds=4), eta=NOON + timedelta(seconds=5),
    gpus=16, image="trainer:1", claim="digits-shared", code="0123456789ab", queue="research", owner="ada",
    conditions={"Degraded": "Unschedulable"}, disruptions=3, live_recoveries=8, goodput=0.8, recomputed_steps=12,
    seconds={"training": 8.0, "queued": 2.0},
)  # fmt: skip
"""All of it, and no two numbers alike."""


@pytest.fixture(autouse=True)
def _no_jobs_left() -> None:
    metrics.JOBS.clear()


def page(accept: str = "") -> str:
    return asyncio.run(metrics.page(accept))[0].decode()


def touch_every_metric() -> None:
    """A metric with labels has no series before its first use."""
    for row in OPERATOR:
        for attribute in vars(metrics).values():
            if getattr(attribute, "_name", None) == row.name.removesuffix("_total") and row.labels:
                attribute.labels(*("x" for _ in row.labels))


def test_the_page_is_strict_openmetrics_with_every_row_of_the_table_and_no_other() -> None:
    touch_every_metric()
    metrics.JOBS.put("key", KNOWN)
    body, content_type = asyncio.run(metrics.page(OPEN_METRICS))
    families = list(text_string_to_metric_families(body.decode()))
    metrics.JOBS.drop("key")
    assert content_type.startswith("application/openmetrics-text")
    found = {family.name: family for family in families if family.name.startswith("ddpjob")}
    assert set(found) == {re.sub("_(total|info)$", "", name) for name in TABLE}
    for name, row in TABLE.items():
        family = found[re.sub("_(total|info)$", "", name)]
        assert (family.type, family.documentation) == (row.type, row.help)
        assert {frozenset(sample.labels) - {"le"} for sample in family.samples} == {frozenset(row.labels)}, name


def test_no_metric_has_a_label_that_prometheus_sets_itself() -> None:
    assert [row.name for row in TABLE.values() if {"job", "instance", "pod"} & set(row.labels)] == []


def test_names_follow_the_conventions() -> None:
    for row in TABLE.values():
        assert row.name.endswith("_total") == (row.type == "counter"), row.name
        assert row.unit in row.name, "the unit is part of the name"
        assert row.help.endswith("."), row.name
    assert len(TABLE) == len(OPERATOR) + len(JOBS), "every name is unique"


def test_without_openmetrics_the_page_is_prometheus_text() -> None:
    body, content_type = asyncio.run(metrics.page("text/html"))
    assert content_type.startswith("text/plain; version=0.0.4")
    assert "ddpjob_operator_jobs" in {family.name for family in parse_text(body.decode())}


def test_each_series_of_a_job_has_its_own_figure() -> None:
    metrics.JOBS.put("key", KNOWN)
    job = {"namespace": "team", "ddpjob": "digits"}
    samples = [
        sample for family in parse_text(page()) for sample in family.samples if job.items() <= sample.labels.items()
    ]
    noon = NOON.timestamp()
    assert {sample.name: sample.value for sample in samples if sample.labels == job} == {
        "ddpjob_status_creation_timestamp_seconds": noon,
        "ddpjob_status_start_timestamp_seconds": noon + 1,
        "ddpjob_status_snapshot_timestamp_seconds": noon + 3,
        "ddpjob_status_completion_timestamp_seconds": noon + 4,
        "ddpjob_status_eta_timestamp_seconds": noon + 5,
        "ddpjob_status_attempt": 4,
        "ddpjob_status_restarts_total": 6,
        "ddpjob_status_live_recoveries_total": 8,
        "ddpjob_status_disruptions_total": 3,
        "ddpjob_status_recomputed_steps_total": 12,
        "ddpjob_status_nodes": 2,
        "ddpjob_status_nodes_ready": 1,
        "ddpjob_status_gpus": 16,
        "ddpjob_status_step": 7,
        "ddpjob_status_total_steps": 10,
        "ddpjob_status_loss": 0.5,
        "ddpjob_status_samples_per_second": 9.5,
        "ddpjob_status_snapshot_step": 5,
        "ddpjob_status_goodput_ratio": 0.8,
    }
    labelled = [(one.name, {**one.labels} | {"": one.value}) for one in samples if one.labels != job]
    assert [(name, {key: value for key, value in found.items() if key not in job}) for name, found in labelled] == [
        (
            "ddpjob_info",
            {
                "claim": "digits-shared", "code": "0123456789ab", "image": "trainer:1", "owner": "ada",
                "queue": "research", "": 1,
            },
        ),
        ("ddpjob_status_phase", {"phase": "Running", "": 1}),
        ("ddpjob_status_condition", {"condition": "Degraded", "reason": "Unschedulable", "": 1}),
        ("ddpjob_status_activity_seconds", {"activity": "training", "": 8}),
        ("ddpjob_status_activity_seconds", {"activity": "queued", "": 2}),
    ]  # fmt: skip


def test_the_series_of_a_job_disappear_with_it() -> None:
    metrics.JOBS.put("key", KNOWN)
    labels = 'ddpjob="digits",namespace="team"'
    for line in (
        f"ddpjob_status_goodput_ratio{{{labels}}} 0.8",
        f"ddpjob_status_disruptions_total{{{labels}}} 3.0",
        f'ddpjob_status_activity_seconds{{activity="training",{labels}}} 8.0',
        'ddpjob_operator_jobs{phase="Running"} 1.0',
    ):
        assert line in page()
    metrics.JOBS.drop("key")
    assert "digits" not in page()


def test_a_job_has_at_most_thirty_series_whatever_is_known_of_it() -> None:
    conditions = dict.fromkeys(("Degraded", "SnapshotsFailing", "LossNotFinite", "ShutdownTooShort"), "Reason")
    seconds = {activity: float(number) for number, activity in enumerate(ACTIVITIES)}
    metrics.JOBS.put("key", dataclasses.replace(KNOWN, conditions=conditions, seconds=seconds))
    series = [line for line in page().splitlines() if 'ddpjob="digits"' in line]
    assert len(series) == MOST_SERIES == 30
    assert sum("ddpjob_status_condition{" in line for line in series) == 4
    shown = [line for line in series if line.startswith("ddpjob_status_activity_seconds")]
    assert not any('"queued"' in line for line in shown), "the activity with the fewest seconds"
    assert any('"unknown"' in line for line in shown)


def test_an_unknown_value_has_no_series() -> None:
    metrics.JOBS.put("key", JobFigures("team", "digits", Phase.PENDING, 0, 0, 0, 2))
    shown = page()
    metrics.JOBS.drop("key")
    assert "ddpjob_status_loss{" not in shown
    assert 'ddpjob_status_nodes{ddpjob="digits",namespace="team"} 2.0' in shown


async def test_others_go_on_while_the_page_is_written() -> None:
    for number in range(1000):
        metrics.JOBS.put(number, KNOWN)
    written, turns = asyncio.create_task(metrics.page("")), 0
    while not written.done():
        turns += 1
        await asyncio.sleep(0)
    lines = written.result()[0].count(b"\n")
    assert lines > 15_000
    assert turns >= lines / 2000


def test_a_reason_that_is_no_word_is_shown_as_other() -> None:
    metrics.JOBS.put("key", dataclasses.replace(KNOWN, conditions={"Degraded": "Not a word"}))
    assert 'ddpjob_status_condition{condition="Degraded",ddpjob="digits",namespace="team",reason="Other"}' in page()


def test_reasons_that_a_job_makes_up_take_no_place_from_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_REASONS", set())
    made_up = {metrics.bounded(f"Evil{number}") for number in range(200)}
    assert len(made_up) == 65, "64 and Other"
    assert [metrics.bounded(reason) for reason in ("OOMKilled", "NodeLost", "Evil199")] == [
        "OOMKilled", "NodeLost", "Other"
    ]  # fmt: skip


def test_labels_are_escaped() -> None:
    metrics.JOBS.put("key", JobFigures('a"b', "c\\d\ne", Phase.PENDING, 0, 0, 0, 2))
    (family,) = [found for found in parse_text(page()) if found.name == "ddpjob_status_nodes"]
    assert family.samples[0].labels == {"namespace": 'a"b', "ddpjob": "c\\d\ne"}
