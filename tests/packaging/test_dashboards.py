"""The chart's dashboards as they stand in their files. tests/local/test_dashboards.py asks their queries of a run."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.packaging.chart import Manifest, of_kind, rendered
from tests.packaging.test_alerts import ALERTS
from tests.support import kubernetes_schemas
from tests.support.promql import unknown_metrics

from ddpjob_operator.core.values.names import pvc_name

ROOT = Path(__file__).parents[2]
FILES = {path.stem: path for path in (ROOT / "charts/ddpjob-operator/files/dashboards").glob("*.json")}
PAGES: dict[str, dict[str, Any]] = {name: json.loads(path.read_text()) for name, path in FILES.items()}
BUILT_IN = {
    "__range",
    "__range_ms",
    "__rate_interval",
    "__rate_interval_ms",
    "__interval",
    "__all",
    "__data",
    "__url_time_range",
}


def panels(page: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from (panel for panel in page["panels"] if panel["type"] != "row")


def expressions(page: dict[str, Any]) -> list[str]:
    asked = [target["expr"] for panel in panels(page) for target in panel["targets"]]
    return asked + [item["expr"] for item in page["annotations"]["list"]]


def test_there_is_a_page_for_each_question() -> None:
    assert set(PAGES) == {"fleet", "job", "failures", "gpus", "cost"}


@pytest.mark.parametrize("name", PAGES)
def test_every_query_asks_for_metrics_that_exist(name: str) -> None:
    assert {metric for expr in expressions(PAGES[name]) for metric in unknown_metrics(expr)} == set()


def test_a_misspelled_metric_is_noticed() -> None:
    expr = 'sum by (namespace) (rate(ddpjob_status_restart_total{ddpjob=~"$ddpjob"}[5m])) / on (pod) ddpjob_info'
    assert unknown_metrics(expr) == {"ddpjob_status_restart_total"}
    assert unknown_metrics("ddpjob_status_step_bucket") == {"ddpjob_status_step_bucket"}, "it is no histogram"


@pytest.mark.parametrize("name", PAGES)
def test_every_panel_says_what_it_shows_and_has_a_unit(name: str) -> None:
    for panel in panels(PAGES[name]):
        assert len(panel["description"]) > 20, panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        if panel["type"] in ("timeseries", "bargauge", "state-timeline"):
            assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]


@pytest.mark.parametrize("name", PAGES)
def test_no_panel_is_there_twice(name: str) -> None:
    titles = Counter(panel["title"] for panel in panels(PAGES[name]))
    asked = Counter(tuple(target["expr"] for target in panel["targets"]) for panel in panels(PAGES[name]))
    assert [item for item, count in (titles + asked).items() if count > 1] == []


@pytest.mark.parametrize("name", PAGES)
def test_panels_do_not_overlap(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in PAGES[name]["panels"]:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & taken, panel["title"]
        assert max(x for x, _ in own) < 24, panel["title"]
        taken |= own


@pytest.mark.parametrize("name", PAGES)
def test_every_variable_that_is_used_is_declared_and_the_other_way_round(name: str) -> None:
    page = PAGES[name]
    declared = {item["name"] for item in page["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z_]+)", json.dumps({**page, "description": ""}))) - BUILT_IN
    assert used == declared
    assert {"datasource", "cluster", "namespace", "ddpjob"} <= declared


@pytest.mark.parametrize("name", PAGES)
def test_a_table_is_sorted_by_one_of_its_columns(name: str) -> None:
    for panel in panels(PAGES[name]):
        columns = {item["matcher"]["options"] for item in panel["fieldConfig"]["overrides"]}
        assert {item["displayName"] for item in panel["options"].get("sortBy", ())} <= columns, panel["title"]


def test_links_lead_to_pages_that_exist() -> None:
    uids = {page["uid"] for page in PAGES.values()}
    linked = {uid for path in FILES.values() for uid in re.findall(r'"/d/([a-z-]+)\?', path.read_text())}
    assert linked <= uids
    assert linked == {"ddpjob-job"}
    for page in PAGES.values():
        assert [link["tags"] for link in page["links"]] == [page["tags"]] == [["ddpjob"]]


@pytest.mark.parametrize("name", PAGES)
def test_every_query_and_variable_is_of_one_cluster(name: str) -> None:
    """One Prometheus may have the series of several, with jobs of the same name in namespaces of the same name."""
    chosen = [item["definition"] for item in PAGES[name]["templating"]["list"] if item["type"] == "query"]
    assert chosen[0] == "label_values(ddpjob_operator_leader, cluster)"
    for expr in (*chosen[1:], *expressions(PAGES[name])):
        found = re.findall(r'\b(?:ddpjob_|DCGM_|kubelet_|ALERTS)\w*(\{cluster="\$cluster")?', expr)
        assert found, expr
        assert all(found), expr


def test_an_alert_that_a_panel_names_exists() -> None:
    named = {alert for path in FILES.values() for alert in re.findall(r"\bDDPJob[A-Z]\w+", path.read_text())}
    assert named
    assert named <= set(ALERTS)


def check_answers(
    promtool: str, folder: Path, series: dict[str, str], questions: list[dict[str, Any]], interval: str = "1m"
) -> None:
    """Each question has what promtool expects, of series with a value each `interval`."""
    given = [{"series": name, "values": values} for name, values in series.items()]
    file = folder / "test.yaml"
    file.write_text(
        yaml.safe_dump({"tests": [{"interval": interval, "input_series": given, "promql_expr_test": questions}]})
    )
    ran = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def of_an_hour(expr: str) -> str:
    """Of all namespaces, without a cluster."""
    for name, value in {"__range_ms": "3600000", "__range": "1h", "namespace": ".*", "cluster": ""}.items():
        expr = expr.replace(f"${name}", value)
    return expr


def test_the_first_event_of_its_kind_is_counted_too(promtool: str, tmp_path: Path) -> None:
    """`increase` alone sees one of these four: three series begin in the last hour, two of them with a new operator, of
    which one is gone again. Of one that ends as the hour begins, nothing is counted.
    """
    (panel,) = (panel for panel in panels(PAGES["failures"]) if panel["title"] == "Jobs failed")
    expr = of_an_hour(panel["targets"][0]["expr"])
    name = 'ddpjob_operator_failed_jobs_total{{namespace="team", reason="{}", pod="{}"}}'.format
    values = {
        name("Stalled", "operator-0"): "6x70 7x20",
        name("UserError", "operator-0"): "_x70 1x20",
        name("Stalled", "operator-1"): "_x80 1x10",
        name("Stalled", "operator-2"): "_x40 1x20 stale",
        name("Stalled", "operator-3"): "40x31 stale",
    }
    for pod, begun in (("operator-0", "0x90"), ("operator-1", "_x80 4800x10"), ("operator-2", "_x40 2400x20 stale")):
        values[f'ddpjob_operator_start_timestamp_seconds{{pod="{pod}"}}'] = begun
    question = {"expr": expr, "eval_time": "90m", "exp_samples": [{"labels": "{}", "value": 4}]}
    check_answers(promtool, tmp_path, values, [question])


@pytest.mark.parametrize(
    ("counter", "process", "restarts"),
    [
        ("_x60 9000+1x30", "_x60 0x30", 30),  # Prometheus has half an hour
        ("9000+1x20 _x15 9036+1x54", "0x20 _x15 0x54", 54),  # no scrape as the hour begins
        ("9000+1x60 1+1x29", "0x60 3660x29", 60),  # the container is restarted
        ("_x40 0+1x20 1+1x29", "_x40 2400x20 3660x29", 50),  # so is that of a new pod
    ],
)
def test_what_was_counted_before_the_time_shown_is_not_counted_again(
    promtool: str, tmp_path: Path, counter: str, process: str, restarts: int
) -> None:
    """There is a restart each minute. `increase` extrapolates by half a minute."""
    (panel,) = (panel for panel in panels(PAGES["failures"]) if panel["title"] == "Restarts")
    expr = f"abs(({of_an_hour(panel['targets'][0]['expr'])}) - {restarts}) <= bool 1"
    name = 'ddpjob_operator_restarts_total{namespace="team", reason="NodeLost", pod="operator-0"}'
    series = {name: counter, 'ddpjob_operator_start_timestamp_seconds{pod="operator-0"}': process}
    question = {"expr": expr, "eval_time": "90m", "exp_samples": [{"labels": "{}", "value": 1}]}
    check_answers(promtool, tmp_path, series, [question])


@pytest.mark.parametrize(
    ("page", "title", "share"),
    [("fleet", "Goodput in this time", 0), ("cost", "Share that trained", 0), ("failures", "Share lost", 1)],
)
def test_a_failure_that_loses_more_than_the_time_shown_leaves_no_share_below_0_or_above_1(
    promtool: str, tmp_path: Path, page: str, title: str, share: int
) -> None:
    """Two hours of training are lost, and the last hour is shown."""
    (panel,) = (panel for panel in panels(PAGES[page]) if panel["title"] == title)
    expr = panel["targets"][0]["expr"]
    given = {"cluster": "", "namespace": ".*", "price_gpu_hour": "2", "price_node_hour": "0.5"}
    given |= {"__range_ms": "3600000", "__range": "1h"}
    for name, value in given.items():
        expr = expr.replace(f"${name}", value)
    series = {
        'ddpjob_held_node_seconds_total{namespace="team", cause="training"}': "0+60x180",
        'ddpjob_lost_node_seconds_total{namespace="team"}': "0x170 7200x10",
    }
    question = {"expr": expr, "eval_time": "3h", "exp_samples": [{"labels": "{}", "value": share}]}
    check_answers(promtool, tmp_path, series, [question])


def test_a_live_recovery_is_seen_though_another_pod_has_node_rank_0_since(promtool: str, tmp_path: Path) -> None:
    """The new pod begins with what its peers have counted."""
    (panel,) = (panel for panel in panels(PAGES["job"]) if panel["title"] == "Time of live recoveries")
    expr = re.sub(r"\$__rate_interval", "5m", panel["targets"][0]["expr"])
    expr = expr.replace("$cluster", "").replace("$namespace", ".*").replace("$ddpjob", ".*")
    name = (
        'ddpjob_train_live_recovery_seconds_sum{{ddpjob="digits", namespace="team", kind="lost", instance="{}"}}'.format
    )
    values = {name("10.0.0.1"): "0x20 stale", name("10.0.0.2"): "_x22 0.2x20"}
    labels = '{kind="lost"}'
    question = {"expr": f"{expr} > bool 0.1", "eval_time": "6m", "exp_samples": [{"labels": labels, "value": 1}]}
    check_answers(promtool, tmp_path, values, [question], "15s")


@pytest.mark.parametrize("claim", [pvc_name("digits"), pvc_name("resnet50.v2"), "datasets"])
def test_the_volume_of_a_job_is_that_of_its_claim(promtool: str, tmp_path: Path, claim: str) -> None:
    """The name of a claim may be the user's, and has a digest where that of its job is no DNS label."""
    (panel,) = (panel for panel in panels(PAGES["job"]) if panel["title"] == "Free share of its volume")
    expr = panel["targets"][0]["expr"].replace("$cluster", "").replace("$namespace", "team").replace("$ddpjob", "it")
    of_volume = 'kubelet_volume_stats_{}_bytes{{namespace="{}", persistentvolumeclaim="{}"}}'.format
    volumes = ((claim, "team", 25), (claim, "other", 50), ("digits.v1-shared", "team", 75))
    series = {of_volume("available", team, name): f"{free}x10" for name, team, free in volumes}
    series |= {of_volume("capacity", team, name): "100x10" for name, team, _ in volumes}
    of_job = 'ddpjob_info{{namespace="team", ddpjob="it", claim="{}", pod="{}"}}'.format
    series |= {of_job(claim, f"operator-{replica}"): "1x10" for replica in range(2)}
    labels = f'{{namespace="team", persistentvolumeclaim="{claim}"}}'
    question = {"expr": expr, "eval_time": "5m", "exp_samples": [{"labels": labels, "value": 0.25}]}
    check_answers(promtool, tmp_path, series, [question])


