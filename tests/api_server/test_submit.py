"""`ddpjob submit` and `ddpjob code` against a real API server, by an account with the right to do only that."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from tests.api_server.harness import Cluster, Object, Operator
from tests.api_server.rights import in_force
from tests.cluster.audit import FORBID, audit_log, granted, requests
from tests.support.command import beside, to_cluster
from tests.support.tiers import cannot_run
from tests.support.waiting import PATIENCE_SECONDS, eventually_async
from typer.testing import CliRunner

from ddpjob import AsyncJob, DDPJob
from ddpjob_operator.cli.main import app
from ddpjob_operator.cluster import paths
from ddpjob_operator.runtime.errors import ApiError

ROLE = Path(__file__).parents[2] / "charts/ddpjob-operator/files/rbac/submit.yaml"
RBAC = "rbac.authorization.k8s.io"
JOBS = "ddpjobs.training.ddpjob.io"


@dataclass(frozen=True, slots=True)
class Submitter:
    """A person in a folder of code."""

    cluster: Cluster
    kubeconfig: Path
    folder: Path
    since: datetime

    async def __call__(self, command: str, *arguments: str, code: int = 0) -> str:
        """Run `ddpjob` in this process, which costs a tenth of one of its own, and return what it prints."""
        words = (command, "-n", self.cluster.namespace, *arguments)
        with patch.dict(os.environ, {"KUBECONFIG": str(self.kubeconfig)}):
            done = await asyncio.wait_for(asyncio.to_thread(CliRunner().invoke, app, words), PATIENCE_SECONDS)
        assert done.exit_code == code, done.output
        return str(done.output)

    async def beside(self, command: str, *arguments: str) -> str:
        """The same in a process of its own, so that others may run meanwhile."""
        process = await asyncio.create_subprocess_exec(
            *beside(),
            command,
            "-n",
            self.cluster.namespace,
            *arguments,
            cwd=self.folder,
            env=to_cluster(self.kubeconfig),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await asyncio.wait_for(process.communicate(), PATIENCE_SECONDS)
        assert process.returncode == 0, out.decode()
        return out.decode()

    @property
    def user(self) -> str:
        return f"system:serviceaccount:{self.cluster.namespace}:submitter"


@pytest.fixture
async def ddpjob(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Submitter:
    role, binding = (f"/apis/{RBAC}/v1/namespaces/{cluster.namespace}/{kind}" for kind in ("roles", "rolebindings"))
    kubeconfig = await cluster.kubeconfig_of("submitter", tmp_path / "kubeconfig")
    rules = {"metadata": {"name": "submit"}, "rules": yaml.safe_load(ROLE.read_text())}
    await cluster.client.create(role, "roles", rules)
    of_account = {
        "metadata": {"name": "submit"},
        "roleRef": {"apiGroup": RBAC, "kind": "Role", "name": "submit"},
        "subjects": [{"kind": "ServiceAccount", "name": "submitter", "namespace": cluster.namespace}],
    }
    await cluster.client.create(binding, "rolebindings", of_account)
    await in_force(cluster, "submitter", "create", JOBS)
    folder = tmp_path / "project"
    (folder / "pkg").mkdir(parents=True)
    (folder / "train.py").write_text("import pkg.model")
    (folder / "pkg" / "model.py").write_text("layers = 2")
    (folder / ".env").write_text("TOKEN=secret")
    monkeypatch.chdir(folder)
    return Submitter(cluster, kubeconfig, folder, datetime.now(UTC))


async def config_maps(cluster: Cluster) -> list[Object]:
    path = f"/api/v1/namespaces/{cluster.namespace}/configmaps"
    found, _ = await cluster.client.list(path, "configmaps", labelSelector="training.ddpjob.io/code=true")
    return found


def owners(config_map: Object) -> set[str]:
    return {owner["name"] for owner in config_map["metadata"].get("ownerReferences") or ()}


def unschedulable(folder: Path, **spec: Any) -> str:
    """A file with a job that no kubelet touches."""
    (folder / "job.yaml").write_text(
        yaml.safe_dump(
            {
                "apiVersion": "training.ddpjob.io/v1alpha1",
                "kind": "DDPJob",
                "metadata": {"name": "second"},
                "spec": {
                    "code": {"path": "."},
                    "entrypoint": {"script": "train.py"},
                    "podTemplate": {"spec": {"schedulerName": "none"}},
                    **spec,
                },
            }
        )
    )
    return "job.yaml"


async def test_a_folder_is_sent_once_belongs_to_its_jobs_and_comes_back(
    cluster: Cluster, operator: Operator, ddpjob: Submitter, tmp_path: Path
) -> None:
    said = await ddpjob("submit", "train.py", "--nodes", "2", "--name", "first", "--detach", "--", "--lr", "3e-4")
    assert "left out: .env: may be a secret" in said
    assert "2 files, 1 kB (1 kB sent)" in said
    assert f"first is created: 2 nodes x 1 rank = 2 ranks in namespace {cluster.namespace}" in said
    (sent,) = await config_maps(cluster)
    assert (sent["immutable"], owners(sent)) == (True, {"first"})
    pods = await cluster.gang_exists(job="first")
    spec = pods[1]["spec"]
    (volume,) = (volume for volume in spec["volumes"] if volume["name"] == "ddpjob-code")
    assert [source["configMap"]["name"] for source in volume["projected"]["sources"]] == [sent["metadata"]["name"]]
    started = await cluster.job("first")
    assert started["status"]["codeDigest"] == started["spec"]["code"]["sha256"]
    (trainer,) = spec["containers"]
    assert trainer["args"] == ["--script", "train.py", "--", "--lr", "3e-4"]

    # another job with the same code sends nothing, and is an owner too
    file = unschedulable(ddpjob.folder)
    (ddpjob.folder / ".ddpjobignore").write_text("job.yaml\n.ddpjobignore\n")
    assert "already there" in await ddpjob("submit", file, "-d")
    (shared,) = await config_maps(cluster)
    assert owners(shared) == {"first", "second"}

    got = await ddpjob("code", "second", "--to", str(tmp_path / "back"))
    assert "2 files" in got
    assert (tmp_path / "back" / "pkg" / "model.py").read_text() == "layers = 2"
    assert not (tmp_path / "back" / ".env").exists()
    assert "exists; name a new folder" in await ddpjob("code", "second", "--to", str(tmp_path / "back"), code=2)

    # one that has not finished is replaced only if that is what is wanted
    (ddpjob.folder / "pkg" / "model.py").write_text("layers = 3")
    refused = await ddpjob("submit", "train.py", "--name", "first", "-d", code=2)
    assert "the job first exists and is Starting" in refused
    assert "--replace" in refused
    assert "created, in place of the one that was Starting" in await ddpjob(
        "submit", "train.py", "--name", "first", "-d", "--replace"
    )
    # code that is there already must outlive the job that it is taken from
    for _ in range(3):
        again = await ddpjob("submit", "train.py", "--name", "first", "-d", "--replace")
        assert "already there" in again
    job = await cluster.job("first")
    (name,) = job["spec"]["code"]["configMaps"]
    (kept,) = [found for found in await config_maps(cluster) if found["metadata"]["name"] == name]
    assert [owner["uid"] for owner in kept["metadata"]["ownerReferences"]] == [job["metadata"]["uid"]]
    assert "layers = 3" in await back(ddpjob, tmp_path / "third")


async def back(ddpjob: Submitter, folder: Path) -> str:
    await ddpjob("code", "first", "--to", str(folder))
    return (folder / "pkg" / "model.py").read_text()


async def test_the_role_for_submitting_has_every_right_that_is_needed_and_no_other(
    cluster: Cluster, operator: Operator, ddpjob: Submitter
) -> None:
    if not audit_log(cluster.kubeconfig):
        cannot_run("api", "the audit log of this cluster's API server cannot be read from here")
    used: list[Any] = []

    async def logged(permission: str, times: int = 1) -> None:
        async def is_there() -> bool:
            files = audit_log(cluster.kubeconfig)  # anew: the API server begins another one when this is full
            used[:] = requests(files, ddpjob.user, ddpjob.since)
            return sum(str(request.permission) == permission for request in used) >= times

        await eventually_async(is_there, f"the audit log has {permission}")

    file = unschedulable(ddpjob.folder, nodes=2, elastic={"minNodes": 1})
    await ddpjob("submit", file, "--detach")
    pods = [pod["metadata"]["name"] for pod in await cluster.gang_exists(job="second")]
    await cluster.runs(*pods)
    # of a job that has ended, whose pods may be gone, the logs would be on the volume
    followed = asyncio.create_task(ddpjob.beside("logs", "second", "-f"))
    await logged("get pods/log")
    for command in (("ls",), ("get", "second"), ("why", "second"), ("events", "second"), ("logs", "second")):
        await ddpjob(*command)
    watched = asyncio.create_task(ddpjob.beside("watch", "second"))
    await cluster.ends(*pods)
    assert "Succeeded" in await watched
    await followed
    await ddpjob("submit", file, "--detach", "--replace")
    await ddpjob("suspend", "second")
    await ddpjob("unsuspend", "second")
    await ddpjob("scale", "second", "--nodes", "1")
    await ddpjob("code", "second")
    await ddpjob("cancel", "second", "--yes")
    await logged("delete ddpjobs.training.ddpjob.io", times=2)
    role = granted([{"rules": yaml.safe_load(ROLE.read_text())}])
    # what each rank reports is asked of its pod by who may; `why` says which right that takes
    assert {str(request.permission) for request in used if request.decision == FORBID} <= {"get pods/proxy"}
    # this one is used where OwnerReferencesPermissionEnforcement is on, as it is on OpenShift
    unused = {str(permission) for permission in role - {request.permission for request in used}}
    assert unused == {"delete configmaps"}


async def test_with_asyncio_a_job_is_submitted_found_again_changed_and_waited_for(
    cluster: Cluster, operator: Operator, ddpjob: Submitter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", os.fspath(ddpjob.kubeconfig))
    job = DDPJob(script="train.py", name="first", nodes=2, folder=ddpjob.folder, spec={"elastic": {"minNodes": 1}})
    async with await job.submit_async(namespace=cluster.namespace) as submitted:
        pods = [pod["metadata"]["name"] for pod in await cluster.gang_exists(job="first")]
        assert pods == ["first-0-0", "first-0-1"]
        assert submitted.name == "first"
    async with await AsyncJob.get("first", namespace=cluster.namespace) as found:
        await cluster.runs(*pods)
        assert (await cluster.phase_is("Running", "first"))["nodes"]["total"] == 2
        assert (await found.why()).headline.startswith("first: Running")
        with pytest.raises(TimeoutError):
            await found.wait(0.1)
        await cluster.ends(*pods)
        assert (await found.wait(PATIENCE_SECONDS)).phase == "Succeeded"
    with pytest.raises(ApiError, match="there is no DDPJob second"):
        await AsyncJob.get("second", namespace=cluster.namespace)


WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"


@asynccontextmanager
async def refused_by_a_webhook(cluster: Cluster, job: Object) -> AsyncIterator[None]:
    """Every new DDPJob of the namespace, such as this one: nothing answers at the address of the webhook."""
    client, namespace = cluster.client, cluster.namespace
    label = {"team": namespace}
    await client.merge_patch(f"/api/v1/namespaces/{namespace}", "namespaces", {"metadata": {"labels": label}})
    created = {"apiGroups": ["training.ddpjob.io"], "apiVersions": ["*"], "resources": ["ddpjobs"]}
    webhook = {
        "name": "jobs.example.com",
        "clientConfig": {"url": "https://127.0.0.1:1/"},
        "rules": [{**created, "operations": ["CREATE"]}],
        "namespaceSelector": {"matchLabels": label},
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 1,
    }
    trial = {**job, "metadata": {"name": "trial", "namespace": namespace}}

    async def is_refused() -> bool:
        with suppress(ApiError):
            await client.create(paths.jobs(namespace), "ddpjobs", trial, dry_run=True)
            return False
        return True

    body = {"metadata": {"name": namespace}, "webhooks": [webhook]}
    await client.create(WEBHOOKS, "validatingwebhookconfigurations", body)
    try:
        await eventually_async(is_refused, "the webhook is called")
        yield
    finally:
        await client.delete(f"{WEBHOOKS}/{namespace}", "validatingwebhookconfigurations")


async def test_a_refusal_leaves_the_job_that_was_to_be_replaced_as_it_was(cluster: Cluster, ddpjob: Submitter) -> None:
    submit = ("submit", "train.py", "--name", "first", "-d", "--replace")
    await ddpjob(*submit)
    job, (code,) = await cluster.job("first"), await config_maps(cluster)

    # its deletion is refused: it still is an owner of the code that both have
    role = f"/apis/{RBAC}/v1/namespaces/{cluster.namespace}/roles/submit"
    rules = yaml.safe_load(ROLE.read_text())
    fewer = [{**rule, "verbs": [verb for verb in rule["verbs"] if verb != "delete"]} for rule in rules]
    await cluster.client.merge_patch(role, "roles", {"rules": fewer})
    await in_force(cluster, "submitter", "delete", JOBS, granted=False)
    assert "cannot delete resource" in await ddpjob(*submit, code=2)
    await cluster.client.merge_patch(role, "roles", {"rules": rules})
    await in_force(cluster, "submitter", "delete", JOBS)
    assert await cluster.job("first") == job
    (kept,) = await config_maps(cluster)
    assert kept["metadata"]["ownerReferences"] == code["metadata"]["ownerReferences"]

    # the new one is refused: nothing is sent, and nothing deleted
    (ddpjob.folder / "pkg" / "model.py").write_text("layers = 3")
    async with refused_by_a_webhook(cluster, job):
        said = await ddpjob(*submit, code=2)
    assert 'failed calling webhook "jobs.example.com"' in said
    assert await cluster.job("first") == job
    assert await config_maps(cluster) == [kept]


async def test_without_rights_nothing_is_left_behind(cluster: Cluster, ddpjob: Submitter) -> None:
    """Code is sent first, so what may not be created is known before anything is deleted."""
    role = f"/apis/{RBAC}/v1/namespaces/{cluster.namespace}/roles/submit"
    rules = [rule for rule in yaml.safe_load(ROLE.read_text()) if "configmaps" not in rule["resources"]]
    await cluster.client.merge_patch(role, "roles", {"rules": rules})
    await in_force(cluster, "submitter", "get", "configmaps", granted=False)
    said = await ddpjob("submit", "train.py", "-d", code=2)
    assert "cannot get resource" in said
    assert "configmaps" in said
    assert await config_maps(cluster) == []
    assert (await cluster.client.list(paths.jobs(cluster.namespace), "ddpjobs"))[0] == []
