"""The chart's dashboard in a pod of its own, with the volume of jobs mounted by the kubelet."""

from __future__ import annotations

import re
from collections.abc import Callable

import helm_python as helm
import yaml
from tests.cluster.conftest import recorded
from tests.cluster.installation import CHART, Images, chart_values
from tests.cluster.kube import Kubectl, KubectlFailed, Object
from tests.cluster.scenario import Scenario, reader_pod
from tests.cluster.test_shared_claim import claim, runs
from tests.support.waiting import eventually

NAME = "pages-ddpjob-operator-dashboard"

GET = """
import sys, urllib.request
asked = urllib.request.Request(sys.argv[1], headers={"Host": sys.argv[2]})
print(urllib.request.urlopen(asked, timeout=120).read().decode())
"""

TRY_TO_WRITE = """
import pathlib
try:
    pathlib.Path("/mnt/shared/planted").write_text("")
except OSError as error:
    print(error.strerror)
"""


def test_the_dashboard_shows_a_job_that_is_deleted_from_the_volume(
    scenario: Scenario, images: Images, new_namespace: Callable[[str], Kubectl]
) -> None:
    jobs = scenario.kubectl
    jobs.apply(claim("team"))
    scenario.apply(args=["--task=digits", "--epochs=2"], nodes=1, shared={"claimName": "team"})
    assert scenario.wait_phase("Succeeded")["snapshot"]["verified"] is True
    with recorded(new_namespace("pages"), images) as pages:
        pages.kubectl.apply(*same_volume(jobs, pages.kubectl.namespace))
        for item in dashboard(jobs, pages.kubectl, images):  # its Role is of the namespace that it shows
            pages.kubectl.within(item["metadata"]["namespace"]).apply(item)
        jobs.apply(reader_pod("visitor", "team", scenario.trainer_image))
        scenario.history.wait(lambda: runs(scenario, "visitor"), "the pod that visits the pages runs")
        pod = pages.history.wait(lambda: ready_page(pages), "the pod of the dashboard is ready")
        service = pages.kubectl.get("service", NAME)
        assert service is not None

        def page(path: str) -> str:
            url = f"http://{service['spec']['clusterIP']}{path}"
            return re.sub(r"\s+", " ", jobs.python("visitor", GET, url, NAME))

        def answers() -> str | None:
            try:
                return page(job)
            except KubectlFailed:  # the address of a Service leads to a pod some time after that is ready
                return None

        job = f"/jobs/{jobs.namespace}/digits"
        assert "Succeeded" in eventually(answers, "the pages are served at the address of their Service")
        jobs.delete("ddpjob", "digits")
        scenario.history.wait(lambda: scenario.pods(0) == [], "its pods are gone")
        assert job in page("/")
        assert re.search(r"snapshot of step \d+", page(job))
        assert "finished after 46 steps" in page(f"{job}/logs")
        assert pages.kubectl.python(pod, TRY_TO_WRITE).strip() == "Read-only file system"


def same_volume(jobs: Kubectl, namespace: str) -> tuple[Object, Object]:
    """A volume of the same files, and the claim for it: a volume has one claim, and that is of one namespace."""
    bound = jobs.get("pvc", "team")
    assert bound is not None
    volume = jobs.get("pv", bound["spec"]["volumeName"])
    assert volume is not None
    name, spec = f"{namespace}-team", volume["spec"]
    kept = {key: spec[key] for key in ("storageClassName", "capacity", "accessModes", "hostPath")}
    own = kept | {"claimRef": {"namespace": namespace, "name": "team"}, "persistentVolumeReclaimPolicy": "Retain"}
    mine = claim("team")
    mine["spec"]["volumeName"] = name
    return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": own}, mine


def dashboard(jobs: Kubectl, pages: Kubectl, images: Images) -> list[Object]:
    """What the chart has for the dashboard alone."""
    values = chart_values(images) | {
        "watch": {"namespaces": [jobs.namespace]},
        "dashboard": {"enabled": True, "shared": {"claimName": "team", "volumeOf": f"{jobs.namespace}/team"}},
    }
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values, name="pages", namespace=pages.namespace)
    found = [text for name, text in files.items() if "/dashboard-" in name]
    return [manifest for text in found for manifest in yaml.safe_load_all(text) if manifest]


def ready_page(scenario: Scenario) -> str | None:
    for pod in scenario.history.present("pods"):
        if pod["metadata"]["name"].startswith(f"{NAME}-") and runs(scenario, pod["metadata"]["name"]):
            return str(pod["metadata"]["name"])
    return None
