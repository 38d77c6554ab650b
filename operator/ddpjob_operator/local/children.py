"""What a job owns on this machine, where a cluster has pods, a Service and a claim: processes, a port and a folder.

`observed` is what `plan` decides from, `carry_out` does what it decided.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import assert_never

from ddpjob_operator.core.manifests.pod_environment import is_assignable
from ddpjob_operator.core.values.actions import (
    Action,
    AssignPod,
    CreateChild,
    CreatePod,
    CreatePVC,
    CreateService,
    DeleteJob,
    DeletePod,
    DeletePodGroup,
    PointService,
    ReadLog,
    ReadWarnings,
    ReleasePod,
    SyncPod,
)
from ddpjob_operator.core.values.job import Job, Manifest
from ddpjob_operator.core.values.names import LABEL_ATTEMPT
from ddpjob_operator.core.values.observed import Observed, PodPhase, ServiceView
from ddpjob_operator.local import clock
from ddpjob_operator.local.environment import Endpoints, Machine, build_command, gpus_of_node
from ddpjob_operator.local.initializer import LocalInitializer
from ddpjob_operator.local.machine import own_variables, seats
from ddpjob_operator.local.network import LOOPBACK, free_port
from ddpjob_operator.local.processes import LocalPod, make_scratch
from ddpjob_operator.local.record import PodPlace
from ddpjob_operator.local.volume import log_tail, pod_log


class Children:
    """The children of one job. `changed` is called whenever what is observed may have changed."""

    def __init__(self, job: Job, machine: Machine, changed: Callable[[], None]) -> None:
        self._job = job
        self._machine = machine
        self._changed = changed
        self._pods: dict[str, LocalPod] = {}
        self._service: ServiceView | None = None
        self._claim_exists = False
        self._initializer: LocalInitializer | None = None
        self._others: set[tuple[str, str]] = set()
        self._groups: set[tuple[str, str]] = set()
        self._logs: dict[str, str] = {}
        self._ports: set[int] = set()
        self._rendezvous: dict[int, int] = {}
        self._places: dict[tuple[str, int], PodPlace] = {}
        self.closed = False
        """Once set no pod is made any more, and one that is being made is asked to stop."""

    @property
    def pods(self) -> tuple[LocalPod, ...]:
        return tuple(self._pods.values())

    @property
    def places(self) -> tuple[PodPlace, ...]:
        """Every place that a pod had in the gang, the newest last."""
        return tuple(self._places.values())

    @property
    def running(self) -> tuple[LocalPod | LocalInitializer, ...]:
        """Everything of which a process may be left."""
        return self.pods if self._initializer is None else (*self.pods, self._initializer)

    def observed(self, attempt: int) -> Observed:
        """All that is known, with the report of node rank 0 of this attempt."""
        first = self._reporting(attempt)
        return Observed(
            pods=tuple(pod.view() for pod in self.pods),
            service=self._service,
            pvc_exists=self._claim_exists,
            report=first.report if first else None,
            children=frozenset(self._others),
            pod_groups=frozenset(self._groups),
            logs=dict(self._logs),
            initializer=self._initializer.view() if self._initializer else None,
        )

    def _reporting(self, attempt: int) -> LocalPod | None:
        """Node rank 0; with live recovery another one that trains, until a new node rank 0 does."""
        gang = {pod.node_rank: pod for pod in self.pods if pod.attempt == attempt and pod.node_rank is not None}
        first = gang.get(0)
        if self._job.spec.restart.scope != "Live" or (first is not None and _trains(first)):
            return first
        return next((pod for _, pod in sorted(gang.items()) if _trains(pod) and not pod.ended), first)

    def forget_deleted(self) -> None:
        """Drop the pods that were deleted and have ended."""
        for pod in self.pods:
            if pod.deleting and pod.ended:
                del self._pods[pod.name]
                pod.remove()
        if self._initializer is not None and self._initializer.deleting and self._initializer.ended:
            self._initializer = None

    async def carry_out(self, action: Action) -> bool:
        """Do it; whether it made a difference, so that the job is worth another look.

        Raises:
            OSError: if this machine has no port, no process or no space left for it.
        """
        match action:
            case CreatePVC():
                self._claim_exists = True  # the folder is there: it was opened before the run began
            case CreateService(manifest):
                self._point_service(int(manifest["spec"]["selector"][LABEL_ATTEMPT]))
            case PointService(attempt=attempt):
                self._point_service(attempt)
            case CreatePod():
                await self._create(action)
            case AssignPod():
                self._assign(action)
            case DeletePod():
                self._delete(action)
            case ReadLog(name=name, uid=uid):
                self._logs[uid] = log_tail(pod_log(self._machine.shared, self._job.name, name), uid)
            case CreateChild(manifest) if manifest["kind"] == "Pod":
                return self._initialize(manifest)
            case CreateChild(manifest):
                # no network policy is enforced here and no gang is admitted; to record the request is enough
                name = manifest["metadata"]["name"]
                self._others.add((manifest["kind"], name))
                if manifest["kind"] == "PodGroup":
                    self._groups.add((manifest["apiVersion"], name))
            case DeletePodGroup(api_version, name):
                self._groups.discard((api_version, name))
            case SyncPod():
                return False  # its files are written at once
            case ReleasePod():
                return False  # nothing collects a process's end before it has been seen
            case ReadWarnings():
                return False  # processes have no Kubernetes events
            case DeleteJob():
                return False  # the job is a file of the person's, and this process, which ends when it has finished
            case _:
                assert_never(action)
        return True

    def _point_service(self, attempt: int) -> None:
        self._service = ServiceView(LOOPBACK, attempt, self._rendezvous_port(attempt))

    def _rendezvous_port(self, attempt: int) -> int:
        """One for each attempt: the last one's store may not have let go of its port yet. Kept pods cannot
        change theirs, so where pods may be kept, there is one for all.
        """
        key = 0 if is_assignable(self._job) else attempt
        if key not in self._rendezvous:
            self._rendezvous[key] = free_port(self._ports)
        return self._rendezvous[key]

    async def _create(self, action: CreatePod) -> None:
        if action.name in self._pods or self.closed:
            return
        uid = str(uuid.uuid4())
        scratch = make_scratch(action.name)
        endpoints = Endpoints(self._rendezvous_port(action.attempt), free_port(self._ports), scratch)
        pod = LocalPod(
            name=action.name,
            uid=uid,
            attempt=action.attempt,
            node_rank=action.node_rank,
            host=self._machine.host,
            endpoints=endpoints,
            log=pod_log(self._machine.shared, self._job.name, action.name),
            grace_seconds=float(action.manifest["spec"]["terminationGracePeriodSeconds"]),
            changed=self._changed,
            seat=self._free_seat(action.node_rank),
        )
        self._pods[action.name] = pod
        if action.node_rank is not None:
            self._note_place(pod.name, action.attempt, action.node_rank)
        manifest = _with_uid(action.manifest, uid)
        spec = self._job.spec
        gpus = gpus_of_node(self._machine.gpus, pod.seat, seats(spec), spec.ranks_per_node, spec.gpus_per_node)
        command = build_command(manifest, self._machine, endpoints, own=own_variables(self._job), gpus=gpus)
        try:
            await pod.start(command, manifest["metadata"]["labels"])
        except (OSError, ValueError) as error:
            pod.failed_to_start(f"cannot start {action.name}: {error}")
        if self.closed:
            pod.terminate()

    def _initialize(self, manifest: Manifest) -> bool:
        if self._initializer is not None or self.closed:
            return False  # the one before has to end first
        self._initializer = LocalInitializer(manifest, self._job.name, self._machine, self._changed)
        return True

    def _free_seat(self, node_rank: int | None) -> int:
        """Whose share of this machine's GPUs a new pod gets: that of its node rank, or one that no other pod holds."""
        taken = {pod.seat for pod in self.pods if not (pod.deleting or pod.ended)}
        wanted = 0 if node_rank is None else node_rank
        free = [seat for seat in range(seats(self._job.spec)) if seat not in taken]
        return wanted if wanted in free or not free else free[0]

    def _assign(self, action: AssignPod) -> None:
        pod = self._pods.get(action.name)
        if pod is not None and pod.uid == action.uid and not pod.ended:
            pod.assign(action.attempt, action.node_rank, action.nodes)
            self._note_place(pod.name, action.attempt, action.node_rank)

    def _note_place(self, pod: str, attempt: int, node_rank: int) -> None:
        self._places.pop((pod, attempt), None)  # the newest is the last
        self._places[pod, attempt] = PodPlace(pod, attempt, node_rank)

    def _delete(self, action: DeletePod) -> None:
        pod = next((pod for pod in self.running if pod.name == action.name), None)
        if pod is None or pod.uid != action.uid:
            return
        grace = pod.grace_seconds if action.grace_seconds is None else action.grace_seconds
        pod.deleting = True
        pod.gone_by = clock.now() + timedelta(seconds=grace)
        pod.terminate(grace)


def _with_uid(manifest: Manifest, uid: str) -> Manifest:
    """As an API server would hand it out: fieldRef metadata.uid asks for it."""
    return {**manifest, "metadata": {**manifest["metadata"], "uid": uid}}


def _trains(pod: LocalPod) -> bool:
    """Whether it has taken a step, and has not failed since."""
    return pod.report is not None and pod.report.step is not None and pod.view().phase is not PodPhase.FAILED
