"""Data before the gang: the pod that fetches it, and what follows from how that pod fares."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from builders import DEFAULTS, NOW, UID, in_phase, later, make_job, make_report, seen
from looks import admitted
from tests.support import kubernetes_schemas

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core.manifests.initializer import build_initializer
from ddpjob_operator.core.plan import plan
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.actions import CreateChild, CreatePod, DeletePod, Plan, ReadWarnings
from ddpjob_operator.core.values.job import Defaults, Job, Manifest, Problem
from ddpjob_operator.core.values.observed import InitializerView, PodPhase, PodWarning, Termination
from ddpjob_operator.wire.pods import parse_initializer, parse_pod

DATASET = {"name": "dataset", "source": "https://example.com/digits.tar", "path": "datasets/digits.tar"}
MODEL = {"name": "model", "source": "pvc://models/tiny", "path": "models/tiny"}
SCRIPT = {"name": "unpack", "script": "tar xf $(NAME) $HOME", "path": "datasets/digits"}
SCHEMAS = ("1.25", kubernetes_schemas.latest_version())


def make(*initializers: dict[str, Any], status: DDPJobStatus | None = None, **spec: Any) -> Job:
    return make_job(status, initializers=list(initializers or (DATASET,)), **spec)


def fetcher(phase: str = "Running", number: int = 0, **fields: Any) -> InitializerView:
    return InitializerView(f"digits-init-{number}", f"init-{number}", PodPhase(phase), number, **fields)


def broken(number: int = 0, code: int = 1, message: str = "", **fields: Any) -> InitializerView:
    return fetcher("Failed", number, step="dataset", termination=Termination(code, message=message), **fields)


def look(status: DDPJobStatus | None = None, pod: InitializerView | None = None, **fields: Any) -> Plan:
    return plan(make(status=status), seen(initializer=pod, **fields), NOW, DEFAULTS)


def condition(decided: Plan, type_: str = cond.INITIALIZED) -> tuple[str, str, str]:
    found = cond.find(decided.status.conditions, type_)
    assert found is not None
    return found.status, found.reason, found.message


def tries(decided: Plan) -> int:
    return decided.status.initializer_failures + (decided.status.internal.initializer_disruptions or 0)


def made(decided: Plan) -> list[str]:
    return [
        action.manifest["metadata"]["name"] for action in decided.actions if isinstance(action, CreateChild | CreatePod)
    ]


# What becomes of a job while its data is fetched.


def test_the_data_comes_before_any_pod_of_the_gang() -> None:
    decided = look()
    assert made(decided) == ["digits-init-0"]
    assert decided.status.phase is Phase.PENDING


def test_while_it_is_fetched_the_job_waits_and_says_so_once() -> None:
    first = look(look().status, fetcher("Pending"))
    assert (first.actions, first.status.phase) == ((), Phase.PENDING)
    assert condition(first) == ("False", "Initializing", "pod digits-init-0 prepares the volume: dataset")
    assert [event.reason for event in first.events] == ["Initializing"]
    again = look(first.status, fetcher())
    assert again.status.conditions == first.status.conditions
    assert (again.actions, again.events) == ((), ())


def test_with_the_data_on_the_volume_the_gang_starts_and_it_is_on_record() -> None:
    decided = look(look().status, fetcher("Succeeded"))
    assert condition(decided)[:2] == ("True", "DataReady")
    assert decided.status.phase is Phase.STARTING
    assert made(decided) == ["digits-0-0", "digits-0-1"]


def test_the_pod_of_initializers_that_are_done_goes_once_that_is_on_record_where_a_sidecar_runs_on() -> None:
    done = fetcher(step="dataset", termination=Termination(0), done=True)
    first = look(look().status, done)
    assert (first.status.phase, made(first)) == (Phase.STARTING, ["digits-0-0", "digits-0-1"])
    assert condition(first)[:2] == ("True", "DataReady")
    assert not any(isinstance(action, DeletePod) for action in first.actions), "it is the proof"
    second = look(first.status, done)
    assert [action.name for action in second.actions if isinstance(action, DeletePod)] == ["digits-init-0"]
    for pod in (replace(done, deleting=True), replace(done, exited=True)):
        assert not any(isinstance(action, DeletePod) for action in look(first.status, pod).actions)


@pytest.mark.parametrize(("code", "phase"), [(1, Phase.PENDING), (64, Phase.FAILED)])
def test_initializers_that_failed_are_dealt_with_although_a_sidecar_runs_on(code: int, phase: Phase) -> None:
    decided = look(look().status, fetcher(step="dataset", termination=Termination(code), done=True))
    assert (decided.status.phase, decided.status.initializer_failures) == (phase, 1)
    assert condition(decided)[:2] == ("False", "InitializerFailed")
    ended = decided.status if phase is Phase.FAILED else None
    asked = decided if ended is None else look(ended, fetcher(termination=Termination(code), done=True))
    assert [action.name for action in asked.actions if isinstance(action, DeletePod)] == ["digits-init-0"]


@pytest.mark.parametrize("pod", [None, fetcher("Succeeded"), broken()], ids=["gone", "succeeded", "failed later"])
def test_data_that_is_there_is_not_fetched_again(pod: InitializerView | None) -> None:
    ready = look(look().status, fetcher("Succeeded")).status
    restarting = ready.model_copy(update={"phase": Phase.RESTARTING, "attempt": 1})
    decided = look(restarting, pod, attempt=1)
    assert made(decided) == ["digits-1-0", "digits-1-1"]


def test_a_job_without_initializers_never_speaks_of_them() -> None:
    decided = plan(make_job(), seen(), NOW, DEFAULTS)
    assert cond.find(decided.status.conditions, cond.INITIALIZED) is None
    assert made(decided) == ["digits-0-0", "digits-0-1"]


def test_a_try_that_fails_is_counted_before_its_pod_goes_and_repeated_after_a_wait() -> None:
    reported = make_report("FetchFailed", message="https://example.com/digits.tar answered 503")
    decided = look(look().status, broken(message=reported))
    assert decided.status_first
    assert decided.status.initializer_failures == 1
    assert [action.name for action in decided.actions if isinstance(action, DeletePod)] == ["digits-init-0"]
    assert condition(decided)[:2] == ("False", "InitializerFailed")
    assert condition(decided)[2].startswith(
        "initializer dataset: https://example.com/digits.tar answered 503; retrying in 1 s (1 of 3 times)"
    )
    wait = decided.requeue_after
    assert wait is not None
    assert made(look(decided.status, broken(deleting=True))) == [], "it waits"
    after = decided.status.model_copy(update={"retry_at": later(-0.1)})
    assert made(look(after)) == ["digits-init-1"]


def test_a_pod_that_was_counted_and_is_still_there_is_deleted_and_not_counted_again() -> None:
    status = in_phase(Phase.PENDING, initializer_failures=1)
    decided = look(status, broken())
    assert decided.status.initializer_failures == 1
    assert [type(action) for action in decided.actions] == [DeletePod, CreateChild]


def test_it_is_tried_four_times_in_all() -> None:
    status = in_phase(Phase.PENDING, initializer_failures=3)
    decided = look(status, broken(3, code=1))
    assert decided.status.phase is Phase.FAILED
    assert condition(decided, cond.FAILED) == (
        "True",
        "InitializerFailed",
        "initializer dataset: exited with code 1; it was tried 4 times",
    )
    failure = decided.status.last_failure
    assert failure is not None
    assert (failure.reason, failure.pod_name, failure.exit_code) == ("InitializerFailed", "digits-init-3", 1)


def test_what_would_only_fail_again_is_not_tried_again() -> None:
    reported = make_report("UserError", message="the source is not a URL")
    decided = look(look().status, broken(code=64, message=reported))
    assert decided.status.phase is Phase.FAILED
    assert condition(decided, cond.FAILED)[2] == "initializer dataset: the source is not a URL"


def test_a_pod_without_a_word_of_its_own_is_explained_by_the_clusters() -> None:
    decided = look(look().status, fetcher("Failed", reason="Evicted", message="The node was low on resource: memory"))
    assert "pod digits-init-0: The node was low on resource: memory; retrying" in condition(decided)[2]


@pytest.mark.parametrize(
    ("pod", "counted"),
    [
        (fetcher(deleting=True), False),
        (fetcher(deleting=True, gone_by=later(10)), False),
        (fetcher(deleting=True, gone_by=later(-10)), True),
        (broken(deleting=True, gone_by=later(1)), False),
    ],
    ids=["going", "in its grace", "its node is gone", "ended by the deletion"],
)
def test_a_pod_that_somebody_deletes_is_no_failure_unless_its_node_is_gone(pod: InitializerView, counted: bool) -> None:
    decided = look(look().status, pod)
    assert decided.status.initializer_failures == int(counted)
    assert counted or decided.actions == ()


def test_a_status_that_was_lost_learns_its_count_from_the_pod() -> None:
    assert look(None, broken(2)).status.initializer_failures == 3
    learned = look(None, fetcher(number=7))
    assert (learned.status.initializer_failures, tries(learned)) == (3, 7)


def test_a_pod_whose_label_names_a_try_that_was_never_begun_is_removed() -> None:
    decided = look(in_phase(Phase.PENDING), broken(7))
    assert decided.status.initializer_failures == 0
    assert [action.uid for action in decided.actions if isinstance(action, DeletePod)] == ["init-7"]


def test_a_pod_that_cannot_start_is_trouble() -> None:
    since = in_phase(Phase.PENDING)
    decided = look(since, fetcher("Pending", reason="ErrImagePull", message="no such image", scheduled=True))
    assert condition(decided, cond.DEGRADED)[:2] == ("True", "ErrImagePull")
    cleared = look(decided.status, fetcher())
    assert condition(cleared, cond.DEGRADED)[0] == "False"


def test_a_pod_that_waits_without_a_word_is_explained_by_its_events() -> None:
    since = in_phase(Phase.PENDING, start_time=later(-10))
    waits = fetcher("Pending", scheduled=True)
    asked = look(since, waits)
    assert asked.actions == (ReadWarnings("digits-init-0", "init-0"),)
    warned = {"init-0": PodWarning(NOW, "FailedMount", 'secret "registry" not found')}
    decided = look(since, waits, warnings=warned)
    assert condition(decided, cond.DEGRADED)[:2] == ("True", "FailedMount")
    assert 'secret "registry" not found' in condition(decided, cond.DEGRADED)[2]


@pytest.mark.parametrize(("silent_for", "lost"), [(29.0, False), (30.0, True)])
def test_a_pod_on_a_lost_node_is_tried_again_elsewhere_and_does_not_count(silent_for: float, lost: bool) -> None:
    pod = fetcher(node_name="node-1", not_ready_since=later(-silent_for))
    decided = look(look().status, pod)
    assert (decided.status.initializer_failures, tries(decided)) == (0, int(lost))
    assert lost or decided.requeue_after == 1.0
    if lost:
        expected = (
            "pod digits-init-0: node node-1 is gone; retrying in 1 s (NodeLost is a disruption: it does not count)"
        )
        assert condition(decided)[2] == expected
        after = decided.status.model_copy(update={"retry_at": later(-0.1)})
        assert made(look(after, replace(pod, deleting=True))) == ["digits-init-1"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"node_name": "node-1", "not_ready_since": later(-60)}, "node node-1 is gone"),
        ({"phase": "Failed", "reason": "Evicted", "message": "low on resource: memory"}, "low on resource: memory"),
    ],
    ids=["its node is gone", "evicted"],
)
def test_the_initializer_before_is_not_blamed_for_the_end_of_the_pod(fields: dict[str, Any], why: str) -> None:
    decided = look(look().status, fetcher(step="dataset", termination=Termination(0), **fields))
    assert condition(decided)[2].startswith(f"pod digits-init-0: {why}; retrying")
    failed = fetcher(number=3, step="dataset", termination=Termination(0), phase="Failed")
    ended = look(in_phase(Phase.PENDING, initializer_failures=3), failed).status
    assert ended.last_failure is not None
    assert ended.last_failure.exit_code is None


FETCH_FAILED = {"termination": Termination(1, message=make_report("FetchFailed"))}
GOING = {"phase": "Running", "deleting": True, "gone_by": later(-9)}
STOPPED = {"step": "dataset", "termination": Termination(143, message=make_report("Preempted", message="stopped"))}
NODE_DOWN = {"reason": "Terminated", "message": "Pod was terminated in response to imminent node shutdown."}
TAINTED = {"disruption": "DeletionByTaintManager", "disruption_message": "Taint manager: deleting due to NoExecute"}


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        pytest.param(NODE_DOWN, "Terminated", id="node shutdown"),
        pytest.param(NODE_DOWN | STOPPED, "Terminated", id="node shutdown, and it stopped in order"),
        pytest.param(NODE_DOWN | {"termination": Termination(137)}, "Terminated", id="node shutdown, and killed"),
        pytest.param(NODE_DOWN | {"termination": Termination(0)}, "Terminated", id="node shutdown between two"),
        pytest.param({"reason": "NodeShutdown"}, "NodeShutdown", id="admitted by no node that shuts down"),
        pytest.param({"reason": "Evicted", "message": "low on resource: memory"}, "Evicted", id="evicted"),
        pytest.param({"reason": "OutOfcpu"}, "OutOfcpu", id="the node was full"),
        pytest.param({"disruption": "PreemptionByScheduler"} | STOPPED, "Preempted", id="preempted"),
        pytest.param({"disruption": "EvictionByEvictionAPI"}, "Drained", id="drained"),
        pytest.param(TAINTED | GOING, "NodeLost", id="tainted"),
        pytest.param(STOPPED, "Preempted", id="stopped in order"),
        pytest.param({"termination": Termination(255, reason="Unknown")}, "NodeRebooted", id="rebooted"),
        pytest.param(
            {"reason": "Evicted", "message": 'Usage of EmptyDir volume "tmp" exceeds the limit "1Gi".'},
            None,
            id="evicted for what it wrote itself",
        ),
        pytest.param(NODE_DOWN | FETCH_FAILED, None, id="failed"),
        pytest.param({"termination": Termination(137, reason="OOMKilled")}, None, id="out of memory"),
        pytest.param({"reason": "UnexpectedAdmissionError"}, None, id="refused by its node"),
        pytest.param(GOING, None, id="deleted, and its node gone"),
    ],
)
def test_what_the_cluster_ended_is_distinguished_from_what_failed(ended: dict[str, Any], reason: str | None) -> None:
    decided = look(look().status, fetcher(**{"phase": "Failed"} | ended))
    assert (decided.status.initializer_failures, tries(decided)) == (int(reason is None), 1)
    end = "(1 of 3 times)" if reason is None else f"({reason} is a disruption: it does not count)"
    assert condition(decided)[2].endswith(end)
    assert decided.status_first
    assert [action.name for action in decided.actions if isinstance(action, DeletePod)] == ["digits-init-0"]


def test_disruptions_use_up_no_try_but_a_name_each_and_their_waits_grow() -> None:
    status, waits = look().status, list[float]()
    for number in range(10):
        decided = look(status, fetcher("Failed", number, **NODE_DOWN))
        assert (decided.status.phase, decided.status.initializer_failures) == (Phase.PENDING, 0)
        waits.append(decided.requeue_after or 0.0)
        assert made(look(decided.status)) == [], "it waits"
        status = decided.status.model_copy(update={"retry_at": later(-0.1)})
        assert made(look(status, fetcher("Failed", number, deleting=True))) == [f"digits-init-{number + 1}"]
    assert waits[0] > 0
    assert waits[:4] == sorted(set(waits[:4]))
    for number in range(10, 14):
        assert status.phase is Phase.PENDING
        status = look(status, broken(number)).status
    assert (status.phase, status.initializer_failures) == (Phase.FAILED, 4)
    failed = cond.find(status.conditions, cond.FAILED)
    assert failed is not None
    expected = "initializer dataset: exited with code 1; it was tried 14 times, of which the cluster ended 10"
    assert failed.message == expected


def test_the_data_of_a_try_after_a_disruption_starts_the_gang() -> None:
    disrupted = look(look().status, fetcher("Failed", **NODE_DOWN)).status.model_copy(update={"retry_at": later(-0.1)})
    assert look(disrupted, fetcher("Succeeded", 1)).status.phase is Phase.STARTING


def test_a_suspension_keeps_the_count_of_the_names_that_are_used() -> None:
    disrupted = look(look().status, fetcher("Failed", **NODE_DOWN)).status
    suspending = plan(make(status=disrupted, suspend=True), seen(initializer=fetcher(number=1)), NOW, DEFAULTS)
    suspended = plan(make(status=suspending.status, suspend=True), seen(), NOW, DEFAULTS).status
    assert suspended.phase is Phase.SUSPENDED
    assert made(look(suspended)) == ["digits-init-1"]


def test_a_disruption_is_read_from_the_pod() -> None:
    disrupted = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "a drain"}
    view = parse_initializer({"metadata": built()["metadata"], "status": {"conditions": [disrupted]}})
    assert view is not None
    assert (view.disruption, view.disruption_message) == ("EvictionByEvictionAPI", "a drain")


@pytest.mark.parametrize("lost", ["dataset", "model"])
def test_a_node_that_came_back_without_the_container_uses_up_no_try(lost: str) -> None:
    """As one with CRI-O: its kubelet says of the container that it waits, and that it has ended before."""
    waits: dict[str, Any] = {"state": {"waiting": {"reason": "PodInitializing"}}}
    done: dict[str, Any] = {"name": "dataset", "state": {"terminated": {"exitCode": 0}}}
    last: dict[str, Any] = {"name": "model"} | waits
    gone: dict[str, Any] = {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}}
    forgotten: dict[str, Any] = {"name": lost, "lastState": gone} | waits
    first, last = (forgotten, last) if lost == "dataset" else (done, forgotten)
    status = {"phase": "Failed", "initContainerStatuses": [first], "containerStatuses": [last]}
    view = parse_initializer({"metadata": built(DATASET, MODEL)["metadata"], "status": status})
    assert view is not None
    assert view.step == lost
    decided = look(look().status, view)
    assert (decided.status.initializer_failures, tries(decided)) == (0, 1)
    assert condition(decided)[2].endswith("(NodeRebooted is a disruption: it does not count)")


def test_a_pod_that_is_refused_is_trouble_and_asked_for_again() -> None:
    decided = look(problem=Problem("QuotaExceeded", "exceeded quota: few"))
    assert condition(decided, cond.DEGRADED)[1] == "QuotaExceeded"
    assert made(decided) == ["digits-init-0"]


@pytest.mark.parametrize("seconds", [-1.0, 99999.0], ids=["over", "the clock was set back"])
def test_a_wait_never_lasts_for_ever(seconds: float) -> None:
    status = in_phase(Phase.PENDING, initializer_failures=1, retry_at=later(seconds))
    assert made(look(status)) == ["digits-init-1"]


def test_an_attempt_that_begins_before_the_data_is_there_makes_no_pod() -> None:
    """As after a suspension that stopped the fetching."""
    restarting = in_phase(Phase.RESTARTING, attempt=1, spec={"initializers": [DATASET]})
    assert made(look(restarting, None, attempt=1)) == ["digits-init-0"]
    assert made(look(restarting, fetcher(), attempt=1)) == []
    assert made(look(restarting, fetcher("Succeeded"), attempt=1)) == ["digits-1-0", "digits-1-1"]


def test_a_suspension_that_is_taken_back_is_over_on_record_before_there_is_a_pod_again() -> None:
    """Else the next look would stop it, and make another, for ever."""
    suspending = plan(make(status=look().status, suspend=True), seen(initializer=fetcher()), NOW, DEFAULTS)
    assert [type(action) for action in suspending.actions] == [DeletePod]
    decided = look(suspending.status)
    assert made(decided) == ["digits-init-0"]
    assert decided.status_first
    assert look(decided.status, fetcher()).actions == ()


# The pod.


def built(*initializers: dict[str, Any], number: int = 0, defaults: Defaults = DEFAULTS, **spec: Any) -> Manifest:
    return build_initializer(admitted(make(*initializers, **spec), defaults), number)


def containers(pod: Manifest) -> list[Manifest]:
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


def env(container: Manifest) -> dict[str, Any]:
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in container["env"]}


@pytest.mark.parametrize("version", SCHEMAS)
@pytest.mark.parametrize("initializers", [(DATASET,), (DATASET, MODEL, SCRIPT)], ids=len)
def test_the_pod_is_valid_for_the_api_server(initializers: tuple[dict[str, Any], ...], version: str) -> None:
    kubernetes_schemas.validate(built(*initializers), version, strict=True)


def test_initializers_run_in_order_each_in_a_container_of_its_own() -> None:
    pod = built(DATASET, MODEL, SCRIPT)
    assert [item["name"] for item in containers(pod)] == ["dataset", "model", "unpack"]
    assert [item["name"] for item in pod["spec"]["containers"]] == ["unpack"]
    assert pod["spec"]["restartPolicy"] == "Never"


def test_the_pod_is_known_as_what_it_is_and_goes_with_its_job() -> None:
    metadata = built(number=2)["metadata"]
    assert metadata["name"] == "digits-init-2"
    assert metadata["labels"] == {
        "app.kubernetes.io/managed-by": "ddpjob",
        "training.ddpjob.io/job": "digits",
        "training.ddpjob.io/uid": UID,
        "training.ddpjob.io/role": "initializer",
        "training.ddpjob.io/attempt": "2",
        "training.ddpjob.io/last-initializer": "dataset",
    }
    assert [owner["uid"] for owner in metadata["ownerReferences"]] == [UID]
    view = parse_initializer({"metadata": metadata, "status": {}})
    assert view is not None
    assert (view.name, view.number) == ("digits-init-2", 2)


def test_the_pod_cannot_be_made_to_pass_for_one_of_the_gang() -> None:
    labels = {"training.ddpjob.io/node-rank": "0", "training.ddpjob.io/role": "none", "team": "ml"}
    metadata = built(podTemplate={"metadata": {"labels": labels}})["metadata"]
    assert parse_initializer({"metadata": metadata}) is not None
    assert parse_pod({"metadata": metadata}).node_rank is None
    assert metadata["labels"]["team"] == "ml"


def test_credentials_are_those_of_one_initializer_alone_and_not_part_of_its_task() -> None:
    secret = {"name": "AWS_SECRET_ACCESS_KEY", "valueFrom": {"secretKeyRef": {"name": "s3", "key": "secret"}}}
    pod = built(DATASET | {"env": [secret]}, MODEL)
    first, second = containers(pod)
    assert env(first)["AWS_SECRET_ACCESS_KEY"] == secret["valueFrom"]
    assert "AWS_SECRET_ACCESS_KEY" not in env(second)
    assert json.loads(env(first)["DDPJOB_INITIALIZER"]) == DATASET


def test_a_script_reaches_its_container_as_it_was_written() -> None:
    (container,) = containers(built(SCRIPT))
    assert json.loads(env(container)["DDPJOB_INITIALIZER"].replace("$$", "$"))["script"] == "tar xf $(NAME) $HOME"


def test_a_claim_to_copy_from_is_mounted_read_only_where_it_is_needed() -> None:
    pod = built(DATASET, MODEL)
    first, second = containers(pod)
    assert [mount["mountPath"] for mount in first["volumeMounts"]] == ["/mnt/shared", "/tmp"]
    (mount,) = (mount for mount in second["volumeMounts"] if mount["mountPath"] == "/mnt/source/models")
    (volume,) = (volume for volume in pod["spec"]["volumes"] if volume["name"] == mount["name"])
    assert mount["readOnly"] is True
    assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}


def test_the_pod_keeps_to_the_restricted_profile_and_holds_no_credentials_of_the_cluster() -> None:
    pod = built(DATASET, MODEL)
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    for container in containers(pod):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "ports" not in container


def test_the_template_says_where_the_pod_may_run_but_not_what_is_in_it() -> None:
    template = {
        "spec": {
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "imagePullSecrets": [{"name": "registry"}],
            "schedulerName": "mine",
            "affinity": {"podAntiAffinity": {}},
            "containers": [{"name": "sidecar", "image": "i"}],
            "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}],
        },
        "metadata": {"labels": {"team": "ml"}},
    }
    pod = built(podTemplate=template)
    assert pod["metadata"]["labels"]["team"] == "ml"
    assert (pod["spec"]["schedulerName"], pod["spec"]["imagePullSecrets"]) == ("mine", [{"name": "registry"}])
    assert pod["spec"]["tolerations"][0] == {"key": "gpu", "operator": "Exists"}
    assert {item.get("tolerationSeconds") for item in pod["spec"]["tolerations"][1:]} == {30}
    assert "affinity" not in pod["spec"]
    assert [item["name"] for item in containers(pod)] == ["dataset"]


def test_the_pod_takes_none_of_the_devices_that_the_gang_claims() -> None:
    """A GPU would be held by it, and a channel of IMEX is prepared once the gang is there, which waits for the data."""
    claims = [{"name": "gpus", "resourceClaimTemplateName": "gpu"}]
    trainer = {"name": "trainer", "resources": {"claims": [{"name": "gpus"}]}}
    pod = built(podTemplate={"spec": {"resourceClaims": claims, "containers": [trainer]}}, procsPerNode=1)
    assert "resourceClaims" not in pod["spec"]
    assert all("resources" not in item for item in containers(pod))


@pytest.mark.parametrize(
    "of_gang",
    [
        {"resources": {"requests": {"cpu": "64", "memory": "512Gi"}}},
        {"schedulingGroup": {"podGroupName": "digits"}},
        {"workloadRef": {"name": "digits", "podGroup": "ranks"}},
        {"activeDeadlineSeconds": 3600},
    ],
    ids=["resources of a pod as a whole", "a group", "a group of Kubernetes 1.35", "a deadline"],
)
def test_the_pod_asks_for_nothing_that_is_for_the_gang_as_pods(of_gang: dict[str, Any]) -> None:
    """It would need a whole node for a download, or wait for pods that wait for it."""
    assert not of_gang.keys() & built(podTemplate={"spec": of_gang})["spec"].keys()


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({"nvidia.com/gpu": 8, "openshift.io/mlnx": 8}, False),
        ({"nvidia.com/gpu": 8, "cpu": 4}, True),
        ({"nvidia.com/mig-1g.5gb": 1}, True),
    ],
    ids=["devices", "none", "parts of a GPU"],
)
@pytest.mark.parametrize("place", ["resources", "podTemplate"])
def test_the_pod_has_no_network_whose_device_it_lacks(limits: dict[str, int], kept: bool, place: str) -> None:
    """The plugin of SR-IOV makes no sandbox for a pod without: "VF pci addr is required". Data comes over others."""
    template: dict[str, Any] = {"metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": "ib", "team": "ml"}}}
    spec: dict[str, Any] = {"resources": {"limits": limits}}
    if place == "podTemplate":
        template["spec"] = {"containers": [{"name": "trainer"} | spec]}
        spec = {"procsPerNode": 8}
    annotations = built(podTemplate=template, **spec)["metadata"]["annotations"]
    assert annotations["team"] == "ml"
    assert ("k8s.v1.cni.cncf.io/networks" in annotations) is kept


def test_the_pod_is_no_member_of_a_gang_of_yunikorn() -> None:
    """YuniKorn would hold the GPUs of the whole gang with pods of its own while data is fetched."""
    gang = {"yunikorn.apache.org/task-groups": "[]", "yunikorn.apache.org/task-group-name": "nodes"}
    labels = {"yunikorn.apache.org/app-id": "digits", "yunikorn.apache.org/queue": "root.ml"}
    metadata = built(podTemplate={"metadata": {"labels": labels, "annotations": gang | {"team": "ml"}}})["metadata"]
    assert metadata["annotations"] == {"team": "ml"}
    assert "yunikorn.apache.org/app-id" not in metadata["labels"]
    assert metadata["labels"]["yunikorn.apache.org/queue"] == "root.ml"


def test_defaults_of_the_namespace_count_here_too() -> None:
    defaults = Defaults(trainer_image="registry.example/trainer:3", resources={"limits": {"memory": "1Gi"}})
    (container,) = containers(built(defaults=defaults))
    assert (container["image"], container["resources"]) == ("registry.example/trainer:3", {"limits": {"memory": "1Gi"}})
    (container,) = containers(built(image="mine:1"))
    assert container["image"] == "mine:1"


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({}, ("", None)),
        ({"initContainerStatuses": [("dataset", 0)]}, ("dataset", 0)),
        ({"initContainerStatuses": [("dataset", 3)], "containerStatuses": [("model", None)]}, ("dataset", 3)),
        ({"initContainerStatuses": [("dataset", 0)], "containerStatuses": [("model", 1)]}, ("model", 1)),
        ({"initContainerStatuses": [("dataset", 0)], "containerStatuses": [("model", 0)]}, ("model", 0)),
    ],
    ids=["nothing has ended", "the first is done", "the first failed", "the last failed", "all are done"],
)
def test_which_initializer_ended_the_pod(status: dict[str, Any], expected: tuple[str, int | None]) -> None:
    wire = {
        kind: [
            {"name": name, "state": {} if code is None else {"terminated": {"exitCode": code}}} for name, code in found
        ]
        for kind, found in status.items()
    }
    view = parse_initializer({"metadata": built()["metadata"], "status": wire})
    assert view is not None
    assert (view.step, view.termination.exit_code if view.termination else None) == expected


def wired(first: dict[str, int | None], main: dict[str, int | None], phase: str) -> InitializerView:
    """The view of a pod whose containers have these exit codes, or run."""
    init, others = (
        [{"name": name, "state": {} if code is None else {"terminated": {"exitCode": code}}} for name, code in found]
        for found in (first.items(), main.items())
    )
    status = {"phase": phase, "initContainerStatuses": init, "containerStatuses": others}
    view = parse_initializer({"metadata": built(DATASET, MODEL)["metadata"], "status": status})
    assert view is not None
    return view


@pytest.mark.parametrize(
    ("first", "last", "phase", "over", "succeeded"),
    [
        pytest.param(0, 0, "Running", True, True, id="done, and the phase is about to follow"),
        pytest.param(0, 0, "Succeeded", True, True, id="done"),
        pytest.param(0, None, "Running", False, False, id="the last one runs"),
        pytest.param(0, None, "Failed", True, False, id="evicted before the last one began"),
        pytest.param(0, 1, "Running", True, False, id="the last one failed"),
    ],
)
def test_when_the_initializers_have_ended(
    first: int, last: int | None, phase: str, over: bool, succeeded: bool
) -> None:
    view = wired({"dataset": first}, {"model": last}, phase)
    assert (view.over, view.ended, view.succeeded) == (over, over, succeeded)


@pytest.mark.parametrize(
    ("last", "sidecar", "phase", "over", "ended", "succeeded"),
    [
        pytest.param(None, None, "Running", False, False, False, id="the last one runs"),
        pytest.param(0, None, "Running", True, False, True, id="done"),
        pytest.param(1, None, "Running", True, False, False, id="the last one failed"),
        pytest.param(64, None, "Running", True, False, False, id="the last one can never work"),
        pytest.param(None, 1, "Running", False, False, False, id="the sidecar failed, and the last one runs"),
        pytest.param(0, 1, "Failed", True, True, True, id="done, and the sidecar failed"),
        pytest.param(1, 0, "Failed", True, True, False, id="the last one failed, and the sidecar ended"),
    ],
)
def test_a_sidecar_that_a_webhook_injected_is_no_initializer(
    last: int | None, sidecar: int | None, phase: str, over: bool, ended: bool, succeeded: bool
) -> None:
    view = wired({"dataset": 0}, {"istio-proxy": sidecar, "model": last}, phase)
    assert (view.over, view.ended, view.succeeded) == (over, ended, succeeded)
    if last is not None:
        assert view.termination is not None
        assert (view.step, view.termination.exit_code) == ("model", last)


def test_a_sidecar_that_is_an_init_container_says_nothing_of_the_initializers() -> None:
    """With restartPolicy Always (KEP-753) it is stopped when the last one is done."""
    assert wired({"dataset": 0, "istio-proxy": 137}, {"model": 0}, "Running").succeeded


def test_a_pod_that_does_not_name_its_last_initializer_has_ended_when_all_its_containers_have() -> None:
    metadata = built()["metadata"]
    labels = {name: value for name, value in metadata["labels"].items() if "last" not in name}
    for sidecar, over in (({}, False), ({"terminated": {"exitCode": 0}}, True)):
        ends = [{"name": "dataset", "state": {"terminated": {"exitCode": 0}}}, {"name": "proxy", "state": sidecar}]
        status = {"phase": "Running", "containerStatuses": ends}
        view = parse_initializer({"metadata": metadata | {"labels": labels}, "status": status})
        assert view is not None
        assert view.over is over
