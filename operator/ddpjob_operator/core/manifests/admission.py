"""Whether a job is within the administrator's bounds: the only place that admits one.

A new job beyond a bound is refused; one that was created suspended, when it resumes. One that has pods already is never
stopped by a bound that came later; but an edit takes no job beyond one. So a job is admitted unchecked as long as its
spec is the one on record for its attempt.
"""

from __future__ import annotations

from ddpjob_operator.api.status import Phase
from ddpjob_operator.core.manifests.admitted import Admitted, Refused
from ddpjob_operator.core.manifests.bounds import bound_violations
from ddpjob_operator.core.manifests.initializer import build_initializer
from ddpjob_operator.core.manifests.network_policy import isolation_problems
from ddpjob_operator.core.manifests.pod_environment import Place
from ddpjob_operator.core.manifests.pods import build_pod
from ddpjob_operator.core.manifests.spec_changes import edited_fields
from ddpjob_operator.core.values.job import Defaults, Job
from ddpjob_operator.core.values.look import Look
from ddpjob_operator.core.values.observed import ServiceView


def admit(job: Job, defaults: Defaults) -> Admitted | Refused:
    """Check a job against the bounds, by the pods that would be made for it."""
    candidate = Admitted(job, defaults)
    pods = [build_pod(candidate, Place(0, 0, ServiceView(host="", attempt=0)))]
    if job.spec.initializers:
        pods.append(build_initializer(candidate, 0))
    problems = (*bound_violations(job, tuple(pods), defaults.bounds), *isolation_problems(job, defaults.network))
    return Refused(problems) if problems else candidate


def admission(look: Look) -> Admitted | Refused:
    """Admit the job of a look: unchecked where it is what its attempt was made from."""
    job, status = look.job, look.status
    on_record = status.phase not in (None, Phase.PENDING) and bool(status.internal.spec_digests)
    if on_record and not edited_fields(job, status):
        return Admitted(job, look.defaults)
    return admit(job, look.defaults)
