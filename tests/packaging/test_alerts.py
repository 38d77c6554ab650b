"""The chart's alerts, by promtool: each fires for its fault and alone, and none for a job that is well."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.packaging.chart import of_kind, rendered
from tests.support.alerts import GROUPS, RULES, shortened
from tests.support.promql import unknown_metrics

from ddpjob_operator.core.values.names import pvc_name

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "alerts.md"
ALERTS = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}

Series = Mapping[str, str]
"""Values of each series, one a minute, in promtool's notation; `_` is a scrape without it."""

OF_JOB = 'namespace="team", ddpjob="digits"'
OPERATOR: Series = {
    'ddpjob_operator_leader{pod="operator-0"}': "1x300",
    'ddpjob_operator_queue_depth{pod="operator-0"}': "0 3 0x300",
    'ddpjob_operator_watch_starts_total{pod="operator-0", instance="a", resource="ddpjobs"}': "1+0.2x300",
    'ddpjob_operator_watch_starts_total{pod="operator-0", instance="a", resource="pods"}': "1+0.2x300",
}
OF_POD = 'namespace="team", pod="digits-0-0"'
OF_NEW_POD = 'namespace="team", pod="digits-1-0"'
OF_SPARE = 'namespace="team", pod="digits-0-s0"'
VOLUME = 'namespace="team", persistentvolumeclaim="digits-shared"'
DCGM = 'namespace="gpu-operator", pod="dcgm-x", exported_namespace="team", exported_pod="digits-0-0", gpu="0"'
JOB: Series = {
    f'ddpjob_info{{{OF_JOB}, image="trainer:1", claim="digits-shared", queue=""}}': "1x300",
    f'ddpjob_status_phase{{{OF_JOB}, phase="Running"}}': "1x300",
    f"ddpjob_status_restarts_total{{{OF_JOB}}}": "0x300",
    f"ddpjob_status_step{{{OF_JOB}}}": "10+10x300",
    f"ddpjob_status_total_steps{{{OF_JOB}}}": "100000x300",
    f"ddpjob_status_snapshot_step{{{OF_JOB}}}": "5+10x300",
    f"ddpjob_status_snapshot_timestamp_seconds{{{OF_JOB}}}": "0+60x300",
    f"ddpjob_status_goodput_ratio{{{OF_JOB}}}": "0.9x300",
    f'ddpjob_status_activity_seconds{{{OF_JOB}, activity="queued"}}': "600x300",
    f'ddpjob_status_activity_seconds{{{OF_JOB}, activity="training"}}': "0+54x300",
    f'ddpjob_status_activity_seconds{{{OF_JOB}, activity="recovering"}}': "0x300",
    f'ddpjob_status_activity_seconds{{{OF_JOB}, activity="saving"}}': "0+6x300",
    f'ddpjob_trainer_info{{{OF_POD}, ddpjob="digits", attempt="0", node_rank="0", world_size="1"}}': "1x300",
    f'ddpjob_rank_heartbeat_age_seconds{{{OF_POD}, ddpjob="digits", rank="0"}}': "2x300",
    f'ddpjob_gpu_utilization_ratio{{{OF_POD}, ddpjob="digits", gpu="0"}}': "0.9x300",
    f"DCGM_FI_DEV_GPU_UTIL{{{DCGM}}}": "90x300",
    f"kubelet_volume_stats_available_bytes{{{VOLUME}}}": "50x300",
    f"kubelet_volume_stats_capacity_bytes{{{VOLUME}}}": "100x300",
}
"""A job that trains, with snapshots and a GPU."""

DOTTED = "resnet50.v2"
CUT_CLAIM = pvc_name(DOTTED)

SPARE: Series = {
    f'ddpjob_trainer_info{{{OF_SPARE}, ddpjob="digits", attempt="0", node_rank="none", world_size="1"}}': "1x300",
}

UNTOUCHED: Series = {
    f'ddpjob_info{{{OF_JOB}, image="trainer:1", claim="digits-shared", queue=""}}': "1x300",
    f'ddpjob_status_phase{{{OF_JOB}, phase="Running"}}': "1x300",
    f"ddpjob_status_restarts_total{{{OF_JOB}}}": "0x300",
    f'ddpjob_status_activity_seconds{{{OF_JOB}, activity="training"}}': "0x300",
    f'ddpjob_status_activity_seconds{{{OF_JOB}, activity="unknown"}}': "0+60x300",
    f'ddpjob_rank_heartbeat_age_seconds{{{OF_POD}, ddpjob="digits", rank="0"}}': "0+60x300",
}
"""A script that reports nothing and saves nothing, on a CPU, in a cluster with no other exporter."""

