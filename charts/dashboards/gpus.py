"""The dashboard of GPUs."""

from __future__ import annotations

from grafana import Column, Dashboard, Query, Row
from queries import (
    BUSY,
    BY_JOB,
    CLUSTER,
    GOOD_IS_NONE,
    JOB,
    RUNNING,
    choices,
    in_phase,
    lines,
    or_zero,
    stat,
    table,
)

PODS = f"max by (namespace, pod, ddpjob) (ddpjob_trainer_info{{{JOB}}})"


def dcgm(name: str, own: str = "", scale: str = "", window: str = "") -> str:
    """A metric of DCGM's exporter for each GPU of a job, joined on the pod, which may be `exported_pod`. Of pods
    without such metrics, our own: the two number the GPUs differently.
    """
    metric = of_gpus(f"{name}{{{CLUSTER}}}", window)
    pod = f'label_replace({metric}, "pod", "$1", "exported_pod", "(.+)")'
    named = f'label_replace({pod}, "namespace", "$1", "exported_namespace", "(.+)")'
    joined = f"({named}{scale} * on (namespace, pod) group_left (ddpjob) {PODS})"
    return f"({joined} or on (namespace, pod) {own})" if own else joined


def of_gpus(metric: str, window: str = "") -> str:
    return f"avg_over_time({metric}[{window}])" if window else metric


def utilization(window: str = "") -> str:
    own = of_gpus(f"ddpjob_gpu_utilization_ratio{{{JOB}}}", window)
    return dcgm("DCGM_FI_DEV_GPU_UTIL", own, " / 100", window)


MEMORY = dcgm("DCGM_FI_DEV_FB_USED", f"ddpjob_gpu_memory_bytes{{{JOB}}}", " * 1048576")
NAMED = "{{namespace}}/{{ddpjob}}"
WITH_DCGM = " It needs DCGM's exporter."

GPUS = Dashboard(
    "gpus", "GPUs",
    "GPUs of jobs, by DCGM's exporter, or without it by the trainer pods themselves (nvidia-ml-py in the image).",
    (
        Row("Now", (
            stat("Requested", "GPUs of jobs that run.",
                 or_zero(f'sum(ddpjob_status_gpus{{{JOB}}} and {in_phase(RUNNING)})')),
            stat("Measured", "GPUs with measurements. Fewer than requested: a pod without podMonitor, DCGM or "
                 "nvidia-ml-py.", or_zero(f"count({utilization()})")),
            stat("Utilization", "Mean share of time in which a kernel ran. It says that a GPU is in use, not "
                 "that it is used well.", f"avg({utilization()})", unit="percentunit", steps=BUSY),
            stat("Idle for half an hour", "GPUs of jobs below 5 %, those of spares included: see the "
                 "alert DDPJobGPUsIdle.",
                 or_zero(f"count({utilization('30m')} < 0.05)"), steps=GOOD_IS_NONE),
            stat("Tensor cores", "Mean share of time in which tensor cores were active: how well GPUs are used. Low "
                 "with high utilization: fp32, small batches, or memory-bound." + WITH_DCGM,
                 f"avg({dcgm('DCGM_FI_PROF_PIPE_TENSOR_ACTIVE')})", unit="percentunit"),
            stat("Memory", "In use on all GPUs of jobs. That of each job is below.", f"sum({MEMORY})", unit="bytes"),
            stat("Power", "Of all GPUs of jobs." + WITH_DCGM, f"sum({dcgm('DCGM_FI_DEV_POWER_USAGE')})", unit="watt"),
            stat("Xid errors", "GPUs whose last Xid error is not 0: NVIDIA's list says which mean a broken GPU (48, "
                 "63, 79, 94, 95). Drain the node." + WITH_DCGM,
                 or_zero(f"count({dcgm('DCGM_FI_DEV_XID_ERRORS')} > 0)"),
                 steps=GOOD_IS_NONE),
        )),
        Row("Jobs", (
            lines("Utilization by job", "A saw tooth waits for data or for snapshots.",
                  Query(f"avg {BY_JOB} ({utilization()})", NAMED), unit="percentunit", width=12),
            lines("Least busy GPU of each job", "Far below the mean: a straggler's peer, or more GPUs than ranks.",
                  Query(f"min {BY_JOB} ({utilization('5m')})", NAMED), unit="percentunit", width=12),
            lines("Memory by job", "Close to the GPU's: out-of-memory errors are near. Far below: a larger micro-batch "
                  "fits.", Query(f"max {BY_JOB} ({MEMORY})", NAMED), unit="bytes"),
            lines("Tensor cores by job", "Compare jobs of the same model." + WITH_DCGM,
                  Query(f"avg {BY_JOB} ({dcgm('DCGM_FI_PROF_PIPE_TENSOR_ACTIVE')})", NAMED), unit="percentunit"),
            lines("Hottest GPU of each job", "Above 85 °C most GPUs slow down, and the gang with them." + WITH_DCGM,
                  Query(f"max {BY_JOB} ({dcgm('DCGM_FI_DEV_GPU_TEMP')})", NAMED), unit="celsius",
                  steps=((0, "green"), (85, "red"))),
        )),
        Row("GPUs", (
            table("Least busy GPUs", "Mean of half an hour, the fifty least busy first.",
                  Column("Utilization", f"bottomk(50, avg by (namespace, ddpjob, pod, gpu) ({utilization('30m')}))",
                         "percentunit", BUSY), order="+Utilization"),
        )),
    ),
    choices(many=True),
)  # fmt: skip
