"""A job's initializers on this machine: the containers of their pod, one after the other, as processes."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from datetime import datetime

from ddpjob_operator.core.values.job import Manifest
from ddpjob_operator.core.values.names import LABEL_ATTEMPT
from ddpjob_operator.core.values.observed import InitializerView, PodPhase
from ddpjob_operator.local.environment import Endpoints, Machine, build_command
from ddpjob_operator.local.processes import LocalPod, make_scratch
from ddpjob_operator.local.volume import pod_log


def initializer_containers(manifest: Manifest) -> tuple[Manifest, ...]:
    """The containers of the initializers' pod in the order in which a kubelet runs them."""
    spec = manifest["spec"]
    return (*spec.get("initContainers", ()), *spec["containers"])


class LocalInitializer:
    """The pod that prepares the volume: each container is run to its end, the first that fails ends the pod.

    `changed` is called whenever what `view()` says may have changed.
    """

    def __init__(self, manifest: Manifest, job: str, machine: Machine, changed: Callable[[], None]) -> None:
        self.name: str = manifest["metadata"]["name"]
        self.uid = str(uuid.uuid4())
        self.grace_seconds = float(manifest["spec"]["terminationGracePeriodSeconds"])
        self.deleting = False
        self.gone_by: datetime | None = None
        self._number = int(manifest["metadata"]["labels"][LABEL_ATTEMPT])
        self._manifest = manifest
        self._log = pod_log(machine.shared, job, self.name)
        self._machine = machine
        self._changed = changed
        self._current: LocalPod | None = None
        self._step = ""
        self._stopping = False
        self._task = asyncio.create_task(self._run(), name=f"run {self.name}")
        self._task.add_done_callback(lambda _: changed())

    @property
    def ended(self) -> bool:
        return self._task.done()

    def view(self) -> InitializerView:
        termination = self._current.termination if self._current is not None and self.ended else None
        succeeded = termination is not None and termination.exit_code == 0
        ended_as = PodPhase.SUCCEEDED if succeeded else PodPhase.FAILED
        return InitializerView(
            name=self.name,
            uid=self.uid,
            phase=ended_as if self.ended else PodPhase.RUNNING,
            number=self._number,
            step=self._step,
            scheduled=True,
            deleting=self.deleting,
            gone_by=self.gone_by,
            termination=termination,
        )

    def terminate(self, grace_seconds: float | None = None) -> None:
        """SIGTERM to what runs now; nothing is run after it."""
        self._stopping = True
        if self._current is not None:
            self._current.terminate(grace_seconds)

    def kill(self) -> None:
        """SIGKILL to what runs now; nothing is run after it."""
        self._stopping = True
        if self._current is not None:
            self._current.kill()

    async def wait(self) -> None:
        """Return once no process is left."""
        await asyncio.wait([self._task])

    def remove(self) -> None:
        """Nothing is left to remove: the scratch of each container went with it."""

    async def _run(self) -> None:
        for container in initializer_containers(self._manifest):
            if self._stopping:
                break
            self._step = container["name"]
            if await self._run_one(container) != 0:
                break

    async def _run_one(self, container: Manifest) -> int:
        """The container's exit code."""
        endpoints = Endpoints(0, 0, make_scratch(self.name))
        pod = self._current = LocalPod(
            name=self.name,
            uid=self.uid,
            attempt=0,
            node_rank=None,
            host=self._machine.host,
            endpoints=endpoints,
            log=self._log,
            grace_seconds=self.grace_seconds,
            changed=self._changed,
        )
        try:
            await pod.start(build_command(self._manifest, self._machine, endpoints, container=container))
        except (OSError, ValueError) as error:
            pod.failed_to_start(f"cannot start initializer {self._step}: {error}")
        if self._stopping:
            pod.terminate()
        await pod.wait()
        pod.remove()
        return pod.termination.exit_code if pod.termination else 1
