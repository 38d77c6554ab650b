"""What the API-server tests have in common: a namespace, the operator as a process, the pods' phases.

No kubelet runs here. A test says what a pod's node would have reported, by patching the pod's status; all else is the
real thing.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from tests.api_server.audit import Asked, AuditLog
from tests.api_server.forked import ForkedOperator, can_be_forked
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE_SECONDS, eventually_async

from ddpjob_operator.cluster import paths
from ddpjob_operator.runtime.client import Client
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.login import log_in

Object = dict[str, Any]

REPOSITORY = Path(__file__).parents[2]
OPERATOR_AGENT = "ddpjob-operator/"
CLI_AGENT = "ddpjob-cli/"
TEST_AGENT = "ddpjob-tests"
OPERATOR = (sys.executable, "-m", "ddpjob_operator.main")
OUTSIDE = ("leases", "events", "configmaps")
"""Resources whose calls are no part of what a job costs."""
NO_PROGRESS = {"PROGRESS_SECONDS": 3600}
"""For an operator whose writes are counted. By default, one whose pods take ten seconds from one phase to the next on a
busy machine writes in between how many are ready, as it should."""


@dataclass(eq=False)
class Cluster:
    """The API server, seen by a test that works in one namespace."""

    kubeconfig: Path
    client: Client
    namespace: str
    audit: AuditLog | None

    @classmethod
    async def connect(cls, kubeconfig: Path, namespace: str) -> Cluster:
        """A client of the test's own, so that its requests can be told from the operator's."""
        login = await log_in()
        client = Client(replace(login, headers={**login.headers, "User-Agent": TEST_AGENT}), in_flight=32)
        return cls(kubeconfig, client, namespace, AuditLog.beside(kubeconfig))

    async def create_namespace(self) -> None:
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}}
        await self.client.create("/api/v1/namespaces", "namespaces", body)
        account = f"/api/v1/namespaces/{self.namespace}/serviceaccounts/default"

        async def account_exists() -> bool:
            with suppress(ApiError):
                await self.client.get(account, "serviceaccounts")
                return True
            return False

        await eventually_async(
            account_exists, "the namespace has its default service account, without which pods are refused"
        )

    async def token(self, account: str) -> str:
        """Make a service account, and return a token of it."""
        accounts = f"/api/v1/namespaces/{self.namespace}/serviceaccounts"
        body = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account}}
        await self.client.create(accounts, "serviceaccounts", body)
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        answer = await self.client.create(f"{accounts}/{account}/token", "serviceaccounts/token", request)
        token: str = answer["status"]["token"]
        return token

    async def kubeconfig_of(self, account: str, path: Path) -> Path:
        """Make a service account, and write a kubeconfig with a token of it."""
        token = await self.token(account)
        configuration = yaml.safe_load(self.kubeconfig.read_text())
        configuration["users"] = [{"name": item["name"], "user": {"token": token}} for item in configuration["users"]]
        path.write_text(yaml.safe_dump(configuration))  # noqa: ASYNC240
        return path

    async def minor_version(self) -> int:
        """The 36 of Kubernetes 1.36."""
        version = await self.client.get("/version", "version")
        return int("".join(filter(str.isdigit, version["minor"])))  # "20+" on some distributions

    async def enforces_cel(self) -> bool:
        """Whether the API server checks the CRD's CEL rules, as each does by default since 1.25."""
        return await self.minor_version() >= 25

    async def delete_namespace(self) -> None:
        with suppress(ApiError):
            await self.client.delete(f"/api/v1/namespaces/{self.namespace}", "namespaces")

    async def apply_job(self, name: str = "digits", **spec: Any) -> Object:
        """Create a DDPJob whose pods no real kubelet will touch, should there be one."""
        spec.setdefault("nodes", 2)
        spec.setdefault("podTemplate", {"spec": {"schedulerName": "none"}})
        body = {
            "apiVersion": "training.ddpjob.io/v1alpha1",
            "kind": "DDPJob",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": spec,
        }
        return await self.client.create(paths.jobs(self.namespace), "ddpjobs", body)

    async def job(self, name: str = "digits") -> Object:
        return await self.client.get(f"{paths.jobs(self.namespace)}/{name}", "ddpjobs")

    async def status(self, name: str = "digits") -> Object:
        return (await self.job(name)).get("status") or {}

    async def edit_job(self, name: str = "digits", **spec: Any) -> Object:
        """Change fields of the spec; None takes one away."""
        return await self.client.merge_patch(f"{paths.jobs(self.namespace)}/{name}", "ddpjobs", {"spec": spec})

    async def condition(
        self, type_: str, reason: str, name: str = "digits", seconds: float = PATIENCE_SECONDS
    ) -> Object:
        """Wait until a condition of the job has this reason, and return it."""
        seen: list[Object] = []

        async def said() -> Object | None:
            seen[:] = (await self.status(name)).get("conditions") or []
            return next((item for item in seen if (item["type"], item["reason"]) == (type_, reason)), None)

        return await eventually_async(
            said, f"{name} says {type_}: {reason}", seconds, lambda: json.dumps(seen, indent=1)
        )

    async def delete_job(self, name: str = "digits") -> None:
        await self.client.delete(f"{paths.jobs(self.namespace)}/{name}", "ddpjobs")

    async def pods(self) -> list[Object]:
        """Pods of the namespace by name."""
        found = await self.client.list(paths.pods(self.namespace), "pods")
        return sorted(found[0], key=lambda pod: pod["metadata"]["name"])

    async def service(self, name: str = "digits-rdzv") -> Object:
        return await self.client.get(f"{paths.services(self.namespace)}/{name}", "services")

    async def phase_is(self, phase: str, name: str = "digits", seconds: float = PATIENCE_SECONDS) -> Object:
        """Wait for a phase and return the status."""
        seen: list[Object] = []

        async def reached() -> Object | None:
            seen[:] = [await self.status(name)]
            return seen[0] if seen[0].get("phase") == phase else None

        return await eventually_async(reached, f"{name} is {phase}", seconds, lambda: json.dumps(seen, indent=1))

    async def gang_exists(
        self,
        attempt: int = 0,
        nodes: int = 2,
        job: str = "digits",
        seconds: float = PATIENCE_SECONDS,
        owner: Object | None = None,
    ) -> list[Object]:
        """Wait until all pods of an attempt are there, and return them by node rank; only those of `owner`, where one
        of the same name has just been deleted.
        """
        names = {f"{job}-{attempt}-{rank}" for rank in range(nodes)}

        async def complete() -> list[Object] | None:
            found = [pod for pod in await self.pods() if pod["metadata"]["name"] in names]
            if owner is not None:
                uid = owner["metadata"]["uid"]
                found = [pod for pod in found if pod["metadata"]["ownerReferences"][0]["uid"] == uid]
            return found if len(found) == nodes else None

        return await eventually_async(complete, f"the {nodes} pods of attempt {attempt} exist", seconds)

    async def finalizers(self) -> list[str]:
        """Those of all pods of the namespace."""
        return [name for pod in await self.pods() for name in pod["metadata"].get("finalizers") or ()]

    async def released(self, seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until no pod has a finalizer: the operator removes it after the pod's end is on record in the status."""

        async def none_left() -> bool:
            return not await self.finalizers()

        await eventually_async(none_left, "no pod has a finalizer", seconds)

    async def reap(self, *pods: str) -> None:
        """The end of a deletion: the pods' node says that nothing of them is left."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0}
        for pod in pods:
            await self.client.delete(f"{paths.pods(self.namespace)}/{pod}", "pods", body)

    # What the pods' nodes would say.

    async def report(self, pod: str, status: Object) -> None:
        path = f"{paths.pods(self.namespace)}/{pod}/status"
        if "conditions" in status:
            # the controller manager takes back a DisruptionTarget that is older than two minutes, as one without a time
            status = status | {"conditions": [{"lastTransitionTime": _now()} | each for each in status["conditions"]]}
        await self.client.merge_patch(path, "pods/status", {"status": status})

    async def placed(self, *pods: str) -> None:
        """The scheduler found nodes for them."""
        for pod in pods:
            await self.report(pod, {"conditions": [_condition("PodScheduled", "True")]})

    async def bound(self, pod: str, node: str) -> None:
        """What the scheduler does: from then on a deletion waits for that node's kubelet."""
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target}
        await self.client.create(f"{paths.pods(self.namespace)}/{pod}/binding", "pods/binding", body)

    async def runs(self, *pods: str, ip: str = "192.0.2.1") -> None:
        conditions = [_condition(name, "True") for name in ("PodScheduled", "ContainersReady", "Ready")]
        trainer = {"name": "trainer", "image": "x", "imageID": "", "ready": True, "restartCount": 0}
        began = {"containerID": "containerd://1", "state": {"running": {"startedAt": _now()}}}
        status = {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "conditions": conditions}
        for pod in pods:
            await self.report(pod, status | {"containerStatuses": [trainer | began]})

    async def falls_silent(self, *pods: str) -> None:
        """Their node does not answer any more: its controller changes the condition Ready, and nothing else."""
        whole = [_condition(name, "True") for name in ("PodScheduled", "ContainersReady")]
        for pod in pods:
            await self.report(pod, {"conditions": [*whole, _condition("Ready", "False")]})

    async def warn_about(self, pod: Object, reason: str, message: str) -> None:
        """An event about the pod with this metadata, as a kubelet, a scheduler or an autoscaler posts it."""
        about = {"apiVersion": "v1", "kind": "Pod", "namespace": self.namespace, "name": pod["name"], "uid": pod["uid"]}
        said = {
            "type": "Warning",
            "reason": reason,
            "message": message,
            "firstTimestamp": _now(),
            "lastTimestamp": _now(),
        }
        event = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": f"{pod['name']}.1"}, "involvedObject": about}
        await self.client.create(f"/api/v1/namespaces/{self.namespace}/events", "events", event | said)

    async def ends(self, *pods: str, code: int = 0, message: Object | None = None, phase: str | None = None) -> None:
        """Their trainers exit. A kubelet since Kubernetes 1.27 says so while the phase is still Running."""
        terminated: Object = {"exitCode": code, "reason": "Error" if code else "Completed"}
        if message is not None:
            terminated["message"] = json.dumps(message)
        state = {"name": "trainer", "image": "x", "imageID": "", "ready": False, "restartCount": 0}
        for pod in pods:
            status = {"phase": phase or ("Failed" if code else "Succeeded"), "conditions": []}
            await self.report(pod, status | {"containerStatuses": [state | {"state": {"terminated": terminated}}]})

    async def asked(self, agent: str = OPERATOR_AGENT) -> list[Asked]:
        """All that the operator, or another agent, has asked about this namespace so far, in order of completion.

        What it is asking at this moment is waited for: a write can be seen before it is answered.
        """
        assert self.audit is not None, "this API server keeps no audit log beside its kubeconfig"
        log = self.audit
        # the log is in order, so once a request of ours is in it, so is everything that was answered before
        marker = f"marker-{os.urandom(6).hex()}"
        with suppress(ApiError):
            await self.client.get(f"/api/v1/namespaces/{self.namespace}/configmaps/{marker}", "configmaps")

        async def logged() -> list[Asked] | None:
            return log.asked(self.namespace, agent, marker)

        return await eventually_async(logged, "the audit log has caught up")

    async def cost(self) -> list[Asked]:
        """What the operator has asked on behalf of jobs: no watches, no lists, no Lease, no Events."""
        return [
            entry
            for entry in await self.asked()
            if entry.resource not in OUTSIDE and entry.verb not in ("watch", "list")
        ]