STUCK: Series = {
    f"ddpjob_status_step{{{OF_JOB}}}": "10+10x20 210x300",
    f"ddpjob_status_snapshot_step{{{OF_JOB}}}": "5+10x20 205x300",
}


def without(series: Series, *metrics: str) -> Series:
    return {name: values for name, values in series.items() if name.partition("{")[0] not in metrics}


def series(metric: str, values: str, among: Series = JOB) -> Series:
    """The same series of a job with other values."""
    (name,) = (name for name in among if name.startswith(metric))
    return {name: values}


def mounted(volume: str, readonly: str) -> Series:
    """The claim `mine` as a volume of the job's pod."""
    labels = f'{OF_POD}, volume="{volume}", persistentvolumeclaim="mine"'
    name = "kube_pod_spec_volumes_persistentvolumeclaims"
    return {f"{name}_info{{{labels}}}": "1x300", f"{name}_readonly{{{labels}}}": readonly}


def phases(**values: str) -> Series:
    """The phases of the job, instead of Running all the time."""
    return series('ddpjob_status_phase{namespace="team", ddpjob="digits"', "_x300") | {
        f'ddpjob_status_phase{{{OF_JOB}, phase="{phase}"}}': given for phase, given in values.items()
    }


def in_cluster(name: str, given: Series) -> Series:
    """The same series in a Prometheus that has those of several clusters."""
    return {key.replace("{", f'{{cluster="{name}", ', 1): values for key, values in given.items()}


def volume(claim: str, available: str) -> Series:
    """What the kubelet shows of a volume of 100 bytes."""
    labels = f'namespace="team", persistentvolumeclaim="{claim}"'
    return {
        f"kubelet_volume_stats_available_bytes{{{labels}}}": available,
        f"kubelet_volume_stats_capacity_bytes{{{labels}}}": "100x300",
    }


SHARDS: Series = {'ddpjob_operator_shards{pod="operator-0"}': "1x300"}


@dataclass(frozen=True)
class Case:
    """What Prometheus scrapes, and the alerts that fire after some minutes."""

    what: str
    series: Series
    fires: str = ""
    labels: Mapping[str, str] = field(default_factory=lambda: {"namespace": "team", "ddpjob": "digits"})
    minutes: int = 70


