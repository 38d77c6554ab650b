"""Objects from the wire and from people's files, parsed once."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml

from ddpjob_operator.api.status import DDPJobStatus, Internal, NodeCount
from ddpjob_operator.core.values.observed import NO_ATTEMPT, InitFailure, PodPhase, PodView, Termination
from ddpjob_operator.wire import pods
from ddpjob_operator.wire.jobs import InvalidJob, parse_job, parse_status, without_broken_rules
from ddpjob_operator.wire.objects import parse_time


def parse_pod(found: dict[str, Any]) -> PodView:
    """The view of a pod, which is the same whether a list or a watch has brought it."""
    view = pods.parse_pod(found)
    (listed,) = pods.decode_pods(json.dumps({"metadata": {}, "items": [found]}).encode())["items"]
    assert pods.parse_pod(listed) == view
    return view


MINIMAL = """
apiVersion: training.ddpjob.io/v1alpha1
kind: DDPJob
metadata:
  name: digits
spec:
  nodes: 2
  args: ["--task", "digits"]
"""


def obj(spec: Any = None, **fields: Any) -> dict[str, Any]:
    base = {"apiVersion": "training.ddpjob.io/v1alpha1", "kind": "DDPJob", "metadata": {"name": "digits"}}
    return base | ({} if spec is None else {"spec": spec}) | fields


def problems(spec: Any, *, strict: bool = True) -> tuple[str, ...]:
    with pytest.raises(InvalidJob) as refused:
        parse_job(obj(spec), strict=strict)
    return refused.value.problems


def test_a_minimal_job_has_at_most_ten_lines_and_every_default() -> None:
    assert len(MINIMAL.strip().splitlines()) <= 10
    job = parse_job(yaml.safe_load(MINIMAL), strict=True)
    assert (job.name, job.namespace, job.spec.nodes, job.spec.ranks_per_node) == ("digits", "default", 2, 1)
    assert (job.spec.restart.max_restarts, job.spec.snapshots.every, job.spec.shared.retain) == (10, "60seconds", True)
    assert job.status == DDPJobStatus()


def test_a_job_with_an_empty_spec_is_a_job() -> None:
    assert parse_job(obj({}), strict=True).spec.nodes == 1
    assert parse_job(obj(), strict=True).spec.nodes == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"nodes": 0}, "spec.nodes: 0 is too small; use 1 or more"),
        ({"nodes": -3}, "spec.nodes: -3 is too small; use 1 or more"),
        ({"nodes": 5000}, "spec.nodes: 5000 is too large; use 1024 or less"),
        ({"nodes": "2"}, 'spec.nodes: "2" is not a whole number; write one, without quotes'),
        ({"nodes": True}, "spec.nodes: true is not a whole number; write one, without quotes"),
        ({"nodes": 1.5}, "spec.nodes: 1.5 is not a whole number; write one, without quotes"),
        ({"node": 2}, "spec.node: is not a field of a DDPJob; did you mean nodes?"),
        ({"argz": []}, "spec.argz: is not a field of a DDPJob; did you mean args?"),
        ({"restart": {"maxRestart": 1}},
         "spec.restart.maxRestart: is not a field of a DDPJob; did you mean maxRestarts?"),
        ({"restart": {"backoff": {"seconds": 1}}},
         "spec.restart.backoff.seconds: is not a field of a DDPJob; did you mean maxSeconds?"),
        ({"podTemplate": {"metadata": {"label": {}}}},
         "spec.podTemplate.metadata.label: is not a field of a DDPJob; did you mean labels?"),
        ({"snapshots": {"zzz": 1}},
         "spec.snapshots.zzz: is not a field of a DDPJob; known here: every, keep, keepEvery, resume"),
        ({"args": [3]}, 'spec.args[0]: 3 is not text; write it in quotes: "3"'),
        ({"args": ["a", 0.1]}, 'spec.args[1]: 0.1 is not text; write it in quotes: "0.1"'),
        ({"args": "--lr 1"}, 'spec.args: "--lr 1" is not a list; write one item a line, each after a dash'),
        ({"env": [{"name": "A", "value": 1}]}, 'spec.env[0].value: 1 is not text; write it in quotes: "1"'),
        ({"env": [{"value": "1"}]}, "spec.env[0].name: is missing; set it"),
        ({"env": [{"name": "1A"}]},
         'spec.env[0].name: "1A" has not the right form; '
         "write letters, digits, _, - and ., not beginning with a digit"),
        ({"initializers": [{"name": "my_data", "source": "s3://b/c", "path": "d"}]},
         'spec.initializers[0].name: "my_data" has not the right form; '
         "write up to 40 lower-case letters, digits and -, not beginning or ending with -"),
        ({"initializers": [{"name": "data", "source": "s3://b/c", "path": "d", "env": [{"name": "1A"}]}]},
         'spec.initializers[0].env[0].name: "1A" has not the right form; '
         "write letters, digits, _, - and ., not beginning with a digit"),
        ({"initializers": [{"name": "data", "script": ["a", "b"], "path": "d"}]},
         'spec.initializers[0].script: ["a", "b"] has not the right form; '
         "write a shell script as one text, of several lines after `script: |`"),
        ({"podTemplate": {"metadata": {"labels": {"name": 1}}}},
         'spec.podTemplate.metadata.labels.name: 1 is not text; write it in quotes: "1"'),
        ({"entrypoint": {"script": 1}},
         "spec.entrypoint.script: 1 has not the right form; write a path, such as /workspace/train.py"),
        ({"snapshots": {"every": "100 steps"}}, 'spec.snapshots.every: "100 steps" has not the right form; '
         "write a number and its unit, such as 100steps, 1epochs or 60seconds"),
        ({"snapshots": {"every": 20}}, "spec.snapshots.every: 20 has not the right form; "
         "write a number and its unit, such as 100steps, 1epochs or 60seconds"),
        ({"replicas": 2}, "spec.replicas: is not a field of a DDPJob; did you mean nodes?"),
        ({"nodeSelector": {}},
         "spec.nodeSelector: is not a field of a DDPJob; did you mean podTemplate.spec.nodeSelector?"),
        ({"entrypoint": {"script": "train.py"}}, "spec.entrypoint.script: 'train.py' is a path in a folder that the "
         "job does not have; write an absolute path, or name the folder in spec.code.path, as `code: {path: .}`, and "
         "use `ddpjob submit` or `ddpjob run`"),
        ({"code": {"sha256": "0" * 64}}, "spec.code.configMaps: is missing; `ddpjob submit` and `ddpjob run` set it"),
        ({"code": {"configMaps": ["a"], "sha256": "12"}}, 'spec.code.sha256: "12" has not the right form; '
         "write 64 digits of 0-9 and a-f"),
        ({"entrypoint": "train.py"},
         'spec.entrypoint: "train.py" is not an object; write its fields below it, indented'),
        ({"resources": {"limits": {"cpu": "many"}}},
         'spec.resources.limits.cpu: "many" is not a quantity; write one such as 2, 500m, 16Gi'),
        ({"resources": {"limits": {"cpu": 1.5}}},
         "spec.resources.limits.cpu: 1.5 is not a quantity; write one such as 2, 500m, 16Gi"),
        ({"shared": {"accessMode": "Both"}},
         "spec.shared.accessMode: \"Both\" is not allowed; use 'ReadWriteMany' or 'ReadWriteOnce'"),
        ({"shared": {"retain": "yes"}},
         'spec.shared.retain: "yes" is neither true nor false; write one of them, without quotes'),
        ({"image": ""}, 'spec.image: "" has not the right length; at least 1 is allowed'),
        ({"env": [{"name": "RANK", "value": "0"}]}, "spec.env[0].name: RANK is reserved for the operator; remove it"),
        ({"entrypoint": {"module": "a", "script": "/b"}},
         "spec.entrypoint: both module 'a' and script '/b' are set; keep one of them"),
        ({"podTemplate": {"spec": {"containers": ["trainer"]}}},
         "spec.podTemplate.spec.containers[0]: must have a name; `trainer` is the operator's container"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:60],
)  # fmt: skip
def test_each_mistake_is_told_with_its_field_its_value_and_the_fix(spec: dict[str, Any], message: str) -> None:
    assert problems(spec) == (message,)


def test_every_mistake_of_a_file_is_told_at_once() -> None:
    assert len(problems({"nodes": 0, "args": [1, 2], "zzz": 1})) == 4


def test_a_long_value_is_not_repeated_in_full() -> None:
    (message,) = problems({"image": "x" * 5000})
    assert len(message) < 200


def test_what_a_newer_crd_allows_is_ignored_when_it_comes_from_a_server() -> None:
    assert parse_job(obj({"nodes": 2, "fromTheFuture": {"min": 1}})).spec.nodes == 2


def test_a_job_that_has_begun_is_not_left_without_an_operator_for_a_rule_of_a_newer_one() -> None:
    volumes = [{"name": "shared", "emptyDir": {}}]
    spec = {"podTemplate": {"spec": {"volumes": volumes}}}
    for status in ({}, {"phase": None}, None):
        with pytest.raises(InvalidJob, match="volume shared has the job's data"):
            parse_job(obj(spec, status=status))
    assert parse_job(obj(spec, status={"phase": "Running"})).spec.pod_template.spec["volumes"] == volumes


def test_an_elastic_pipeline_that_version_0_1_0_has_begun_goes_on() -> None:
    spec = {"nodes": 2, "elastic": {"minNodes": 1}, "args": ["--strategy=pipeline"]}
    with pytest.raises(InvalidJob, match="the same number of ranks only"):
        parse_job(obj(spec))
    assert parse_job(obj(spec, status={"phase": "Running"})).spec.args == ("--strategy=pipeline",)


def test_a_server_without_a_schema_is_not_trusted_either() -> None:
    assert problems({"nodes": 0}, strict=False) == ("spec.nodes: 0 is too small; use 1 or more",)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (obj({}, kind="Job"), "kind 'Job'"),
        (obj({}, apiVersion="v1"), "apiVersion 'v1'"),
        (obj({}, metadata={}), "metadata.name: is missing"),
        (obj({}, nodes=2), "nodes: is not a field of a DDPJob; move it under spec"),
    ],
    ids=["another kind", "another group", "no name", "a field at the wrong place"],
)
def test_a_file_that_is_no_job_is_told_so(document: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidJob, match=re.escape(message)):
        parse_job(document, strict=True)


def test_the_metadata_of_a_server_is_taken_over() -> None:
    metadata = {"name": "a", "namespace": "b", "uid": "u", "generation": 7, "creationTimestamp": "2026-01-02T03:04:05Z"}
    job = parse_job(obj({}, metadata=metadata))
    assert (job.namespace, job.uid, job.generation, job.deleting) == ("b", "u", 7, False)
    assert job.created == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert parse_job(obj({}, metadata=metadata | {"deletionTimestamp": "2026-01-02T03:04:05Z"})).deleting


@pytest.mark.parametrize(
    "text", ["2026-01-02T03:04:05Z", "2026-01-02T03:04:05.000000000Z", "2026-01-02T04:04:05+01:00"]
)
def test_times_of_the_api_are_aware(text: str) -> None:
    assert parse_time(text) == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


LABELS = {"training.ddpjob.io/attempt": "2", "training.ddpjob.io/node-rank": "1"}


def pod(status: dict[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    meta = {"name": "digits-2-1", "uid": "p", "labels": LABELS} | metadata
    return {"metadata": meta, "spec": {"nodeName": "n1"}, "status": status or {}}


def container(state: dict[str, Any], name: str = "trainer") -> dict[str, Any]:
    return {"name": name, "state": state}


@pytest.mark.parametrize(
    "labels",
    [
        None,
        {},
        {"training.ddpjob.io/attempt": "2"},
        *(LABELS | {"training.ddpjob.io/attempt": text} for text in ("x", "-1", "+1", "1_0", "01", "٣", "9" * 10)),
        *(LABELS | {"training.ddpjob.io/node-rank": text} for text in ("", "-1", "None", "9" * 10)),
    ],
    ids=str,
)
def test_a_pod_whose_labels_the_operator_could_not_have_written_is_of_no_attempt(labels: dict[str, str] | None) -> None:
    view = parse_pod(pod(labels=labels))
    assert (view.attempt, view.node_rank) == (NO_ATTEMPT, None)


HELD = {
    "labels": {"kueue.x-k8s.io/managed": "true", "kueue.x-k8s.io/pod-group-name": "digits-36f16e3d-0"},
    "finalizers": ["training.ddpjob.io/job-tracking", "kueue.x-k8s.io/managed"],
}
OURS_ALONE = {"finalizers": ["training.ddpjob.io/job-tracking"]}


@pytest.mark.parametrize(
    ("metadata", "waits_for", "let_go"),
    [
        pytest.param(HELD, "SchedulingGated", False, id="it waits in the queue"),
        pytest.param(HELD | OURS_ALONE, "SchedulingGated", True, id="its group is finished"),
        pytest.param(HELD | OURS_ALONE, "Unschedulable", False, id="admitted once"),
        pytest.param(HELD | OURS_ALONE | {"deletionTimestamp": "2026-01-02T03:04:05Z"}, "SchedulingGated", False,
                     id="one more than the group wants"),
        pytest.param({"labels": {}} | OURS_ALONE, "SchedulingGated", False, id="another holds it back"),
        pytest.param({}, "SchedulingGated", False, id="it says nothing of itself"),
    ],
)  # fmt: skip
def test_a_pod_that_kueue_watches_no_more_and_has_not_admitted_is_let_go(
    metadata: dict[str, Any], waits_for: str, let_go: bool
) -> None:
    waiting = {"type": "PodScheduled", "status": "False", "reason": waits_for}
    pod = parse_pod({"metadata": {"name": "digits-0-0"} | metadata, "status": {"conditions": [waiting]}})
    assert pod.let_go is let_go
    assert pod.group == (metadata.get("labels") or {}).get("kueue.x-k8s.io/pod-group-name", "")


def test_a_fresh_pod_is_pending() -> None:
    view = parse_pod(pod())
    assert view is not None
    assert (view.phase, view.attempt, view.node_rank, view.node_name) == (PodPhase.PENDING, 2, 1, "n1")
    assert (view.deleting, view.ready, view.termination) == (False, False, None)


def test_a_pod_that_is_being_deleted_says_until_when() -> None:
    view = parse_pod(pod(deletionTimestamp="2026-01-02T03:04:05Z"))
    assert view is not None
    assert (view.deleting, view.gone_by) == (True, datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))


@pytest.mark.parametrize(
    ("metadata", "forced"),
    [
        ({"deletionTimestamp": "2026-01-02T03:04:05Z", "deletionGracePeriodSeconds": 0}, True),
        ({"deletionTimestamp": "2026-01-02T03:04:05Z", "deletionGracePeriodSeconds": 30}, False),
        ({"deletionTimestamp": "2026-01-02T03:04:05Z"}, False),
        ({}, False),
    ],
)
def test_a_pod_that_is_being_deleted_without_grace_is_held_by_finalizers_alone(
    metadata: dict[str, Any], forced: bool
) -> None:
    assert parse_pod(pod(**metadata)).forced is forced


UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes"}


@pytest.mark.parametrize(
    ("status", "reason", "message"),
    [
        pytest.param({}, "", "", id="nothing is wrong"),
        pytest.param({"reason": "Evicted", "message": "low on memory"}, "Evicted", "low on memory", id="the pod's own"),
        pytest.param({"conditions": [UNSCHEDULABLE]}, "Unschedulable", "0/2 nodes", id="the scheduler's"),
        pytest.param({"containerStatuses": [container({"waiting": {"reason": "ErrImagePull", "message": "no"}})]},
                     "ErrImagePull", "no", id="the kubelet's"),
        pytest.param({"containerStatuses": [container({"waiting": {"reason": "ContainerCreating"}})]}, "", "",
                     id="creating a container is no trouble"),
        pytest.param({"containerStatuses": [container({"waiting": {"reason": "PodInitializing"}})],
                      "initContainerStatuses": [container({"waiting": {"reason": "ErrImagePull"}}, "fetch")]},
                     "ErrImagePull", "", id="an init container's"),
        pytest.param({"containerStatuses": [container({"running": {}})]}, "", "", id="a container that runs"),
    ],
)  # fmt: skip
def test_the_reason_for_waiting_is_found_where_it_is_told(status: dict[str, Any], reason: str, message: str) -> None:
    view = parse_pod(pod(status))
    assert view is not None
    assert (view.reason, view.message) == (reason, message)


def test_only_the_trainers_end_is_the_end_of_the_node() -> None:
    over = {"terminated": {"exitCode": 3, "reason": "Error", "message": "m", "finishedAt": "2026-01-02T03:04:05Z"}}
    sidecar = container({"terminated": {"exitCode": 9}}, "logs")
    view = parse_pod(pod({"phase": "Failed", "containerStatuses": [sidecar, container(over)]}))
    assert view is not None
    assert view.termination == Termination(3, None, "Error", "m", datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    other = parse_pod(pod({"phase": "Running", "containerStatuses": [sidecar, container({"running": {}})]}))
    assert other is not None
    assert other.termination is None


@pytest.mark.parametrize(
    ("phase", "sidecar", "has_ended"),
    [
        pytest.param("Running", "terminated", True, id="every container has exited, the phase is about to follow"),
        pytest.param("Running", "running", False, id="a sidecar goes on"),
        pytest.param("Succeeded", "terminated", True, id="the phase says so"),
    ],
)
def test_a_pod_has_ended_when_all_its_containers_have(phase: str, sidecar: str, has_ended: bool) -> None:
    """Since Kubernetes 1.27 a kubelet reports the exit before the phase."""
    containers = [container({"terminated": {"exitCode": 0}}), container({sidecar: {"exitCode": 0}}, "logs")]
    view = parse_pod(pod({"phase": phase, "containerStatuses": containers}))
    assert view is not None
    assert (view.ended, view.running) == (has_ended, False)


@pytest.mark.parametrize(
    ("labels", "attempt", "node_rank", "nodes"),
    [
        pytest.param({"attempt": "2", "node-rank": "1"}, 2, 1, None, id="its place never changes"),
        pytest.param({"attempt": "3", "node-rank": "0", "nodes": "4"}, 3, 0, 4, id="its place may change"),
        pytest.param({"attempt": "0", "node-rank": "none", "nodes": "2"}, 0, None, 2, id="a spare has no place yet"),
        pytest.param({"attempt": "0", "node-rank": "1", "nodes": "many"}, 0, 1, None, id="a size that is no number"),
    ],
)
def test_a_pods_place_in_the_gang_is_what_its_labels_say(
    labels: dict[str, str], attempt: int, node_rank: int | None, nodes: int | None
) -> None:
    view = parse_pod(pod(labels={f"training.ddpjob.io/{name}": value for name, value in labels.items()}))
    assert view is not None
    assert (view.attempt, view.node_rank, view.nodes) == (attempt, node_rank, nodes)


WHOLE = {"type": "ContainersReady", "status": "True"}
SILENT = {"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-02T03:04:05Z"}


@pytest.mark.parametrize(
    ("phase", "conditions", "silent"),
    [
        pytest.param("Running", [WHOLE, SILENT], True, id="the node controller changes Ready alone"),
        pytest.param("Running", [WHOLE, SILENT | {"status": "True"}], False, id="a node that answers"),
        pytest.param("Running", [WHOLE | {"status": "False"}, SILENT], False, id="a container that fails its probe"),
        pytest.param("Running", [WHOLE, SILENT | {"reason": "ReadinessGatesNotReady"}], False, id="a readiness gate"),
        pytest.param("Running", [], False, id="nothing is known"),
        pytest.param("Failed", [WHOLE, SILENT], False, id="a pod that has ended"),
    ],
)
def test_a_silent_node_shows_in_a_pod_that_is_not_ready_though_its_containers_are(
    phase: str, conditions: list[dict[str, str]], silent: bool
) -> None:
    view = parse_pod(pod({"phase": phase, "conditions": conditions}))
    assert view is not None
    assert view.not_ready_since == (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC) if silent else None)


@pytest.mark.parametrize("status", ["True", "False"])
@pytest.mark.parametrize("kind", ["DisruptionTarget", "TerminationTarget", "TerminatedByKueue"])
def test_a_disruption_of_the_control_plane_or_of_a_queue_is_named(kind: str, status: str) -> None:
    target = {"type": kind, "status": status, "reason": "PreemptionByScheduler", "message": "for a higher priority"}
    view = parse_pod(pod({"conditions": [target]}))
    assert view is not None
    named = ("PreemptionByScheduler", "for a higher priority") if status == "True" else ("", "")
    assert (view.disruption, view.disruption_message) == named


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
def test_what_a_pod_waited_for_is_not_why_it_ended(phase: str) -> None:
    waits = container({"waiting": {"reason": "ImagePullBackOff"}})
    view = parse_pod(pod({"phase": phase, "conditions": [UNSCHEDULABLE], "containerStatuses": [waits]}))
    assert view is not None
    assert (view.reason, view.message) == ("", "")


@pytest.mark.parametrize(
    ("known", "began"),
    [({}, False), ({"lastState": {"terminated": {"exitCode": 137}}}, True), ({"containerID": "containerd://1"}, True)],
)
def test_a_container_that_was_never_made_has_no_end(known: dict[str, Any], began: bool) -> None:
    over = container({"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}}) | known
    view = parse_pod(pod({"phase": "Failed", "containerStatuses": [over]}))
    assert view is not None
    assert (view.began, view.termination is not None) == (began, began)


@pytest.mark.parametrize(
    ("state", "began"),
    [
        pytest.param({"terminated": {"exitCode": 0}}, False, id="done, and the trainer was not made"),
        pytest.param({"terminated": {"exitCode": 143}}, True, id="stopped"),
        pytest.param({"running": {"startedAt": "2026-01-02T03:04:05Z"}}, True, id="runs"),
        pytest.param({"waiting": {"reason": "PodInitializing"}}, False, id="waits"),
    ],
)
def test_a_pod_whose_init_containers_are_done_has_not_begun(state: dict[str, Any], began: bool) -> None:
    fetch = container(state, "fetch") | ({} if "waiting" in state else {"containerID": "containerd://1"})
    over = container({"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}})
    view = parse_pod(pod({"phase": "Failed", "initContainerStatuses": [fetch], "containerStatuses": [over]}))
    assert (view.began, view.termination) == (began, None)


@pytest.mark.parametrize(
    ("phase", "deletion", "reason"),
    [
        pytest.param("Failed", {}, "ContainerStatusUnknown", id="its node was restarted"),
        pytest.param("Failed", {"deletionTimestamp": "2026-01-02T03:04:05Z"}, None, id="the pod is deleted"),
        pytest.param("Running", {}, None, id="it may be started again"),
    ],
)
def test_a_container_that_its_runtime_has_lost_had_been_made(
    phase: str, deletion: dict[str, str], reason: str | None
) -> None:
    lost = {"exitCode": 137, "reason": "ContainerStatusUnknown"}
    waits = container({"waiting": {"reason": "ContainerCreating"}}) | {"lastState": {"terminated": lost}}
    found = pod({"phase": phase, "containerStatuses": [waits]})
    found["metadata"] |= deletion
    view = parse_pod(found)
    assert view.began
    assert (view.termination and view.termination.reason) == reason


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        pytest.param({}, (137, "ContainerStatusUnknown"), id="made, and never started"),
        pytest.param({"reason": "Completed"}, (0, "Completed"), id="done"),
        pytest.param({"message": "{}"}, (0, ""), id="done, with a word"),
        pytest.param({"startedAt": "2026-01-02T03:04:05Z"}, (0, ""), id="started"),
        pytest.param({"containerID": ""}, (0, ""), id="of no runtime's"),
    ],
)
def test_a_container_that_was_never_started_has_not_succeeded(said: dict[str, Any], expected: tuple[int, str]) -> None:
    """Kubernetes 1.20 says so of one that was made as the kubelet went down."""
    over = {"exitCode": 0, "startedAt": None, "finishedAt": None, "containerID": "containerd://1"} | said
    view = parse_pod(pod({"phase": "Succeeded", "containerStatuses": [container({"terminated": over})]}))
    assert view.termination is not None
    assert (view.termination.exit_code, view.termination.reason) == expected


def test_an_init_container_that_was_never_started_has_not_failed() -> None:
    """A pod that is deleted then has no end to put on record, and is created again at no cost."""
    made = {"exitCode": 0, "startedAt": None, "finishedAt": None, "containerID": "containerd://1"}
    view = parse_pod(pod({"phase": "Pending", "initContainerStatuses": [container({"terminated": made}, "fetch")]}))
    assert (view.init_failure, view.termination) == (None, None)


def test_an_init_container_that_its_runtime_has_lost_has_failed() -> None:
    waits = {"waiting": {"reason": "PodInitializing"}}
    lost = {"lastState": {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}}}
    fetch = container(waits, "fetch") | lost
    status = {"phase": "Failed", "initContainerStatuses": [fetch], "containerStatuses": [container(waits)]}
    view = parse_pod(pod(status))
    assert view.init_failure == InitFailure("fetch", 137, "ContainerStatusUnknown")
    assert view.termination is None
    assert parse_pod(pod(status, deletionTimestamp="2026-01-02T03:04:05Z")).init_failure is None


@pytest.mark.parametrize(
    ("annotations", "spec", "reserved"),
    [
        ({}, {}, False),
        ({"autoscaling.x-k8s.io/consume-provisioning-request": "digits-1"}, {}, True),
        ({"cluster-autoscaler.kubernetes.io/consume-provisioning-request": "digits-1"}, {}, True),
        ({}, {"nodeSelector": {"kubernetes.io/hostname": "node-3"}}, True),
        ({}, {"nodeSelector": {"pool": "gpus"}}, False),
    ],
)
def test_a_pod_that_kueue_holds_to_what_its_group_was_admitted_with(
    annotations: dict[str, str], spec: dict[str, Any], reserved: bool
) -> None:
    view = parse_pod(pod({}, annotations=annotations) | {"spec": spec})
    assert view is not None
    assert view.reserved == reserved


def test_a_pod_has_been_scheduled_once_it_has_a_node() -> None:
    waits, placed = parse_pod(pod({"conditions": [UNSCHEDULABLE]}) | {"spec": {}}), parse_pod(pod())
    assert waits is not None
    assert placed is not None
    assert (waits.scheduled, placed.scheduled) == (False, True)


def test_of_a_listed_pod_nothing_is_decoded_that_is_not_read() -> None:
    large = pod({"phase": "Running"}, managedFields=[{"manager": "kubelet"}], annotations={"a": "b"})
    large["spec"] = {"nodeName": "node-1", "containers": [{"name": "trainer"}]}
    (found,) = pods.decode_pods(json.dumps({"kind": "PodList", "metadata": {}, "items": [large]}).encode())["items"]
    assert found == {
        "metadata": {name: large["metadata"][name] for name in found["metadata"]} | {"annotations": {}},
        "spec": {"nodeName": "node-1"},
        "status": {"phase": "Running"},
    }
    assert found["metadata"].keys() == large["metadata"].keys() - {"managedFields"}


def nested(levels: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(levels):
        inner = {"a": inner}
    return inner


@pytest.mark.parametrize(
    "template",
    [nested(40), nested(5000), {"volumes": [[] for _ in range(30_000)]}, {"a": [[{}] * 100 for _ in range(300)]}],
)
def test_a_template_of_any_depth_or_size_is_refused_and_not_followed(template: dict[str, Any]) -> None:
    """Seen from an API server whose CRD has no schema for it."""
    (problem,) = problems({"podTemplate": {"spec": template}}, strict=False)
    assert problem == (
        "spec.podTemplate: has more than 32 levels or more than 10000 values; remove what a pod does not need"
    )


def test_the_source_of_a_variable_is_bounded_as_well() -> None:
    (problem,) = problems({"env": [{"name": "A", "valueFrom": nested(5000)}]}, strict=False)
    assert problem.startswith("spec.env: has more than 32 levels")


BOUND = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-02T03:04:05Z"}


@pytest.mark.parametrize(
    ("status", "node", "unacknowledged"),
    [
        pytest.param({"conditions": [BOUND]}, "n1", True, id="bound, and no word of its kubelet"),
        pytest.param({"conditions": [BOUND], "startTime": "2026-01-02T03:04:06Z"}, "n1", False, id="seen"),
        pytest.param({"conditions": [UNSCHEDULABLE]}, None, False, id="not bound"),
        pytest.param({"phase": "Failed", "conditions": [BOUND]}, "n1", False, id="not admitted"),
    ],
)
def test_a_pod_that_its_kubelet_has_not_seen_has_no_start_time(
    status: dict[str, Any], node: str | None, unacknowledged: bool
) -> None:
    view = parse_pod(pod({"phase": "Pending"} | status) | {"spec": {"nodeName": node} if node else {}})
    assert view.unacknowledged_since == (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC) if unacknowledged else None)


def test_the_init_container_that_failed_is_named_and_no_sidecar_that_ended_with_it() -> None:
    """A native sidecar stands before it, and the kubelet kills it after."""
    ended = [
        {"name": name, "state": {"terminated": {"exitCode": code}}}
        for name, code in (("a", 0), ("istio", 137), ("b", 3))
    ]
    waits = {"name": "c", "state": {"waiting": {"reason": "PodInitializing"}}}
    assert parse_pod(pod({"initContainerStatuses": [*ended, waits]})).init_failure == InitFailure("b", 3)
    assert parse_pod(pod({"initContainerStatuses": ended[:1]})).init_failure is None


@pytest.mark.parametrize(
    ("initialized", "states", "name"),
    [
        pytest.param("False", ("terminated", "running", "waiting"), "vault-agent-init", id="it never ends"),
        pytest.param("False", ("running", "waiting", "waiting"), "istio-proxy", id="a native sidecar is not ready"),
        pytest.param("False", ("running", "running", "waiting"), "vault-agent-init", id="one before it is"),
        pytest.param("False", ("waiting", "waiting", "waiting"), "", id="an image is pulled"),
        pytest.param("True", ("running", "terminated", "terminated"), "", id="all are done, and a sidecar goes on"),
    ],
)
def test_the_init_container_that_keeps_the_trainer_waiting_is_known(
    initialized: str, states: tuple[str, ...], name: str
) -> None:
    """A vault agent that may not log in tries for ever, and neither the pod's status nor an event has a reason."""
    names = ("istio-proxy", "vault-agent-init", "fetch")
    found = [{"name": item, "state": {state: {"a": 0}}} for item, state in zip(names, states, strict=True)]
    conditions = [{"type": "Initialized", "status": initialized, "reason": "ContainersNotInitialized"}]
    assert parse_pod(pod({"conditions": conditions, "initContainerStatuses": found})).init_running == name