@dataclass(eq=False)
class Operator:
    """The operator as a process of its own, as it runs in a container."""

    namespace: str
    """That it serves; several are separated by commas."""
    kubeconfig: Path
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = OPERATOR
    port: int = 0
    """Of its metrics."""
    probe_port: int = 0
    process: asyncio.subprocess.Process | ForkedOperator | None = None
    forked: bool = False
    """Whether it need not be a new process."""

    async def start(self) -> Operator:
        """Start it; `ready` waits until it acts."""
        with self.log.open("ab") as log:
            if self.forked and can_be_forked(self.command):
                self.process = ForkedOperator(self.command, REPOSITORY, self.process_environment(), log.fileno())
                return self
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                cwd=REPOSITORY,
                env=self.process_environment(),
                stdout=log,
                stderr=log,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        return self

    def start_without_a_loop(self) -> subprocess.Popen[bytes]:
        """Start it as a process that no event loop waits for."""
        with self.log.open("ab") as log:
            return subprocess.Popen(
                self.command, cwd=REPOSITORY, env=self.process_environment(), stdout=log, stderr=log
            )

    def process_environment(self) -> dict[str, str]:
        """Of its process, with a new port."""
        self.port, self.probe_port = free_port(), free_port()
        given = {
            "NAMESPACES": self.namespace,
            "LEASE_NAMESPACE": self.namespace.partition(",")[0],
            "LOG_FORMAT": "plain",
            "LOG_LEVEL": "DEBUG",
            "PORT": str(self.port),
            "PROBE_PORT": str(self.probe_port),
            # a container that is started anew in its pod keeps its name, and with it the Lease
            "IDENTITY": "operator-0",
        } | self.environment
        clean = {name: value for name, value in os.environ.items() if not name.startswith("DDPJOB_")}
        own = {f"DDPJOB_OPERATOR_{name}": value for name, value in given.items()}
        return clean | own | {"KUBECONFIG": str(self.kubeconfig), "PYTHONPATH": str(REPOSITORY / "operator")}

    async def ready(self, seconds: float = PATIENCE_SECONDS) -> Operator:
        async def answers() -> bool:
            assert self.process is None or self.process.returncode is None, (
                f"the operator has ended:\n{self.log.read_text()[-4000:]}"
            )
            return (await self.probe("readyz"))[0] == 200

        await eventually_async(answers, "the operator is ready", seconds, lambda: self.log.read_text()[-4000:])
        return self

    async def probe(self, name: str) -> tuple[int, str]:
        """Status code and text of one of its HTTP endpoints; 0 while it does not answer."""
        port = self.port if name == "metrics" else self.probe_port
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session,
                session.get(f"http://127.0.0.1:{port}/{name}") as response,
            ):
                return response.status, await response.text()
        except (aiohttp.ClientError, TimeoutError):
            return 0, ""

    async def metrics(self) -> str:
        """Its page of metrics. A busy machine may need longer for one than a probe waits."""

        async def answered() -> str | None:
            status, page = await self.probe("metrics")
            return page if status == 200 else None

        said = "the operator shows its metrics"
        return await eventually_async(answered, said, instead=lambda: self.log.read_text()[-4000:])

    def resident_bytes(self) -> int:
        """Its memory now."""
        assert self.process is not None
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)

    async def kill(self) -> None:
        """As a node that loses power would."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
            await self.process.wait()

    async def stop(self, seconds: float = PATIENCE_SECONDS) -> int:
        """SIGTERM, and wait for the end."""
        assert self.process is not None
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(seconds):
                return await self.process.wait()
        except TimeoutError:
            self.signal(signal.SIGKILL)
            raise AssertionError(f"it did not stop:\n{self.log.read_text()[-4000:]}") from None


def _end_with_parent() -> None:
    """A test session that is killed, or ends by a timeout, leaves no operator behind."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _condition(type_: str, status: str) -> Object:
    return {"type": type_, "status": status}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
