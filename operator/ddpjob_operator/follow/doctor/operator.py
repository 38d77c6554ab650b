"""Whether DDPJobs are served, an operator acts on them, and the caller may submit one."""

from __future__ import annotations

from datetime import datetime, timedelta

from ddpjob_operator.api import API_VERSION
from ddpjob_operator.api.spec import CONTROLLER_NAME
from ddpjob_operator.core.ledger.summary import duration
from ddpjob_operator.follow.doctor.facts import Facts, Right, Unread
from ddpjob_operator.follow.doctor.findings import Finding, Level, ok, problem, unknown, warning
from ddpjob_operator.shards import Shard, shard_lease
from ddpjob_operator.tenancy import OF_THE_CLUSTER
from ddpjob_operator.wire.objects import Object, parse_time

OPERATOR_LABEL = "app.kubernetes.io/name=ddpjob-operator"
"""Of its Deployments, however it was installed; of the dashboard's too (`is_operator`)."""
LEASE = "ddpjob-operator"
"""Its name where nothing else is set."""
_LEASE_LATE = timedelta(seconds=60)
"""It is renewed every 2 s, by a clock that may differ."""
_JOB_LATE = timedelta(seconds=60)
"""An operator writes a status within a second."""

_DDPJOBS = "training.ddpjob.io"
NEEDED = (
    Right("create", _DDPJOBS, "ddpjobs"),
    Right("get", _DDPJOBS, "ddpjobs"),
    Right("create", "", "configmaps"),
    Right("get", "", "configmaps"),
    Right("patch", "", "configmaps"),
)
"""Without one of them `ddpjob submit` sends nothing."""
USEFUL = (
    Right("delete", _DDPJOBS, "ddpjobs"),
    Right("list", _DDPJOBS, "ddpjobs"),
    Right("patch", _DDPJOBS, "ddpjobs"),
    Right("delete", "", "configmaps"),  # who may not delete code may not change its owners on OpenShift
    Right("list", "", "pods"),
    Right("list", "", "events"),
    Right("get", "", "pods", "log"),
)
"""For following and changing a job. Both together are the role `ddpjob-operator-submit` of the chart."""


def api(facts: Facts) -> Finding:
    """Whether the CRD is there, in the version of this command."""
    wanted = API_VERSION.partition("/")[2]
    if not facts.versions:
        return problem("api", "the cluster has no DDPJobs: the CRD is not installed", "install the operator (README)")
    if wanted not in facts.versions:
        served = ", ".join(facts.versions)
        return problem(
            "api", f"{_DDPJOBS}/{served} is served, not {wanted}", "use the ddpjob of the operator's version"
        )
    return ok("api", f"{API_VERSION} is served")


def operator(facts: Facts) -> Finding:
    """Whether an operator runs, and serves the namespace."""
    check, now = "operator", facts.server_time or facts.local_time
    if facts.namespace in OF_THE_CLUSTER:
        return problem(check, f"jobs in {facts.namespace} are never served", "name another namespace with -n")
    if job := _left_alone(facts, now):
        return problem(
            check,
            f"the job {job} has no status: no operator has acted on it",
            "start the operator; its chart value watch.namespaces lists the namespaces that it serves",
        )
    lease = _newest(facts.leases)
    if isinstance(facts.deployments, Unread):
        return unknown(check, facts.deployments) if lease is None else _by_lease(lease, now)
    if not facts.deployments:
        if lease is not None:
            return _by_lease(lease, now)
        return problem(check, "no operator is installed", "helm install it, as the README says")
    serving = [item for item in facts.deployments if serves(item, facts.namespace)]
    if not serving:
        names = ", ".join(map(_name, facts.deployments))
        return problem(
            check,
            f"{names} does not serve the namespace {facts.namespace}",
            "add it to the chart value watch.namespaces, or name another namespace with -n",
        )
    running = [item for item in serving if (item.get("status") or {}).get("availableReplicas")]
    if len({(item["metadata"]["namespace"], lease_name(item)) for item in running}) > 1:  # each Lease has its leader
        return problem(
            check,
            f"{' and '.join(map(_name, running))} both serve {facts.namespace}: each may undo what the other does",
            "have one of them name its own namespaces in the chart value watch.namespaces, or uninstall it",
        )
    available = next(iter(running), None)
    if available is None:
        return problem(
            check,
            f"no replica of {_name(serving[0])} is available: {_unavailable(serving[0])}",
            f"kubectl -n {serving[0]['metadata']['namespace']} describe pods -l app.kubernetes.io/name=ddpjob-operator",
        )
    if lease is not None and (stale := _by_lease(lease, now)).level is not Level.OK:
        return stale
    held = "" if lease is None else f", its Lease was renewed {_age(lease, now)} ago"
    return ok(check, f"{_name(available)} is available and serves {facts.namespace}{held}")