BEGUN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
CONDITION = {"type": "Running", "status": "True", "reason": "GangRunning", "lastTransitionTime": "2026-01-02T03:04:05Z"}


@pytest.mark.parametrize(
    ("spoilt", "lost"),
    [
        ({"phase": "Migrating"}, {"phase": None}),
        ({"attempt": "many"}, {"attempt": 0}),
        ({"goodput": {"training": "long"}}, {"goodput": None}),
        ({"nodes": []}, {"nodes": NodeCount()}),
        ({"conditions": [CONDITION, {"type": "Degraded"}, CONDITION | {"lastTransitionTime": "soon"}]}, {}),
        ({"internal": 7}, {}),
        (
            {"internal": {"specDigests": {"nodes": "1"}, "lostPods": {"pod-1": "lost"}}},
            {"internal": Internal(spec_digests={"nodes": "1"})},
        ),
        (
            {"failures": 7, "restartTimes": ["never", "2026-01-02T03:04:05Z"]},
            {"restart_times": (BEGUN,)},
        ),
    ],
    ids=lambda value: "" if value is None else str(value)[:40],
)
def test_a_status_loses_what_this_version_cannot_read_and_nothing_else(
    spoilt: dict[str, Any], lost: dict[str, Any]
) -> None:
    whole = {"phase": "Running", "attempt": 3, "restarts": 2, "conditions": [CONDITION], "snapshot": None}
    read = parse_status(whole | spoilt)
    assert read == DDPJobStatus.model_validate(whole).model_copy(update=lost)


