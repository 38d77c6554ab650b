"""Which pod `ddpjob debug` takes for the one that failed, and what it makes it from."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from ddpjob_operator.api.status import DDPJobStatus
from ddpjob_operator.core.values.job import Job
from ddpjob_operator.follow.debug import Failed, as_text, failed_pod, in_words, pod_of, shell_command
from ddpjob_operator.wire.jobs import parse_job

NOW = datetime(2030, 1, 1, 12, 0, tzinfo=UTC)


def job(failure: dict[str, Any] | None = None, **spec: Any) -> Job:
    made = parse_job(
        {
            "metadata": {"name": "digits", "namespace": "ml", "uid": "u", "creationTimestamp": NOW.isoformat()},
            "spec": spec,
        }
    )
    last = None if failure is None else {"attempt": 2, "time": NOW, "reason": "WorkerException"} | failure
    return replace(made, status=DDPJobStatus.model_validate({"lastFailure": last}))


def pod(name: str, phase: str = "Failed", node: str = "worker-1") -> dict[str, Any]:
    _, attempt, rank = name.split("-")
    labels = {"training.ddpjob.io/attempt": attempt, "training.ddpjob.io/node-rank": rank}
    metadata = {"name": name, "labels": labels, "creationTimestamp": f"2030-01-01T12:0{attempt}:00Z"}
    spec = {
        "nodeName": node,
        "containers": [{"name": "trainer", "image": "old:1"}, {"name": "side", "image": "side:1"}],
    }
    return {"metadata": metadata, "spec": spec, "status": {"phase": phase}}


def test_the_pod_of_the_last_failure_is_taken_not_another_that_failed_with_it() -> None:
    pods = [pod("digits-2-0"), pod("digits-2-1", node="worker-3")]
    found = failed_pod(job({"podName": "digits-2-1", "nodeRank": 1, "nodeName": "worker-3"}), pods)
    assert found == Failed(2, 1, "worker-3", pods[1])
    assert in_words(found, found.node) == "like that of node rank 1, attempt 2, on its node worker-3"


def test_of_a_pod_that_is_gone_attempt_rank_and_node_are_on_record() -> None:
    found = failed_pod(
        job({"podName": "digits-2-1", "nodeRank": 1, "nodeName": "worker-3"}), [pod("digits-3-0", "Running")]
    )
    assert found == Failed(2, 1, "worker-3", None)
    assert in_words(found, None).endswith("on any node, as the job is written now: the pod itself is gone")


def test_a_failure_of_no_pod_in_particular_leads_to_the_newest_that_failed() -> None:
    found = failed_pod(job({}), [pod("digits-1-0"), pod("digits-2-1"), pod("digits-3-0", "Running")])
    assert found is not None
    assert (found.attempt, found.node_rank, found.node) == (2, 1, "worker-1")
    assert failed_pod(job({}), []) == Failed(2, 0, None, None)


def test_where_nothing_has_failed_there_is_nothing_to_debug() -> None:
    assert failed_pod(job(), [pod("digits-0-0", "Running")]) is None


@pytest.mark.parametrize("reason", ["BeyondBounds", "InvalidSpec"])
def test_no_pod_is_made_from_a_job_that_was_refused(reason: str) -> None:
    """The person who asks may be allowed what the bounds forbid its author."""
    assert failed_pod(job({"reason": reason}), []) is None
    found = failed_pod(job({"reason": reason}), [pod("digits-1-0")])
    assert found is not None
    assert found.pod is not None, "of an attempt before, as the API server has it"


def test_a_pod_that_is_there_is_taken_as_it_is_with_the_wanted_image() -> None:
    found = Failed(2, 1, "worker-3", pod("digits-2-1"))
    images = [item["image"] for item in pod_of(found, job(image="new:2"), "tools:1")["spec"]["containers"]]
    assert images == ["tools:1", "side:1"]


def test_a_pod_that_is_gone_is_made_from_the_job_as_the_operator_would_also_beyond_the_default_bounds() -> None:
    privileged = {"spec": {"containers": [{"name": "trainer", "securityContext": {"privileged": True}}]}}
    env = [{"name": "LR", "value": "1"}]
    made = pod_of(Failed(2, 1, None, None), job(nodes=2, env=env, podTemplate=privileged), "trainer:1")
    (container,) = made["spec"]["containers"]
    values = {item["name"]: item.get("value") for item in container["env"]}
    assert (values["DDPJOB_ATTEMPT"], values["DDPJOB_NODE_RANK"], values["LR"]) == ("2", "1", "1")
    assert container["image"] == "trainer:1"
    assert container["securityContext"]["privileged"] is True


@pytest.mark.parametrize(
    ("context", "text"),
    [
        (None, "kubectl exec -it -n ml digits-debug-x -c trainer -- sh"),
        ("my cluster", "kubectl --context 'my cluster' exec -it -n ml digits-debug-x -c trainer -- sh"),
    ],
)
def test_the_command_can_be_copied(context: str | None, text: str) -> None:
    assert as_text(shell_command("ml", "digits-debug-x", context, job())) == text


def test_a_shell_for_submitted_code_begins_in_the_folder_of_the_script() -> None:
    submitted = job(code={"sha256": "0" * 64, "bytes": 1, "configMaps": ["code-0"]}, entrypoint={"script": "train.py"})
    text = as_text(shell_command("ml", "x", None, submitted))
    assert text == "kubectl exec -it -n ml x -c trainer -- sh -c 'cd /mnt/shared/work/digits; exec sh'"


def test_a_shell_for_code_with_requirements_has_their_packages() -> None:
    code = {"sha256": "0" * 64, "bytes": 1, "configMaps": ["code-0"], "requirements": "requirements.txt"}
    text = as_text(shell_command("ml", "x", None, job(code=code, entrypoint={"script": "train.py"})))
    assert "PATH=/mnt/shared/work/.digits/environment/bin:$PATH; exec sh" in text
