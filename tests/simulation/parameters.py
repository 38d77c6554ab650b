"""What the simulation assumes: failure rates that were published, times that were measured, and assumptions.

Every figure is here, with its source. All times are in seconds. "Measured" figures are those of docs/performance.md and
docs/live-recovery.md; an "assumption" has no source and can be changed to see what it does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

HOUR = 3600.0
DAY = 86400.0


@dataclass(frozen=True, slots=True)
class Parameters:
    """Times of one job and one cluster."""

    step_seconds: float = 5.0
    """One optimizer step. Assumption. A failure loses the step that is under way."""
    snapshot_every_seconds: float = 60.0
    """Training time between two snapshots, a whole number of steps: the default of `spec.snapshots.every`."""
    stall_seconds: float = 0.09
    """Training stops for a snapshot. Measured on one H100: 0.0223 s for 1 GB; 4 GB per GPU are the most of Llama 3
    (section 3.3.1 of The Llama 3 Herd of Models, Meta 2024)."""
    save_seconds: float = 4.3
    """From the end of the stall to the verified snapshot, while training goes on. Assumption: as long as a load."""
    load_seconds: float = 4.3
    """A rank loads a snapshot. Measured: 1.07 s for 1 GB with an H100; times 4 GB."""
    pod_start_seconds: float = 1.5
    """From a node for a pod to its running container, the image being there. Measured: SIGKILL to the next step takes
    5.53 s on the test cluster and 4.04 s on one machine without pods."""
    pod_start_tail_seconds: float = 1.0
    """Mean of an exponential time on top, drawn for each node: the slowest one delays the gang. Assumption."""
    image_pull_seconds: float = 60.0
    """The first pod on a node pulls the image. Assumption."""
    process_start_seconds: float = 4.0
    """From a running container, or from the order to begin again in place, to a rank that has imported torch. Measured:
    SIGKILL to the next step takes 4.04 s on one machine."""
    call_seconds: float = 0.0275
    """The operator creates or relabels one pod. Measured: 1,600 pods of 200 restarts at once in 44 s."""
    label_seconds: float = 1.0
    """From a changed label to the pod that reads it. Assumption."""
    kubelet_seconds: float = 1.0
    """From the end of a process to the status of its pod. Assumption: kubelets look once a second."""
    peer_lost_seconds: float = 5.0
    """From the loss of a node to the ranks that notice their lost peer, without live recovery. Assumption: decision 7
    says "within seconds"."""
    monitor_grace_seconds: float = 40.0
    """From the loss of a node to NotReady: the default of `--node-monitor-grace-period` before Kubernetes 1.32; 50
    since then."""
    node_back_seconds: float = 4 * HOUR
    """From the loss of a node to its return, with none of its pods. Assumption."""
    free_nodes: int = 4
    """Nodes of the cluster beyond those of the gang. Spares run on them. Assumption."""
    lost_node_share: float = 88 / 419
    """Failures in which the whole node is lost; in the others a process ends and its node is good. From table 5 of The
    Llama 3 Herd of Models: switches and cables 35, host maintenance 32, NIC 7, SSD 3, power supply 3, chassis 2, IO
    board 2, CPU 2, memory 2, of 419."""
    live_process_seconds: float = 0.2
    """Live: from the end of a process to the next step begun by the others. Measured: 0.1 to 0.2 s, three ranks."""
    live_silent_seconds: float = 4.5
    """Live: the same for a node that stands still. Measured: 4.5 s for a stopped rank."""
    live_join_seconds: float = 1.6
    """Live: the others wait while a newcomer joins. Measured: 0.3 s at most to form the group, three ranks; and 1.3 s
    for 4 GB at 25 Gbit/s (assumption)."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One size of job, and how often it fails."""

    name: str
    gpus: int
    mtbf_seconds: float
    """Mean time between failures of the whole gang."""
    source: str
    pods: int
    """Pods that are simulated."""
    nodes_per_pod: int = 1
    """Nodes of the real job for which one simulated pod stands: in calls of the operator, in the slowest start, and in
    the share of the gang that one failure takes."""
    days: float = 54.0
    rendezvous_seconds: float = 5.0
    """All ranks meet and form their process groups. MegaScale (Jiang et al., NSDI 2024, section 3.5): below 5 s at
    2,048 GPUs, and below 30 s at more than 10,000."""


SETTINGS = (
    Setting(
        "1,024 GPUs", 1024, 7.9 * HOUR,
        "MTTF 7.9 h (Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters, "
        "Meta 2024)", pods=128,
    ),
    Setting(
        "16,384 GPUs", 16384, 54 * DAY / 466,
        "466 interruptions in 54 days, planned ones included (The Llama 3 Herd of Models, Meta 2024, section 3.3.4)",
        pods=32, nodes_per_pod=64, rendezvous_seconds=30.0,
    ),
)  # fmt: skip

SCOPES: dict[str, dict[str, Any]] = {
    "Gang": {"restart": {"scope": "Gang"}},
    "InPlace": {"restart": {"scope": "InPlace"}},
    "InPlace, 2 spares": {"restart": {"scope": "InPlace"}, "spares": 2},
    "Live": {"restart": {"scope": "Live"}},
}
"""Fields of the spec that differ. All others have their defaults."""

FAST = Parameters()
"""A job as those that were measured: it starts in seconds and saves in the background."""

SLOW = Parameters(process_start_seconds=300.0, stall_seconds=5.0, snapshot_every_seconds=1800.0)
"""A job whose script compiles or reads for five minutes when it starts, and that stops 5 s for a snapshot, every half
hour. Assumption."""

INTERVALS = (60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Snapshot intervals that are compared with Daly's formula."""

SEEDS = (1, 2, 3)