@pytest.mark.parametrize(("cluster", "running"), [("east", 1), ("west", 2)])
def test_one_of_several_clusters_is_shown(promtool: str, tmp_path: Path, cluster: str, running: int) -> None:
    (panel,) = (panel for panel in panels(PAGES["fleet"]) if panel["title"] == "Running")
    expr = panel["targets"][0]["expr"]
    for name, value in {"cluster": cluster, "namespace": ".*", "ddpjob": ".*"}.items():
        expr = expr.replace(f"${name}", value)
    phase = 'ddpjob_status_phase{{cluster="{}", namespace="team", ddpjob="{}", phase="Running"}}'.format
    jobs = (("east", "digits"), ("west", "digits"), ("west", "other"))
    question = {"expr": expr, "eval_time": "5m", "exp_samples": [{"labels": "{}", "value": running}]}
    check_answers(promtool, tmp_path, {phase(*job): "1x10" for job in jobs}, [question])


def config_maps(values: Manifest) -> dict[str, Manifest]:
    found = of_kind("ConfigMap", rendered({"dashboards": {"enabled": True} | values}))
    return {name: manifest for manifest in found for name in manifest["data"] if name.endswith(".json")}


def test_the_chart_has_no_dashboards_by_default_and_then_those_of_the_files() -> None:
    assert not any("grafana" in str(manifest["metadata"].get("labels")) for manifest in rendered({}))
    found = config_maps({})
    pages = {name: json.loads(manifest["data"][name]) for name, manifest in found.items()}
    assert pages == {f"ddpjob-{name}.json": page for name, page in PAGES.items()}
    assert {manifest["metadata"]["labels"]["grafana_dashboard"] for manifest in found.values()} == {"1"}
    assert {manifest["metadata"]["namespace"] for manifest in found.values()} == {"ddpjob-system"}


