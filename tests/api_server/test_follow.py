"""`ddpjob why` and `ddpjob logs` against a real API server, as a person types them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from contextlib import suppress
from typing import Any, NamedTuple

import pytest
import typer
import yaml
from tests.api_server.harness import Cluster, Operator
from tests.api_server.test_postmortem import fail_on_node_rank_1
from tests.support.command import COMMAND, beside, to_cluster
from tests.support.terminal import all_shown
from tests.support.waiting import PATIENCE_SECONDS, eventually_async
from typer.testing import CliRunner

from ddpjob_operator.cli import completion
from ddpjob_operator.cli.main import app
from ddpjob_operator.cluster import paths
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.settings import VERSION


class Answer(NamedTuple):
    code: int | None
    out: str
    err: str


async def ddpjob(cluster: Cluster, *arguments: str) -> Answer:
    """The command in this process, which costs a tenth of one of its own. One at a time: it has the output."""
    assert os.environ["KUBECONFIG"] == str(cluster.kubeconfig)
    return await answer_to(*arguments)


async def answer_to(*arguments: str) -> Answer:
    """The same against the cluster, and as the user, that the environment names."""
    done = await asyncio.wait_for(asyncio.to_thread(CliRunner().invoke, app, arguments), PATIENCE_SECONDS)
    return Answer(done.exit_code, done.stdout, done.stderr)


async def alone(cluster: Cluster, *arguments: str) -> Answer:
    """The command as a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *beside(),
        *arguments,
        env=to_cluster(cluster.kubeconfig),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), PATIENCE_SECONDS)
    return Answer(process.returncode, out.decode(), err.decode())


async def snapshots_are_looked_at(cluster: Cluster) -> None:
    """What `ddpjob snapshots` does about a job that runs: the pod that it makes is not taken for one of the gang."""
    of_job = ("digits", "-n", cluster.namespace)
    recorded = await ddpjob(cluster, "snapshots", "ls", *of_job)
    assert (recorded.code, recorded.out) == (0, "no snapshot of digits is on record\n")
    for command, changed in (("rm", "removed"), ("restore", "restored")):
        refused = await ddpjob(cluster, "snapshots", command, *of_job, "--step", "3")
        assert refused.code == 2
        assert refused.err.startswith(f"error: snapshots of digits cannot be {changed} now: its pods ")
        assert refused.err.endswith("use them; ddpjob suspend digits first\n")

    reader = await started_and_stopped(cluster, "snapshots", "snapshots", "verify", *of_job)
    assert reader["spec"]["volumes"][0]["persistentVolumeClaim"] == {"claimName": "digits-shared"}
    assert reader["spec"]["containers"][0]["image"].startswith("localhost/ddpjob-trainer:")


