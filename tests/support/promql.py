"""Which metrics a PromQL expression asks for, and whether they exist."""

from __future__ import annotations

import re

from ddp_trainer.launch.status.metric_table import TABLE as TRAINER
from ddpjob_operator.metric_table import TABLE as OPERATOR

OTHERS = frozenset({
    "up", "ALERTS",
    # DCGM's exporter
    "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE", "DCGM_FI_DEV_POWER_USAGE",
    "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
    # kubelet, kube-state-metrics
    "kubelet_volume_stats_available_bytes", "kubelet_volume_stats_capacity_bytes",
    "kube_pod_spec_volumes_persistentvolumeclaims_info", "kube_pod_spec_volumes_persistentvolumeclaims_readonly",
    "kube_node_status_allocatable",
})  # fmt: skip
"""Metrics of other exporters."""

_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')
_LABELS = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
_SELECTOR = re.compile(r"\{[^}]*\}")
_NAME = re.compile(r"\b[A-Za-z_:][A-Za-z0-9_:]*\b(?!\s*\()")
_WORDS = {
    "and",
    "or",
    "unless",
    "offset",
    "bool",
    "by",
    "without",
    "on",
    "ignoring",
    "group_left",
    "group_right",
    "inf",
}


def metrics_of(expression: str) -> set[str]:
    """Names of the metrics in an expression, those of a histogram's parts too."""
    bare = _LABELS.sub(" ", _SELECTOR.sub(" ", _TEXT.sub(" ", expression)))
    bare = re.sub(r"\[[^\]]*\]", " ", bare)
    bare = re.sub(r"\$\{?[A-Za-z_]\w*\}?", " ", bare)
    bare = re.sub(r"\b\d+(?:\.\d+)?(?:ms|[smhdwy])?\b", " ", bare)
    return set(_NAME.findall(bare)) - _WORDS


def unknown_metrics(expression: str) -> set[str]:
    """Those that neither the operator nor a trainer pod nor a known exporter has."""
    return {name for name in metrics_of(expression) if not _exists(name)}


def _exists(name: str) -> bool:
    if name in OPERATOR or name in TRAINER or name in OTHERS:
        return True
    family = re.sub("_(bucket|sum|count)$", "", name)
    row = OPERATOR.get(family) or TRAINER.get(family)
    return row is not None and row.type == "histogram"
