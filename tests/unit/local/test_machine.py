"""A job as a run on this machine takes it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ddpjob_operator.api.spec import DDPJobSpec
from ddpjob_operator.api.status import DDPJobStatus
from ddpjob_operator.core.model import Job
from ddpjob_operator.local.machine import as_run_here, different_here, this_machine


def job(**spec: Any) -> Job:
    created = datetime(2026, 1, 2, tzinfo=UTC)
    return Job("digits", "default", "uid", 1, created, DDPJobSpec.model_validate(spec), DDPJobStatus())


def test_a_run_on_this_machine_is_neither_suspended_nor_deleted_after_its_end() -> None:
    spec = as_run_here(job(suspend=True, ttlSecondsAfterFinished=0, nodes=2)).spec
    assert (spec.suspend, spec.ttl_seconds_after_finished, spec.nodes) == (False, None, 2)


@pytest.mark.parametrize("suspend", [True, False])
def test_whoever_runs_a_suspended_job_is_told_that_it_runs_all_the_same(suspend: bool, tmp_path: Path) -> None:
    notes = different_here(job(suspend=suspend), this_machine(tmp_path))
    assert any("spec.suspend" in note for note in notes) is suspend