async def started_and_stopped(cluster: Cluster, role: str, *command: str) -> dict[str, Any]:
    """The pod that a command starts to read a volume. Nothing runs it here: a person waits, and presses Ctrl-C."""

    async def readers() -> list[dict[str, Any]]:
        pods = await cluster.pods()
        return [pod for pod in pods if pod["metadata"]["labels"].get("training.ddpjob.io/role") == role]

    process = await asyncio.create_subprocess_exec(
        *(*beside(), *command),
        env=to_cluster(cluster.kubeconfig),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    (reader,) = await eventually_async(readers, "a pod reads the volume")
    assert process.stderr is not None
    said = b""
    while b"waiting for pod" not in said:
        said += await asyncio.wait_for(process.stderr.readline(), PATIENCE_SECONDS)
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(process.communicate(), PATIENCE_SECONDS)
    assert process.returncode == 130, err
    assert f"ddpjob: stopped; pod {reader['metadata']['name']} is deleted\n" == err.decode()
    assert await readers() == []
    return reader


async def typed(cluster: Cluster, answer: str, *arguments: str) -> Answer:
    """The same on a terminal, where a person types `answer`."""
    ours, theirs = os.openpty()
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, env=to_cluster(cluster.kubeconfig), stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    os.write(ours, answer.encode())
    await asyncio.wait_for(process.wait(), PATIENCE_SECONDS)
    return Answer(process.returncode, all_shown(ours), "")


async def test_a_job_of_which_there_is_none_is_one_line_with_those_that_there_are(cluster: Cluster) -> None:
    space = ("--namespace", cluster.namespace)
    none = await alone(cluster, "why", "digitz", *space)
    assert (none.code, none.out) == (2, "")
    assert none.err == (
        f"error: there is no DDPJob digitz in namespace {cluster.namespace}; it has none; name another one with "
        "--namespace\n"
    )
    empty = await ddpjob(cluster, "ls", *space)
    assert (empty.code, empty.out) == (0, "")
    assert empty.err == (
        f"there is no DDPJob in namespace {cluster.namespace}; see all namespaces with -A, or name one with -n\n"
    )
    version = await ddpjob(cluster, "version")
    assert version.out == (
        f"Client Version: {VERSION}\nOperator Version: none: the cluster has no Deployment of ddpjob-operator\n"
    )
    await cluster.apply_job()
    some = await ddpjob(cluster, "logs", "digitz", *space)
    assert (some.code, some.out) == (2, "")
    assert "it has digits" in some.err
    elsewhere = await ddpjob(cluster, "why", "digits", "--context", "no-such-context")
    assert elsewhere.code == 2
    assert "no-such-context" in elsewhere.err
    unseen = await ddpjob(cluster, "why", "digits", *space)
    assert unseen.code == 0
    assert "no operator has acted on it" in unseen.out


async def test_a_job_that_failed_and_one_that_waits_are_explained(
    cluster: Cluster, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = ("-n", cluster.namespace)
    await fail_on_node_rank_1(cluster, cleanPodPolicy="All")
    answer = await ddpjob(cluster, "why", "digits", *space, "-o", "json")
    assert answer.code == 0
    found = json.loads(answer.out)
    sections = {section["title"]: section["lines"] for section in found["sections"]}
    assert found["headline"].startswith("digits: Failed (BackoffLimitExceeded)")
    assert "CUDA out of memory" in "\n".join(sections["Cause"])
    assert "reduce the micro-batch" in "\n".join(sections["What to do"])

    # its pods are gone
    asked = ("--rank", "1", "--grep", "loss")
    reader = await started_and_stopped(cluster, "logs", "logs", "digits", *space, *asked)
    container = reader["spec"]["containers"][0]
    assert container["args"] == ["/mnt/shared", "digits", "--attempt=0", "--rank=1", "--grep=loss"]
    assert container["volumeMounts"][0]["readOnly"] is True

    await cluster.apply_job("other", shared={"retain": False})

    async def waits() -> Answer | None:
        answer = await ddpjob(cluster, "why", "other", *space)
        return answer if "other-0-0, other-0-1: no node yet" in answer.out else None

    waiting = await eventually_async(waits, "both pods of the other job are said to wait")
    assert "other: Starting for" in waiting.out
    assert "0 of 2 pods are ready" in waiting.out
    unread = await ddpjob(cluster, "logs", "other", *space)
    assert (unread.code, unread.out) == (0, "")
    assert "no pod of the job has started; ddpjob why other says why" in unread.err

    listed = await ddpjob(cluster, "ls", *space)
    heading, *rows = (line.split() for line in listed.out.splitlines())
    failed, starting = sorted(rows)
    assert heading == ["NAME", "PHASE", "NODES", "PROGRESS", "ETA", "RESTARTS", "REASON", "AGE"]
    assert starting[:3] == ["other", "Starting", "0/2"]
    assert (failed[:2], failed[-2]) == (["digits", "Failed"], "BackoffLimitExceeded")
    names = (await ddpjob(cluster, "ls", *space, "-o", "name")).out.splitlines()
    assert sorted(names) == ["ddpjob.training.ddpjob.io/digits", "ddpjob.training.ddpjob.io/other"]
    everywhere = json.loads((await ddpjob(cluster, "ls", "-A", "-o", "json")).out)
    assert cluster.namespace in {job["metadata"]["namespace"] for job in everywhere["items"]}
    whole = yaml.safe_load((await ddpjob(cluster, "get", "digits", *space, "-o", "yaml")).out)
    assert (whole["kind"], whole["status"]["phase"]) == ("DDPJob", "Failed")
    one = await ddpjob(cluster, "get", "digits", *space)
    assert one.out.startswith("digits: Failed (BackoffLimitExceeded)\n")
    assert "CUDA out of memory" in one.out

    # in this process, and with more time than a person waits, which a busy machine needs
    monkeypatch.setattr(completion, "SECONDS_FOR_NAMES", PATIENCE_SECONDS)
    root = typer.main.get_command(app)
    found = await asyncio.to_thread(completion.complete, root, ["get", *space, "o"])
    assert found == [completion.Candidate("other", "Starting")]
    over = await ddpjob(cluster, "cancel", "digits", *space)
    assert (over.code, over.err) == (
        2,
        "error: digits has failed, so there is nothing to cancel; kubectl delete ddpjob digits removes its record\n",
    )
    spared = await typed(cluster, "n\n", "cancel", "other", *space)
    assert spared.code == 1, spared
    assert "Its volume is deleted with it, with all snapshots" in spared.out
    assert spared.out.endswith("other goes on\r\n")
    cancelling = asyncio.create_task(alone(cluster, "cancel", "other", *space, "--keep", "--wait"))

    async def deleted() -> bool:
        return "other" not in (await ddpjob(cluster, "ls", *space)).out

    await eventually_async(deleted, "the job is deleted")
    for pod in ("other-0-0", "other-0-1"):
        with suppress(ApiError):  # the garbage collector, which takes a while to find our kind, was first
            await cluster.reap(pod)
    cancelled = await cancelling
    assert cancelled.code == 0, cancelled
    assert "kept: claim other-shared" in cancelled.out
    assert cancelled.out.endswith("no pod of other is left\n")
    claim = await cluster.client.get(f"{paths.claims(cluster.namespace)}/other-shared", "persistentvolumeclaims")
    assert not claim["metadata"].get("ownerReferences")
    gone = await ddpjob(cluster, "get", "other", *space)
    assert "there is no DDPJob other" in gone.err
    reader = await started_and_stopped(cluster, "logs", "logs", "other", *space)
    assert reader["spec"]["containers"][0]["image"].startswith("localhost/ddpjob-trainer:")
    assert reader["metadata"]["ownerReferences"][0]["uid"] == claim["metadata"]["uid"]
    elsewhere = await ddpjob(cluster, "logs", "other", *space, "--claim", "others")
    assert (elsewhere.code, elsewhere.out) == (2, "")
    assert f"there is no claim others in namespace {cluster.namespace}: the volume is gone" in elsewhere.err


async def test_a_job_is_suspended_resumed_and_watched_to_its_end(cluster: Cluster, operator: Operator) -> None:
    of_job = ("digits", "-n", cluster.namespace)
    await cluster.apply_job()
    await cluster.gang_exists()
    refused = await ddpjob(cluster, "scale", *of_job, "--nodes", "3")
    assert (refused.code, refused.err) == (
        2,
        "error: digits is not elastic, so its nodes cannot change; delete it and apply it with spec.elastic\n",
    )
    assert await ddpjob(cluster, "suspend", *of_job) == (
        0,
        "digits is suspended: its pods save a snapshot and end\n",
        "",
    )
    await cluster.phase_is("Suspended")
    paused = await ddpjob(cluster, "why", *of_job)
    assert paused.out.startswith("digits: Suspended for ")
    assert (await ddpjob(cluster, "unsuspend", *of_job)).code == 0
    watching = asyncio.create_task(alone(cluster, "watch", *of_job))
    following = asyncio.create_task(alone(cluster, "events", *of_job, "--follow"))
    pods = [pod["metadata"]["name"] for pod in await cluster.gang_exists(1)]
    await cluster.runs(*pods)
    await cluster.phase_is("Running")
    await snapshots_are_looked_at(cluster)
    await cluster.ends(*pods)
    await cluster.phase_is("Succeeded")
    seen = await watching
    assert seen.code == 0, seen
    assert "Succeeded: restarts 0" in seen.out
    followed = await following
    assert followed.code == 0, followed
    reasons = [re.sub(r"^\S+ job: (Warning )?|:.*", "", line) for line in followed.out.splitlines()]
    assert reasons[0] == "Starting"
    assert reasons.index("Suspended") < reasons.index("Resumed") < reasons.index("Succeeded"), reasons
    objects = (await ddpjob(cluster, "events", *of_job, "-o", "json")).out.splitlines()
    assert {json.loads(line)["reason"] for line in objects} == set(reasons)
    late = await ddpjob(cluster, "suspend", *of_job)
    assert (late.code, late.err) == (2, "error: digits has succeeded: it cannot be changed any more\n")