def test_the_config_maps_are_valid() -> None:
    for manifest in config_maps({}).values():
        kubernetes_schemas.validate(manifest, "1.30", strict=True)


def test_namespace_labels_and_annotations_are_values() -> None:
    values = {"namespace": "monitoring", "labels": {"team": "ml"}, "annotations": {"grafana_folder": "DDPJob"}}
    metadata = config_maps(values)["ddpjob-fleet.json"]["metadata"]
    assert (metadata["namespace"], metadata["annotations"]) == ("monitoring", {"grafana_folder": "DDPJob"})
    assert metadata["labels"]["team"] == "ml"


def test_prices_come_from_the_values() -> None:
    text = config_maps({"prices": {"gpuHour": 0, "nodeHour": 1.25, "currency": "€"}})["ddpjob-cost.json"]["data"][
        "ddpjob-cost.json"
    ]
    variables = {item["name"]: item for item in json.loads(text)["templating"]["list"]}
    assert variables["price_gpu_hour"]["query"] == variables["price_gpu_hour"]["current"]["value"] == "0"
    assert variables["price_node_hour"]["current"]["value"] == "1.25"
    assert "currency:€" in text
    assert "USD" not in text


HOURS = {
    f'ddpjob_{which}{kind}_seconds_total{{namespace="{namespace}"{labels}}}': f"0+{amount}x60"
    for namespace, gpus, nodes in (("research", 2, 1), ("batch", 4, 2), ("other", 8, 4))
    for kind, held in (("gpu", gpus), ("node", nodes))
    for which, labels, amount in (
        ("held_", ', cause="training"', 60 * held), ("lost_", "", 6 * held), ("", ', outcome="Succeeded"', 60 * held),
    )
}  # fmt: skip
"""An hour in which three namespaces hold GPUs and nodes, and lose a tenth of it."""
JOBS = {
    f'ddpjob_status_{what}{{namespace="{namespace}", ddpjob="digits"{labels}}}': value
    for namespace in ("research", "other")
    for what, labels, value in (
        ("gpus", "", "8x60"), ("nodes", "", "1x60"), ("phase", ', phase="Running"', "1x60"),
        ("activity_seconds", ', activity="training"', "0+60x60"), ("eta_timestamp_seconds", "", "7200x60"),
    )
}  # fmt: skip


