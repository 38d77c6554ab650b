"""The torchrun command of one pod: how the nodes of a gang find each other (docs/contracts.md section 2).

Node rank 0 hosts the store at its own address, everyone else reaches it through the job's Service, whose address is
known before any pod exists: no name is ever resolved. The id carries the attempt, so that a node of an older
attempt uses keys of its own and joins nothing. Ranks follow node ranks (torchrun's static rendezvous): with the c10d
backend they would follow the order of the pods' addresses, and rank 0 could be in any pod.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from ddp_trainer.contract.environment import PodEnvironment, Target
from ddp_trainer.contract.run_dir import JOIN_TIMEOUT_SECONDS


def torchrun_arguments(pod: PodEnvironment, target: Target) -> list[str]:
    """Arguments of torchrun. No restarts of its own: a new attempt is the operator's decision."""
    node_rank, nodes, port = (0, 1, 0) if pod.live else (pod.node_rank, pod.nodes, pod.rdzv_port)
    host = pod.pod_ip if node_rank == 0 else pod.rdzv_host
    return [
        f"--nnodes={nodes}",
        f"--nproc-per-node={pod.procs_per_node}",
        f"--node-rank={node_rank}",
        "--rdzv-backend=static",
        f"--rdzv-id={pod.uid}-{pod.attempt}",
        f"--rdzv-endpoint={_bracketed(host)}:{port}",
        f"--rdzv-conf=timeout={JOIN_TIMEOUT_SECONDS}",
        f"--local-addr={pod.pod_ip}",
        "--max-restarts=0",
        # The launcher ends a preempted pod. What torchrun does beside a failed rank is in `rank.agent`.
        f"--shutdown-timeout={max(1, math.floor(pod.shutdown_seconds))}",
        f"--log-dir={pod.run_dir / 'torchrun'}",
        "--module",
        "ddp_trainer.rank.worker",
        target.kind,
        target.name,
        *target.args,
    ]


def torchrun_environment(
    pod: PodEnvironment, inherited: Mapping[str, str], cpus: int, interface: str | None = None
) -> dict[str, str]:
    """Everything that was set, plus what the ranks need; `cpus` is how many this pod may use, `interface` the one that
    gloo has to be given.
    """
    env = {**inherited, **place_variables(pod, inherited)}
    env["TORCHELASTIC_ERROR_FILE"] = str(pod.run_dir / "torchrun" / "error.json")
    env["DDPJOB_LAUNCHER_PID"] = str(os.getpid())
    # torch 2.13 ends ranks that the kernel holds on to for so long, and exits with 0; the launcher sees them itself
    env.pop("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", None)
    env.setdefault("OMP_NUM_THREADS", str(max(1, cpus // pod.procs_per_node)))
    if interface is not None:
        env.setdefault("GLOO_SOCKET_IFNAME", interface)
    # The last lines before a crash are the ones that matter.
    env.setdefault("PYTHONUNBUFFERED", "1")
    return env


def place_variables(pod: PodEnvironment, inherited: Mapping[str, str]) -> dict[str, str]:
    """The pod's place of now, which may have been another when the pod was made, and packages installed since."""
    place = {"ATTEMPT": pod.attempt, "NODE_RANK": pod.node_rank, "NODES": pod.nodes}
    variables = {f"DDPJOB_{name}": str(value) for name, value in place.items()}
    if pod.node_rank is not None and "NODE_RANK" not in inherited:
        # torchrun calls it GROUP_RANK; Composer needs this name, with several ranks, to load a checkpoint
        variables["NODE_RANK"] = str(pod.node_rank)
    if pod.site_packages is not None:
        others = [path for path in (inherited.get("PYTHONPATH"),) if path]
        variables["PYTHONPATH"] = os.pathsep.join([str(pod.site_packages), *others])
    return variables


def usable_cpus(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """CPUs of this container: its quota, rounded up, or else those it may be scheduled on."""
    cpus = len(os.sched_getaffinity(0))
    quota = _quota(cgroup)
    return cpus if quota is None else min(cpus, math.ceil(quota))


def _quota(cgroup: Path) -> float | None:
    """CPUs that the control group grants: `cpu.max` in version 2, two files in version 1; None without a limit."""
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        cpus = int(quota) / int(period)
    except (OSError, ValueError):  # no such group, or "max"
        return None
    return cpus if cpus > 0 else None  # version 1 says -1 for no limit


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