@pytest.mark.parametrize(
    ("phase", "kept"), [(None, None), ("Pending", None), ("Running", [3]), ("Suspended", [3]), ("Succeeded", [3])]
)
def test_a_job_that_has_begun_can_do_without_a_rule_that_cannot_be_read(phase: str | None, kept: list[int]) -> None:
    rules = [{"messagePattern": "(", "action": "Fail"}, {"exitCodes": [3], "action": "Fail"}]
    found = without_broken_rules(obj({"restart": {"rules": rules, "maxRestarts": 4}}, status={"phase": phase}))
    assert (found and [*found.spec.restart.rules[0].exit_codes]) == kept
    assert found is None or (len(found.spec.restart.rules), found.spec.restart.max_restarts) == (1, 4)


def test_a_job_that_fetches_its_data_can_do_without_such_a_rule_too() -> None:
    rules = [{"messagePattern": "(", "action": "Fail"}]
    status = {"phase": "Pending", "conditions": [CONDITION | {"type": "Initialized", "status": "False"}]}
    found = without_broken_rules(obj({"restart": {"rules": rules}}, status=status))
    assert found is not None
    assert found.spec.restart.rules == ()


def test_so_can_one_in_a_phase_that_only_another_version_knows() -> None:
    rules = [{"messagePattern": "(", "action": "Fail"}]
    status = {"phase": "Draining", "internal": {"specDigests": {"nodes": "1"}}}
    found = without_broken_rules(obj({"restart": {"rules": rules}}, status=status))
    assert found is not None
    assert found.spec.restart.rules == ()