@pytest.mark.parametrize(
    ("namespaces", "research", "batch"),
    [
        ({}, 2 * 2 + 0.5, 4 * 2 + 2 * 0.5),
        ({"research": {"gpuHour": 3, "nodeHour": 0.75}, "batch": {"gpuHour": 0}}, 2 * 3 + 0.75, 2 * 0.5),
    ],
)
def test_what_is_held_costs_what_the_table_of_prices_says(
    promtool: str, tmp_path: Path, namespaces: dict[str, dict[str, float]], research: float, batch: float
) -> None:
    """A namespace without a price of its own, and a kind that it does not name, have the default."""
    text = config_maps({"prices": {"namespaces": namespaces}})["ddpjob-cost.json"]["data"]["ddpjob-cost.json"]
    asked = {panel["title"]: [target["expr"] for target in panel["targets"]] for panel in panels(json.loads(text))}
    given = {"cluster": "", "namespace": ".*", "ddpjob": ".*", "price_gpu_hour": "2", "price_node_hour": "0.5"}
    given |= {"__range_ms": "3600000", "__range": "1h"}
    other = 8 * 2 + 4 * 0.5
    # of the two jobs: 8 GPUs and a node for an hour, and an hour more until their end
    own = namespaces.get("research", {})
    jobs = {"research": 8 * own.get("gpuHour", 2) + own.get("nodeHour", 0.5), "other": 16.5}
    of_job = {f'{{namespace="{name}", ddpjob="digits"}}': value for name, value in jobs.items()}
    of_namespace = {"research": research, "batch": batch, "other": other}
    by_namespace = {f'{{namespace="{name}"}}': value for name, value in of_namespace.items()}
    total = research + batch + other
    expected = {
        "Cost": [{"{}": total}],
        "An hour now": [{"{}": total}],
        "Trained for it": [{"{}": 0.9 * total}],
        "Share that trained": [{"{}": 0.9}],
        "Lost with failures": [{"{}": 0.1 * total}],
        "Until running jobs end": [{"{}": sum(jobs.values())}],
        "By namespace": [by_namespace],
        "By activity": [{'{cause="training"}': total}],
        "By outcome": [{'{outcome="Succeeded"}': total}],
        "An hour, by namespace": [by_namespace],
        "Jobs": [of_job] * 4,
    }
    questions = []
    for title, answers in expected.items():
        for expr, samples in zip(asked[title], answers, strict=True):
            for name, value in given.items():
                expr = expr.replace(f"${name}", value)
            found = [{"labels": labels, "value": round(value, 3)} for labels, value in samples.items()]
            questions.append({"expr": f"round({expr}, 0.001)", "eval_time": "1h", "exp_samples": found})
    check_answers(promtool, tmp_path, HOURS | JOBS, questions)
