"""Series of a job are there while it is, and gone with it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from ddpjob_operator.api.status import Phase
from ddpjob_operator.metrics import JobFigures, JobTable


def test_a_jobs_series_are_gone_when_it_is() -> None:
    registry, table = CollectorRegistry(), JobTable()
    registry.register(table)
    spent = {"training": 8.0, "queued": 2.0}
    table.put("key", JobFigures("team", "digits", Phase.RUNNING, 1, 1, 2, 2, goodput=0.8, disruptions=3, seconds=spent))
    page = generate_latest(registry).decode()
    labels = 'job="digits",namespace="team"'
    for line in (
        f"ddpjob_operator_job_goodput_ratio{{{labels}}} 0.8",
        f"ddpjob_operator_job_disruptions{{{labels}}} 3.0",
        f'ddpjob_operator_job_seconds{{cause="training",{labels}}} 8.0',
        'ddpjob_operator_jobs{phase="Running"} 1.0',
    ):
        assert line in page
    assert "ddpjob_operator_job_loss{" not in page, "what is not known has no series"
    table.drop("key")
    assert "digits" not in generate_latest(registry).decode()
