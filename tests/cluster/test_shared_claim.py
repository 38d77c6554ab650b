"""A claim that several jobs use, of which each sees its own folder and the data sets: by the kubelet's own mounts."""

from __future__ import annotations

import json

from tests.cluster.kube import Object
from tests.cluster.scenario import Scenario, reader_pod

PREPARE = """
import pathlib
shared = pathlib.Path("/mnt/shared")
# the last one would end every attempt of the job, if it were where the job looks
for path in ("datasets/digits.txt", "checkpoints/other/secret", "checkpoints/digits/attempts/999999999999-planted"):
    (shared / path).parent.mkdir(parents=True)
    (shared / path).write_text("of another job")
"""

LOOK_AROUND = """
{
  ls -A /mnt/shared
  cat datasets/digits.txt; echo
  if touch datasets/planted; then echo planted; fi
  ls checkpoints/other ../checkpoints/other || true
} > seen/all 2>&1
"""

READ = """
import json, pathlib
shared = pathlib.Path("/mnt/shared")
print(json.dumps({
    "all": (shared / "jobs/digits/seen/all").read_text().splitlines(),
    "snapshots": len(list((shared / "jobs/digits/checkpoints/digits").glob("step-*"))),
    "of its name": sorted(str(path.relative_to(shared)) for path in shared.glob("*/digits*")),
    "beside": [path.name for path in (shared / "checkpoints/digits").iterdir()],
}))
"""


def test_a_job_finds_its_own_folder_and_the_data_sets_and_nothing_of_other_jobs(scenario: Scenario) -> None:
    scenario.kubectl.apply(claim("team"))
    scenario.kubectl.apply(reader_pod("look", "team", scenario.trainer_image))
    scenario.history.wait(lambda: runs(scenario, "look"), "the pod that reads the volume runs")
    scenario.kubectl.python("look", PREPARE)

    scenario.apply(
        args=["--task=digits", "--epochs=2"],
        nodes=1,
        shared={"claimName": "team", "scope": "Job"},
        initializers=[{"name": "look", "path": "seen", "script": f"mkdir seen\n{LOOK_AROUND}"}],
    )
    assert scenario.wait_phase("Succeeded")["snapshot"]["verified"] is True

    found = json.loads(scenario.kubectl.python("look", READ))
    seen = found["all"]
    assert "of another job" in seen
    assert "planted" not in seen
    assert any("Read-only file system" in line for line in seen)
    assert sum("No such file or directory" in line for line in seen) == 2
    assert found["snapshots"] > 0
    assert found["of its name"] == ["checkpoints/digits", "datasets/digits.txt", "jobs/digits"]
    assert found["beside"] == ["attempts"], "nothing was written into the folder of its name outside its own"


def claim(name: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }


def runs(scenario: Scenario, name: str) -> bool:
    pod = scenario.history.latest("pods", name) or {}
    return bool(((pod.get("status") or {}).get("containerStatuses") or [{}])[0].get("ready"))
