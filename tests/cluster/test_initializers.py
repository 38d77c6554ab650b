"""Data that a job fetches onto its volume, by real pods from a real web server, before its gang exists."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

from tests.cluster.kube import Object
from tests.cluster.scenario import Scenario, reader_pod
from tests.support.waiting import eventually

BODY = "0123456789" * 1000
DIGEST = hashlib.sha256(BODY.encode()).hexdigest()

SERVE = f"""
import functools, http.server, pathlib
pathlib.Path("/tmp/digits.txt").write_text("{BODY}")
handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory="/tmp")
http.server.ThreadingHTTPServer(("", 8000), handler).serve_forever()
"""

LOOK = """
import hashlib, json, pathlib
shared = pathlib.Path("/mnt/shared")
data = (shared / "datasets" / "digits.txt").read_bytes()
print(json.dumps({
    "digest": hashlib.sha256(data).hexdigest(),
    "counted": (shared / "datasets" / "count").read_text().split(),
    "markers": sorted(json.loads(file.read_text())["name"] for file in shared.glob(".ddpjob/initialized/*.json")),
    "left": [file.name for file in shared.glob("datasets/.*")],
}))
"""


def web_server(image: str) -> Object:
    """A pod that serves one file, within the restricted Pod Security profile."""
    pod = reader_pod("web", "unused", image)
    (container,) = pod["spec"]["containers"]
    container |= {"name": "web", "command": ["python", "-c", SERVE]}
    container["volumeMounts"] = [{"name": "tmp", "mountPath": "/tmp"}]
    pod["spec"]["volumes"] = [{"name": "tmp", "emptyDir": {}}]
    return pod


def test_data_is_fetched_once_before_the_gang_and_found_by_the_next_job(scenario: Scenario) -> None:
    scenario.kubectl.apply(web_server(scenario.trainer_image))

    def serves() -> str | None:
        pod = scenario.history.latest("pods", "web") or {}
        status = pod.get("status") or {}
        ready = (status.get("containerStatuses") or [{}])[0].get("ready")
        return str(status["podIP"]) if ready else None

    address = scenario.history.wait(serves, "the web server runs")
    initializers = [
        {"name": "digits", "source": f"http://{address}:8000/digits.txt", "path": "datasets/digits.txt",
         "sha256": DIGEST},
        {"name": "count", "path": "datasets/count", "script": "wc -c < datasets/digits.txt >> datasets/count"},
    ]  # fmt: skip
    short = {"args": ["--task=digits", "--epochs=2"], "nodes": 1, "initializers": initializers}
    scenario.apply(**short)
    status = scenario.wait_phase("Succeeded")
    (condition,) = (item for item in status["conditions"] if item["type"] == "Initialized")
    assert (condition["status"], condition["reason"]) == ("True", "DataReady")
    fetched = scenario.history.latest("pods", "digits-init-0")
    trained = scenario.history.latest("pods", "digits-0-0")
    assert fetched is not None
    assert trained is not None
    assert (
        fetched["status"]["containerStatuses"][0]["state"]["terminated"]["finishedAt"]
        <= (trained["metadata"]["creationTimestamp"])
    )
    scenario.kubectl.delete("pod", "web")

    again = replace(scenario, name="again")
    again.apply(**short, shared={"claimName": "digits-shared"})
    assert again.wait_phase("Succeeded").get("initializerFailures", 0) == 0
    seen = look(scenario)
    assert seen == {"digest": DIGEST, "counted": [str(len(BODY))], "markers": ["count", "digits"], "left": []}


def look(scenario: Scenario) -> Object:
    """What is on the volume, read by a pod of its own."""
    scenario.kubectl.apply(reader_pod("look", "digits-shared", scenario.trainer_image))

    def runs() -> bool:
        pod = scenario.kubectl.get("pod", "look") or {}
        return bool(((pod.get("status") or {}).get("containerStatuses") or [{}])[0].get("ready"))

    eventually(runs, "the pod that reads the volume runs")
    found: Object = json.loads(scenario.kubectl.python("look", LOOK))
    return found