FAULTS = (
    Case("no step for half an hour", OPERATOR | JOB | STUCK | series("ddpjob_rank", "0+60x300"), "DDPJobStalled"),
    Case("three restarts in an hour",
         OPERATOR | JOB | series("ddpjob_status_restarts", "0x25 1x10 2x10 3x200"), "DDPJobCrashLooping"),
    Case("most of the hour went into recovering",
         OPERATOR | JOB | series(f'ddpjob_status_activity_seconds{{{OF_JOB}, activity="training"', "0+15x300")
         | series(f'ddpjob_status_activity_seconds{{{OF_JOB}, activity="recovering"', "0+39x300"), "DDPJobGoodputLow"),
    Case("lost steps are taken back",
         OPERATOR | JOB | series(f'ddpjob_status_activity_seconds{{{OF_JOB}, activity="training"', "3000-10x300")
         | series(f'ddpjob_status_activity_seconds{{{OF_JOB}, activity="recovering"', "0+60x300"), "DDPJobGoodputLow"),
    Case("no snapshot for two hours", OPERATOR | JOB | series("ddpjob_status_snapshot_timestamp", "0x300")
         | series("ddpjob_status_snapshot_step", "5x300"), "DDPJobSnapshotTooOld", minutes=130),
    Case("no snapshot for two hours, in which it was restarted after a quarter of an hour without nodes", OPERATOR | JOB
         | series("ddpjob_status_snapshot_timestamp", "0x300") | series("ddpjob_status_snapshot_step", "5x300")
         | phases(Running="1x60 _x14 1x200", Restarting="_x61 1x13 _x200"), "DDPJobSnapshotTooOld", minutes=130),
    Case("three saves have failed", OPERATOR | JOB | {
         f'ddpjob_status_condition{{{OF_JOB}, condition="SnapshotsFailing", reason="SaveFailed"}}': "_x50 1x100"},
         "DDPJobSnapshotsFailing"),
    Case("its volume has 5 % left", OPERATOR | JOB | series("kubelet_volume_stats_available", "50x30 5x200"),
         "DDPJobVolumeNearlyFull", {"namespace": "team", "persistentvolumeclaim": "digits-shared"}),
    Case("the volume of a job whose name is no DNS label has 5 % left", OPERATOR | JOB | volume(CUT_CLAIM, "5x300") | {
         f'ddpjob_info{{namespace="team", ddpjob="{DOTTED}", claim="{CUT_CLAIM}"}}': "1x300"},
         "DDPJobVolumeNearlyFull", {"namespace": "team", "persistentvolumeclaim": CUT_CLAIM}),
    Case("a claim of the user's that two jobs name has 5 % left", OPERATOR | JOB | volume("mine", "5x300") | {
         f'ddpjob_info{{namespace="team", ddpjob="{name}", claim="mine"}}': "1x300" for name in ("one", "two")},
         "DDPJobVolumeNearlyFull", {"namespace": "team", "persistentvolumeclaim": "mine"}),
    Case("a claim of the user's that a pod of it mounts has 5 % left", OPERATOR | JOB | volume("mine", "5x300") | {
         f'kube_pod_spec_volumes_persistentvolumeclaims_info{{{OF_POD}, persistentvolumeclaim="mine"}}': "1x300"},
         "DDPJobVolumeNearlyFull", {"namespace": "team", "persistentvolumeclaim": "mine"}),
    Case("a claim that a pod mounts for data and for results has 5 % left", OPERATOR | JOB | volume("mine", "5x300")
         | mounted("data", "1x300") | mounted("results", "0x300"),
         "DDPJobVolumeNearlyFull", {"namespace": "team", "persistentvolumeclaim": "mine"}),
    Case("it waits for an hour, in two phases",
         OPERATOR | JOB | phases(Pending="1x30 _x300", Starting="_x31 1x300"), "DDPJobQueueStuck"),
    Case("its GPU does nothing, says DCGM", OPERATOR | JOB | series("DCGM", "1x300"), "DDPJobGPUsIdle"),
    Case("its GPU does nothing, says DCGM with honorLabels", OPERATOR | without(JOB, "DCGM_FI_DEV_GPU_UTIL") | {
         f'DCGM_FI_DEV_GPU_UTIL{{{OF_POD}, gpu="0"}}': "90x300",
         f'DCGM_FI_DEV_GPU_UTIL{{{OF_POD}, gpu="1"}}': "0x300"}, "DDPJobGPUsIdle"),
    Case("its GPU does nothing, says its pod",
         OPERATOR | without(JOB, "DCGM_FI_DEV_GPU_UTIL") | series("ddpjob_gpu", "0x300"), "DDPJobGPUsIdle"),
    Case("nothing is scraped", {}, "DDPJobOperatorDown", {}),
    Case("no replica leads", OPERATOR | {'ddpjob_operator_leader{pod="operator-0"}': "1x20 0x300"},
         "DDPJobOperatorDown", {}),
    Case("no replica leads in one of two clusters", in_cluster("a", OPERATOR | SHARDS) | in_cluster(
         "b", OPERATOR | {'ddpjob_operator_leader{pod="operator-0"}': "1x20 0x300"}),
         "DDPJobOperatorDown", {"cluster": "b"}),
    Case("one of the operators of two clusters is gone", in_cluster("a", OPERATOR | SHARDS) | in_cluster(
         "b", {'ddpjob_operator_leader{pod="operator-0"}': "1x20 _x300"}), "DDPJobOperatorDown", {"cluster": "b"}),
    Case("no step in one of two clusters that have a job of this name", in_cluster("a", OPERATOR | SHARDS | JOB)
         | in_cluster("b", OPERATOR | SHARDS | JOB | STUCK | series("ddpjob_rank", "0+60x300")), "DDPJobStalled",
         {"cluster": "b", "namespace": "team", "ddpjob": "digits"}),
    Case("one of two watches is not begun again", OPERATOR | {
         'ddpjob_operator_watch_starts_total{pod="operator-0", instance="a", resource="pods"}': "1+0.2x10 3x300"},
         "DDPJobOperatorWatchStale", {"pod": "operator-0", "instance": "a", "resource": "pods"}),
    Case("one of its watches of two namespaces is not begun again", OPERATOR | {
         'ddpjob_operator_watch_starts_total{pod="operator-0", instance="a", resource="pods", watched_namespace="b"}':
         "1+0.2x10 3x300"}, "DDPJobOperatorWatchStale",
         {"pod": "operator-0", "instance": "a", "resource": "pods", "watched_namespace": "b"}),
    Case("fifty jobs wait to be reconciled", OPERATOR | {'ddpjob_operator_queue_depth{pod="operator-0"}': "50x300"},
         "DDPJobOperatorBacklog", {}),
)  # fmt: skip

