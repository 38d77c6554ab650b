"""The chart's dashboard in a pod of its own, with the volume of jobs: by the kubelet's mount and the chart's account."""

from __future__ import annotations

import re

import helm_python as helm
import yaml
from tests.cluster.installation import CHART, Images, chart_values
from tests.cluster.kube import Object
from tests.cluster.scenario import Scenario, reader_pod
from tests.cluster.test_shared_claim import claim, runs

NAME = "pages-ddpjob-operator-dashboard"

GET = """
import sys, urllib.request
print(urllib.request.urlopen(urllib.request.Request(sys.argv[1], headers={"Host": sys.argv[2]}), timeout=20).read().decode())
"""

TRY_TO_WRITE = """
import pathlib
try:
    pathlib.Path("/mnt/shared/planted").write_text("")
except OSError as error:
    print(error.strerror)
"""


def test_the_dashboard_shows_a_job_that_is_deleted_from_the_volume(scenario: Scenario, images: Images) -> None:
    kubectl = scenario.kubectl
    kubectl.apply(claim("team"))
    scenario.apply(args=["--task=digits", "--epochs=2"], shared={"claimName": "team"})
    assert scenario.wait_phase("Succeeded")["snapshot"]["verified"] is True
    kubectl.apply(*dashboard(kubectl.namespace, images))
    kubectl.apply(reader_pod("visitor", "team", scenario.trainer_image))
    scenario.history.wait(lambda: runs(scenario, "visitor"), "the pod that visits the pages runs")
    pod = scenario.history.wait(lambda: ready_page(scenario), "the pod of the dashboard is ready")
    service = kubectl.get("service", NAME)
    assert service is not None

    def page(path: str) -> str:
        url = f"http://{service['spec']['clusterIP']}{path}"
        return re.sub(r"\s+", " ", kubectl.python("visitor", GET, url, NAME))

    job = f"/jobs/{kubectl.namespace}/digits"
    assert "Succeeded" in page(job)
    kubectl.delete("ddpjob", "digits")
    scenario.history.wait(lambda: scenario.pod(0, 0) is None and scenario.pod(1, 0) is None, "its pods are gone")
    assert job in page("/")
    gone = page(job)
    assert re.search(r"snapshot of step \d+", gone)
    assert "finished after" in page(f"{job}/logs")
    assert kubectl.python(pod, TRY_TO_WRITE).strip() == "Read-only file system"


def dashboard(namespace: str, images: Images) -> list[Object]:
    """What the chart has for the dashboard alone."""
    values = chart_values(images) | {
        "watch": {"namespaces": [namespace]},
        "dashboard": {"enabled": True, "shared": {"claimName": "team"}},
    }
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values, name="pages", namespace=namespace)
    found = [text for name, text in files.items() if "/dashboard-" in name]
    return [manifest for text in found for manifest in yaml.safe_load_all(text) if manifest]


def ready_page(scenario: Scenario) -> str | None:
    for pod in scenario.history.present("pods"):
        if pod["metadata"]["name"].startswith(f"{NAME}-") and runs(scenario, pod["metadata"]["name"]):
            return str(pod["metadata"]["name"])
    return None
