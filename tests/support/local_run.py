"""A job as `ddpjob run` runs it, in this process: from its spec to its outcome."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpjob_operator.core.values.job import Job
from ddpjob_operator.local.chaos import parse_chaos
from ddpjob_operator.local.display import Display, PlainDisplay
from ddpjob_operator.local.machine import this_machine
from ddpjob_operator.local.runner import Outcome, Runner
from ddpjob_operator.wire.jobs import parse_job

ROOT = Path(__file__).parents[2]
PACKAGES = (ROOT / "operator", ROOT / "trainer_image")


def environment(imported_from: Iterable[Path] = PACKAGES) -> dict[str, str]:
    """The environment of a shell in which both packages are installed."""
    path = os.pathsep.join(map(str, imported_from))
    return dict(os.environ) | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def job_object(name: str, spec: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    """A DDPJob as in the file that a person writes."""
    return {
        "apiVersion": "training.ddpjob.io/v1alpha1",
        "kind": "DDPJob",
        "metadata": {"name": name, **metadata},
        "spec": spec,
    }


def new_job(name: str, spec: dict[str, Any], **metadata: Any) -> Job:
    """The same job as an API server would return it."""
    assigned = {"uid": f"uid-{name}", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return parse_job(job_object(name, spec, **assigned, **metadata))


async def run(
    job: Job,
    shared: Path,
    display: Display | None = None,
    *,
    chaos: str | None = None,
    environ: dict[str, str] | None = None,
) -> Outcome:
    """Run a job with `shared` as its volume until nothing of it is left."""
    fault = parse_chaos(chaos, ranks=job.ranks) if chaos else None
    machine = replace(this_machine(shared), environ=environ or environment())
    return await Runner(job, machine, display or PlainDisplay(), fault).run()