WELL = (
    Case("a healthy job", OPERATOR | JOB, minutes=200),
    Case("an untouched script", OPERATOR | UNTOUCHED, minutes=200),
    Case("two healthy jobs and another volume", OPERATOR | JOB | {
         name.replace("digits", "other").replace('"team"', '"else"'): values for name, values in JOB.items()}
         | volume("db", "1x300")),
    Case("a long validation", OPERATOR | JOB | STUCK),
    Case("the last step is done, and it uploads", OPERATOR | JOB | STUCK | series("ddpjob_rank", "0+60x300")
         | series("ddpjob_status_total_steps", "210x300")),
    Case("suspended for hours", OPERATOR | without(JOB, "ddpjob_rank_heartbeat_age_seconds") | STUCK
         | phases(Suspended="1x300") | series("ddpjob_status_snapshot_timestamp", "0x300"), minutes=200),
    Case("an hour after a long suspension", OPERATOR | JOB | series("ddpjob_status_snapshot_timestamp", "0x300")
         | phases(Suspended="1x140 _x300", Running="_x141 1x300"), minutes=200),
    Case("half an hour after a failure and an hour without nodes", OPERATOR | JOB
         | series("ddpjob_status_snapshot_timestamp", "2400x300") | series("ddpjob_status_snapshot_step", "5x300")
         | phases(Running="1x60 _x69 1x200", Restarting="_x61 1x68 _x200"), minutes=168),
    Case("a script that uploads for an hour after its last step", OPERATOR | JOB | {
         f'ddpjob_status_activity_seconds{{{OF_JOB}, activity="training"}}': "0+54x70 3780x300",
         f'ddpjob_status_activity_seconds{{{OF_JOB}, activity="unknown"}}': "0x70 60+60x300"}, minutes=130),
    Case("its initializers fetched data for most of the hour, which counts when they are done", OPERATOR | JOB
         | phases(Pending="1x50 _x300", Running="_x51 1x300")
         | {f'ddpjob_status_activity_seconds{{{OF_JOB}, activity="initializing"}}': "0x50 3000x300"}
         | series(f'ddpjob_status_activity_seconds{{{OF_JOB}, activity="training"', "0x50 0+54x300")
         | series(f'ddpjob_status_activity_seconds{{{OF_JOB}, activity="saving"', "0x50 0+6x300"), minutes=69),
    Case("a data set that its pods only read fills its volume", OPERATOR | JOB | volume("mine", "1x300")
         | mounted("data", "1x300")),
    Case("succeeded", OPERATOR | STUCK | phases(Succeeded="1x300"), minutes=200),
    Case("two restarts in an hour", OPERATOR | JOB | series("ddpjob_status_restarts", "0x25 1x10 2x200")),
    Case("a short wait in the queue", OPERATOR | JOB | phases(Pending="1x50 _x300", Running="_x51 1x300")),
    Case("a GPU that waits for the job to start", OPERATOR | JOB | series("DCGM", "0x69 90x300")
         | phases(Starting="1x50 _x300", Running="_x51 1x300")),
    Case("GPUs of the pods of a restart, which have loaded for twenty minutes", OPERATOR
         | without(JOB, "DCGM_FI_DEV_GPU_UTIL") | series("ddpjob_gpu", "0.9x60 _x300")
         | {f'ddpjob_gpu_utilization_ratio{{{OF_NEW_POD}, ddpjob="digits", gpu="0"}}': "_x62 0x200"}
         | phases(Running="1x60 _x2 1x200", Restarting="_x61 1x1 _x200"), minutes=83),
    Case("the same by DCGM", OPERATOR | JOB | series("DCGM", "90x60 _x300") | {
         f'ddpjob_trainer_info{{{OF_NEW_POD}, ddpjob="digits", attempt="1", node_rank="0"}}': "_x62 1x200",
         f"DCGM_FI_DEV_GPU_UTIL{{{DCGM.replace('digits-0-0', 'digits-1-0')}}}": "_x62 0x200"}
         | phases(Running="1x60 _x2 1x200", Restarting="_x61 1x1 _x200"), minutes=83),
    Case("a spare's GPU waits, says its pod", OPERATOR | without(JOB, "DCGM_FI_DEV_GPU_UTIL") | SPARE
         | {f'ddpjob_gpu_utilization_ratio{{{OF_SPARE}, ddpjob="digits", gpu="0"}}': "0x300"}, minutes=200),
    Case("a spare's GPU waits, says DCGM", OPERATOR | JOB | SPARE
         | {f"DCGM_FI_DEV_GPU_UTIL{{{DCGM.replace('digits-0-0', 'digits-0-s0')}}}": "0x300"}, minutes=200),
    Case("a spare has taken a place twenty minutes ago, and loads", OPERATOR | without(JOB, "DCGM_FI_DEV_GPU_UTIL") | {
         f'ddpjob_trainer_info{{{OF_SPARE}, ddpjob="digits", attempt="0", node_rank="none"}}': "1x40 _x300",
         f'ddpjob_trainer_info{{{OF_SPARE}, ddpjob="digits", attempt="0", node_rank="1"}}': "_x41 1x300",
         f'ddpjob_gpu_utilization_ratio{{{OF_SPARE}, ddpjob="digits", gpu="0"}}': "0x300"}, minutes=61),
    Case("another replica takes over", {
         name.replace("operator-0", pod): f"{'_x40 ' * (pod == 'operator-1')}{values}"
         for pod in ("operator-0", "operator-1") for name, values in OPERATOR.items()} | JOB),
)  # fmt: skip