def test_any_other_mistake_stays_one() -> None:
    running = {"phase": "Running"}
    assert without_broken_rules(obj({"restart": {"rules": [{"exitCodes": [3]}]}}, status=running)) is None
    rules = [{"messagePattern": "(", "action": "Fail"}]
    assert without_broken_rules(obj({"nodes": 0, "restart": {"rules": rules}}, status=running)) is None


@pytest.mark.parametrize(
    ("phase", "state", "gone_by"),
    [
        ("Running", {"running": {}}, "2026-01-02T03:04:35Z"),
        ("Pending", None, "2026-01-02T03:04:05Z"),
        ("Pending", {"waiting": {"reason": "PodInitializing"}}, "2026-01-02T03:04:05Z"),
        ("Pending", {"running": {}}, "2026-01-02T03:04:35Z"),
    ],
)
def test_a_pod_without_containers_needs_no_grace(phase: str, state: dict[str, Any] | None, gone_by: str) -> None:
    metadata = {"deletionTimestamp": "2026-01-02T03:04:35Z", "deletionGracePeriodSeconds": 30}
    status = {"phase": phase} | ({"initContainerStatuses": [{"name": "init", "state": state}]} if state else {})
    assert parse_pod({"metadata": metadata, "status": status}).gone_by == parse_time(gone_by)
