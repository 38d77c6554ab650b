"""The verbs of `ddpjob` on jobs that train in real pods, as a person types them, on a terminal where that matters."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cluster.scenario import NODES, Scenario
from tests.cluster.transcripts import TRAIN
from tests.support.command import COMMAND, beside, to_cluster
from tests.support.waiting import CLUSTER_SECONDS

TRAINING = ("submit", "train.py", "--nodes", str(NODES), "-e", "OMP_NUM_THREADS=1", "-d", "--", "--steps", "100000")
COLUMNS = 60
OF_NO_NAMESPACE = ("drain-node", "version")


class Person:
    """Who types commands in a folder."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario = scenario
        self.folder = folder
        (folder / "train.py").write_text(TRAIN)
        kubectl_here = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        terminal = {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
        self._environment = to_cluster(scenario.kubectl.kubeconfig) | kubectl_here | terminal

    def words(self, verb: str, *arguments: str) -> list[str]:
        of = () if verb in OF_NO_NAMESPACE else ("-n", self.scenario.kubectl.namespace)
        return [verb, *of, *arguments]

    def types(self, verb: str, *arguments: str, code: int = 0) -> str:
        """What the command prints."""
        done = subprocess.run(
            [*beside(), *self.words(verb, *arguments)],
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=CLUSTER_SECONDS,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    @contextmanager
    def on_terminal(self, verb: str, *arguments: str) -> Iterator[Terminal]:
        """The same on a terminal of `COLUMNS` columns, until the end of the block."""
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [*COMMAND, *self.words(verb, *arguments)], env=self._environment, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        try:
            yield Terminal(process, ours)
        finally:
            process.kill()
            process.wait()
            os.close(ours)

    def trains(self, name: str, attempt: int, step: int = 10) -> None:
        """Wait until the job has reported this step in this attempt."""

        def reached() -> bool:
            status = (self.scenario.history.latest("ddpjobs", name) or {}).get("status") or {}
            steps = int((status.get("progress") or {}).get("step") or 0)
            return (status.get("phase"), status.get("attempt"), steps >= step) == ("Running", attempt, True)

        self.scenario.history.wait(reached, f"{name} trains in attempt {attempt}")


class Terminal:
    """Shows what a command prints on it."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process = process
        self._shown = b""
        self._descriptor = descriptor

    @property
    def text(self) -> str:
        return self._shown.decode(errors="replace")

    @property
    def plain(self) -> str:
        """All that it has shown, without colours and movements of the cursor."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.text)

    def shows(self, pattern: str) -> None:
        """Wait for it."""
        until = time.monotonic() + CLUSTER_SECONDS
        while not re.search(pattern, self.plain):
            assert time.monotonic() < until, f"no {pattern!r} in {self.text!r}"
            if select.select([self._descriptor], [], [], 1.0)[0]:
                self._shown += self._read()

    def types(self, line: str) -> None:
        os.write(self._descriptor, line.encode() + b"\n")

    def ends(self) -> int:
        """Its exit code."""
        while self.process.poll() is None:
            if select.select([self._descriptor], [], [], 0.2)[0]:
                self._shown += self._read()
        # what it wrote at its end
        while select.select([self._descriptor], [], [], 1.0)[0] and (part := self._read()):
            self._shown += part
        return self.process.returncode

    def _read(self) -> bytes:
        try:
            return os.read(self._descriptor, 1 << 16)
        except OSError:  # the other side is closed, as a terminal says it
            assert self.process.wait(CLUSTER_SECONDS) is not None
            return b""


def test_a_job_is_followed_suspended_and_taken_from_a_node(scenario: Scenario, tmp_path: Path) -> None:
    person = Person(scenario, tmp_path)
    person.types(*TRAINING)
    person.trains("train", 0)
    assert re.search(r"^train\s+Running", person.types("ls"), re.MULTILINE)
    shown = json.loads(person.types("get", "train", "-o", "json"))
    assert shown["status"]["phase"] == "Running"
    assert "Running" in person.types("get", "train")
    assert "elastic" in person.types("scale", "train", "--nodes", "1", code=2)

    person.types("suspend", "train")
    assert scenario.history.wait(lambda: of(scenario, "train").get("phase") == "Suspended", "the job is suspended")
    saved = of(scenario, "train")["snapshot"]["step"]
    assert "Suspended" in person.types("why", "train")
    person.types("unsuspend", "train")
    person.trains("train", 1, step=saved + 1)
    assert of(scenario, "train").get("restarts", 0) == 0
    with person.on_terminal("watch", "train") as terminal:
        for pattern in (r"step \d+/100000", r"loss", r"snapshot of step \d+", r"rank +pod", r"node +pod"):
            terminal.shows(pattern)
        # a picture begins at the left of the last line of the one before; of what comes last a part may be missing
        *lines, _ = re.split(r"[\r\n]+", terminal.plain)
        assert max(len(line.rstrip()) for line in lines) <= COLUMNS

    pods = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in scenario.kubectl.list("pods")}
    node = pods["train-1-1"]
    try:
        said = person.types("drain-node", node)
        assert f"no pod of a DDPJob is left on {node}" in said
        person.trains("train", 2, step=saved + 1)
        now = of(scenario, "train")
        # a server without the condition DisruptionTarget (KEP-3329) does not tell an eviction from a deletion
        counted = (now.get("restarts", 0), now.get("disruptions", 0))
        assert counted == ((0, 1) if scenario.kubectl.minor_version() >= 25 else (1, 0))
        others = [pod["spec"].get("nodeName") for pod in scenario.kubectl.list("pods")]
        assert node not in others
    finally:
        scenario.kubectl.run("uncordon", node)
    person.types("cancel", "train", "--yes")
    assert scenario.kubectl.get("ddpjob", "train") is None
    assert scenario.kubectl.get("pvc", "train-shared") is not None, "snapshots outlive a job that is cancelled"


def test_a_shell_opens_where_a_job_has_failed(scenario: Scenario, tmp_path: Path) -> None:
    person = Person(scenario, tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('wrong flag')")
    person.types("submit", "train.py", "-e", "TEAM=vision", code=1)
    failure = of(scenario, "train")["lastFailure"]
    with person.on_terminal("debug", "train", "--for", "2m") as terminal:
        terminal.shows(r"[$#] $")
        (shell,) = scenario.kubectl.list("pods", "training.ddpjob.io/role=debug")
        assert shell["spec"]["nodeName"] == failure["nodeName"], "what fails on one node only is found there"
        terminal.types("echo team $TEAM, node rank $DDPJOB_NODE_RANK; ls /mnt/shared; hostname; exit 7")
        assert terminal.ends() == 7
        assert "team vision, node rank 0" in terminal.text
        assert re.search(r"^.*\blogs\b", terminal.text, re.MULTILINE)
    left = [
        pod["metadata"]["name"] for pod in scenario.kubectl.list("pods") if "deletionTimestamp" not in pod["metadata"]
    ]
    assert [name for name in left if name != failure["podName"]] == [], "the pod of the shell goes with it"


def test_the_cluster_is_examined_by_those_who_ask(scenario: Scenario, tmp_path: Path) -> None:
    person = Person(scenario, tmp_path)
    found = json.loads(person.types("version", "-o", "json"))
    assert found["clientVersion"] in str(found["operators"]), found
    said = person.types("doctor")
    assert "0 problems" in said


def of(scenario: Scenario, name: str) -> dict[str, Any]:
    found = scenario.kubectl.get("ddpjob", name)
    return {} if found is None else found.get("status") or {}