def test_promtool_accepts_the_rules_as_they_are_and_as_the_chart_renders_them(promtool: str, tmp_path: Path) -> None:
    (of_chart,) = of_kind("PrometheusRule", rendered({"prometheusRules": {"enabled": True}}))
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(of_chart["spec"]))
    subprocess.run([promtool, "check", "rules", RULES, tmp_path / "rules.yaml"], check=True, capture_output=True)


@pytest.mark.parametrize("case", [*FAULTS, *WELL], ids=lambda case: f"{case.fires or 'nothing'}: {case.what}")
def test_what_fires(promtool: str, case: Case, tmp_path: Path) -> None:
    shutil.copy(RULES, tmp_path / "alerts.yaml")
    ask_promtool(promtool, case, tmp_path)


@pytest.mark.parametrize(
    ("values", "fires"), [("0x300", "DDPJobOperatorDown"), ("_x300", "DDPJobOperatorDown"), ("1x300", "")]
)
def test_the_leader_of_another_release_is_not_taken_for_this_ones(
    promtool: str, tmp_path: Path, values: str, fires: str
) -> None:
    rules = rendered({"prometheusRules": {"enabled": True}, "serviceMonitor": {"enabled": True}})
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(of_kind("PrometheusRule", rules)[0]["spec"]))
    series = {
        f'ddpjob_operator_{metric}{{service="{service}", pod="{service}-0"}}': shown
        for service, leads in (("ddpjob-operator", values), ("students-ddpjob-operator", "1x300"))
        for metric, shown in (("leader", leads), ("shards", leads.replace("0x300", "1x300")))
    }
    case = Case("", series, fires, labels={})
    ask_promtool(promtool, case, tmp_path)


@pytest.mark.parametrize("field", ["relabelings", "metricRelabelings"])
def test_relabelings_that_may_drop_the_label_of_a_release_let_all_leaders_count(field: str) -> None:
    monitor = {"enabled": True, field: [{"action": "labeldrop", "regex": "service"}]}
    (rules,) = of_kind("PrometheusRule", rendered({"prometheusRules": {"enabled": True}, "serviceMonitor": monitor}))
    assert "service=" not in yaml.safe_dump(rules["spec"])


