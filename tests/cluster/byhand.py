"""What somebody without the operator would apply: a claim, a Service and two pods that run plain torchrun.

The pods are copies of the operator's own, so that image, volumes, security and the trainer's settings are the same;
their command is torchrun's, and the names are others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.cluster.kube import Kubectl, Object

PORT = 29500

MADE_BY_SERVER = ("nodeName", "serviceAccount", "serviceAccountName", "tolerations", "priority", "preemptionPolicy")
"""Fields of a pod that its author did not write."""


@dataclass(frozen=True, slots=True)
class ByHand:
    """Specs of the pods of one gang, by node rank."""

    specs: list[dict[str, Any]]

    @classmethod
    def copied_from(cls, pods: list[Object]) -> ByHand:
        """The specs of a job's pods, as they were created."""
        return cls([{key: value for key, value in pod["spec"].items() if key not in MADE_BY_SERVER} for pod in pods])

    def objects(self, name: str, address: str, args: list[str]) -> list[Object]:
        """Everything for one run, in the order in which a file would have it."""
        return [
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": f"{name}-shared"},
                "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "10Gi"}}},
            },
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": name},
                "spec": {
                    "clusterIP": address,
                    "publishNotReadyAddresses": True,
                    "selector": {"run": name, "rank": "0"},
                    "ports": [{"port": PORT}],
                },
            },
            *(self._pod(name, address, args, rank, spec) for rank, spec in enumerate(self.specs)),
        ]

    def _pod(self, name: str, address: str, args: list[str], rank: int, spec: dict[str, Any]) -> Object:
        (container,) = spec["containers"]
        host = "$(POD_IP)" if rank == 0 else address
        command = [
            *("python", "-m", "torch.distributed.run"),
            *(f"--nnodes={len(self.specs)}", "--nproc-per-node=1", "--max-restarts=0", "--local-addr=$(POD_IP)"),
            *("--rdzv-backend=static", f"--node-rank={rank}", f"--rdzv-id={name}", f"--rdzv-endpoint={host}:{PORT}"),
            *("-m", "ddp_trainer.train", *args),
        ]
        # whom the records belong to; and the threads that the launcher would give a rank
        other = {"DDPJOB_NAME": name, "DDPJOB_UID": name}
        env = [
            {**variable, "value": other[variable["name"]]} if variable["name"] in other else variable
            for variable in container["env"]
        ]
        volumes = [
            {**volume, "persistentVolumeClaim": {"claimName": f"{name}-shared"}}
            if "persistentVolumeClaim" in volume
            else volume
            for volume in spec["volumes"]
        ]
        labels = {"run": name, "rank": str(rank)}
        spread = [
            {**constraint, "labelSelector": {"matchLabels": {"run": name}}}
            for constraint in spec["topologySpreadConstraints"]
        ]
        container = {**container, "command": command, "args": [], "env": env}
        changed = {"containers": [container], "volumes": volumes, "topologySpreadConstraints": spread}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"{name}-{rank}", "labels": labels},
            "spec": spec | changed,
        }


def free_address(kubectl: Kubectl) -> str:
    """An address of the Service network that is free now, so that pods can name a Service in the file that makes it."""
    probe = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "probe"}, "spec": {"ports": [{"port": PORT}]}}
    kubectl.apply(probe)
    service = kubectl.get("service", "probe")
    assert service is not None
    kubectl.run("delete", "service", "probe")
    return str(service["spec"]["clusterIP"])