def rights(facts: Facts) -> Finding:
    """Whether the caller may do what `ddpjob submit` does."""
    if isinstance(facts.access, Unread):
        return unknown("rights", facts.access)
    fix = f"ask for the ClusterRole ddpjob-operator-submit in namespace {facts.namespace} (a RoleBinding)"
    if missing := [right for right in NEEDED if not facts.access.get(right)]:
        also = [right for right in USEFUL if not facts.access.get(right)]
        return problem("rights", f"you may not {_listed([*missing, *also])} in namespace {facts.namespace}", fix)
    if missing := [right for right in USEFUL if not facts.access.get(right)]:
        return warning("rights", f"you may submit, but not {_listed(missing)}: logs, why or cancel will say less", fix)
    return ok("rights", f"you may submit, follow and cancel jobs in namespace {facts.namespace}")


def trainer_image(facts: Facts) -> str | None:
    """That of jobs that name none, as the operator's Deployment says."""
    if isinstance(facts.deployments, Unread):
        return None
    serving = (item for item in facts.deployments if serves(item, facts.namespace))
    return next((image for item in serving if (image := environment(item).get("DDPJOB_OPERATOR_TRAINER_IMAGE"))), None)


def environment(deployment: Object) -> dict[str, str]:
    """Variables of the operator's container that have a value in the Deployment."""
    containers = deployment["spec"]["template"]["spec"].get("containers") or ()
    return {item["name"]: item.get("value") or "" for found in containers for item in found.get("env") or ()}


def lease_name(deployment: Object) -> str:
    """The Lease that its leader holds: of its shard, where there are several."""
    given = environment(deployment)
    name = given.get("DDPJOB_OPERATOR_LEASE_NAME") or LEASE
    return shard_lease(name, _shard(deployment).number) if _shard(deployment).count > 1 else name


def is_operator(deployment: Object) -> bool:
    """Whether pods of a Deployment with that label are the operator's: those of the chart's dashboard have another."""
    name, _, value = OPERATOR_LABEL.partition("=")
    metadata = deployment["spec"]["template"].get("metadata") or {}
    return bool((metadata.get("labels") or {}).get(name, value) == value)


def serves(deployment: Object, namespace: str) -> bool:
    """Whether jobs of this namespace are those of this operator, and of this shard of it."""
    if namespace == deployment["metadata"]["namespace"] or not _shard(deployment).has(namespace):
        return False
    served = [name.strip() for name in environment(deployment).get("DDPJOB_OPERATOR_NAMESPACES", "").split(",")]
    return not any(served) or namespace in served


def _shard(deployment: Object) -> Shard:
    number, count = (environment(deployment).get(f"DDPJOB_OPERATOR_{name}", "") for name in ("SHARD", "SHARDS"))
    return Shard(int(number), int(count)) if number.isdecimal() and count.isdecimal() and int(count) else Shard()


def _left_alone(facts: Facts, now: datetime) -> str:
    """A job without a status that an operator should have looked at; empty if there is none."""
    for job in () if isinstance(facts.jobs, Unread) else facts.jobs:
        created = parse_time(job["metadata"].get("creationTimestamp"))
        ours = (job.get("spec") or {}).get("managedBy") in (None, CONTROLLER_NAME)
        if ours and not job.get("status") and created is not None and now - created > _JOB_LATE:
            return str(job["metadata"]["name"])
    return ""


def _by_lease(lease: Object, now: datetime) -> Finding:
    metadata, held = lease["metadata"], bool((lease.get("spec") or {}).get("holderIdentity"))
    name, renewed = f"{metadata['namespace']}/{metadata['name']}", _renewed(lease)
    if held and renewed is not None and now - renewed < _LEASE_LATE:
        return ok(
            "operator",
            f"one holds the Lease {name}, renewed {_age(lease, now)} ago; which namespaces it serves is not seen",
        )
    how = f"nobody has renewed the Lease {name} for {_age(lease, now)}" if held else f"nobody holds the Lease {name}"
    return problem("operator", f"no replica acts: {how}", f"look at its log: kubectl -n {metadata['namespace']} logs")


def _newest(leases: tuple[Object, ...] | Unread) -> Object | None:
    found = [] if isinstance(leases, Unread) else [lease for lease in leases if _renewed(lease) is not None]
    return max(found, key=lambda lease: str(_renewed(lease)), default=None)


def _renewed(lease: Object) -> datetime | None:
    return parse_time((lease.get("spec") or {}).get("renewTime"))


def _age(lease: Object, now: datetime) -> str:
    renewed = _renewed(lease)
    return "a while" if renewed is None else duration(max(0.0, (now - renewed).total_seconds()))


def _unavailable(deployment: Object) -> str:
    conditions = (deployment.get("status") or {}).get("conditions") or ()
    said = (item.get("message") for item in conditions if item.get("status") == "False")
    return next((str(text) for text in said if text), "its pods are not ready")


def _name(deployment: Object) -> str:
    return f"Deployment {deployment['metadata']['namespace']}/{deployment['metadata']['name']}"


def _listed(rights: list[Right]) -> str:
    return ", ".join(map(str, rights))