def ask_promtool(promtool: str, case: Case, folder: Path) -> None:
    """Whether the rules in this folder fire as the case says."""
    firing = []
    if case.fires:
        labels = case.labels | ALERTS[case.fires]["labels"] | {"alertname": case.fires, "alertstate": "firing"}
        shown = ", ".join(f'{name}="{value}"' for name, value in labels.items())
        firing = [{"labels": f"ALERTS{{{shown}}}", "value": 1}]
    question = {"expr": 'ALERTS{alertstate="firing"}', "eval_time": f"{case.minutes}m", "exp_samples": firing}
    given = [{"series": name, "values": values} for name, values in case.series.items()]
    tests = [{"interval": "1m", "input_series": given, "promql_expr_test": [question]}]
    (folder / "test.yaml").write_text(
        yaml.safe_dump({"rule_files": ["alerts.yaml"], "evaluation_interval": "1m", "tests": tests})
    )
    ran = subprocess.run([promtool, "test", "rules", folder / "test.yaml"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_alert_has_a_fault_that_fires_it() -> None:
    assert {case.fires for case in FAULTS} == set(ALERTS)


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_says_what_is_wrong_and_leads_to_its_page(alert: str) -> None:
    rule = ALERTS[alert]
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"].endswith(f"/docs/alerts.md#{alert.lower()}")
    assert f"\n## {alert}\n" in PAGE.read_text()
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert re.search(r"(<|>|>=) [0-9.]+$", rule["expr"]), "the threshold is at the end, where the chart replaces it"


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_asks_only_for_metrics_that_exist(alert: str) -> None:
    assert unknown_metrics(ALERTS[alert]["expr"]) == set()


def test_a_rule_that_is_shortened_for_a_test_differs_in_its_times_alone() -> None:
    rule = ALERTS["DDPJobSnapshotTooOld"]
    found = shortened(rule, 900)
    assert found["expr"] == rule["expr"].replace("2h", "8000ms").replace("> 7200", "> 8")
    assert found["for"] == "333ms"
    assert {name: value for name, value in found.items() if name not in ("expr", "for")} == {
        name: value for name, value in rule.items() if name not in ("expr", "for")
    }
    assert shortened(ALERTS["DDPJobGoodputLow"], 240)["expr"].endswith("< 0.5"), "a share is no time"
    assert [name for name, rule in ALERTS.items() if re.search(r"[0-9][smh]\b", shortened(rule, 60)["expr"])] == []


def rules_of(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    (found,) = of_kind("PrometheusRule", rendered({"prometheusRules": {"enabled": True} | values}))
    return {rule["alert"]: rule for group in found["spec"]["groups"] for rule in group["rules"]}


def test_the_chart_has_no_rules_by_default_and_then_the_same_as_the_file() -> None:
    assert of_kind("PrometheusRule", rendered({})) == []
    assert rules_of({}) == ALERTS


def test_each_rule_can_be_changed_or_left_out() -> None:
    changed = {"threshold": 14400, "for": "10m", "severity": "critical"}
    found = rules_of({
        "rules": {"DDPJobSnapshotTooOld": changed, "DDPJobGoodputLow": {"enabled": False},
                  "DDPJobGPUsIdle": {"threshold": 0.01}},
        "additionalRuleLabels": {"team": "platform"}, "runbookUrl": "https://wiki.example.com/ddpjob",
    })  # fmt: skip
    assert set(ALERTS) - set(found) == {"DDPJobGoodputLow"}
    old = found["DDPJobSnapshotTooOld"]
    assert old["expr"] == ALERTS["DDPJobSnapshotTooOld"]["expr"].replace("> 7200", "> 14400")
    assert (old["for"], old["labels"]) == ("10m", {"severity": "critical", "team": "platform"})
    assert old["annotations"]["runbook_url"] == "https://wiki.example.com/ddpjob#ddpjobsnapshottooold"
    assert found["DDPJobGPUsIdle"]["expr"].endswith("< 0.01")


def test_a_rule_that_does_not_exist_is_refused_by_the_chart() -> None:
    with pytest.raises(Exception, match="DDPJobStaled"):
        rules_of({"rules": {"DDPJobStaled": {"enabled": False}}})
