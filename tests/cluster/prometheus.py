"""A real Prometheus that watches a cluster from outside.

Debian's Prometheus is built without Kubernetes service discovery, so a watch on pods keeps its target files up to date.
Pods are scraped through the API server's proxy: a pod's own address can be reached from here on some clusters only, the
API server on all of them.
"""

from __future__ import annotations

import base64
import json
import subprocess
import tempfile
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tests.cluster.kube import Kubectl, Object
from tests.cluster.watch import Watch
from tests.support.ports import free_port
from tests.support.waiting import eventually


@dataclass(frozen=True, slots=True)
class Pods:
    """What one scrape job asks: pods by label, the port of their /metrics, and the labels of a target.

    The operator's series have a namespace of their own, that of the job, so its targets have none: the chart's
    ServiceMonitor drops it.
    """

    selector: str
    port: int
    labels: tuple[str, ...]


SCRAPED = {
    "operator": Pods("app.kubernetes.io/name=ddpjob-operator", 8080, ("pod",)),
    "trainer": Pods("app.kubernetes.io/managed-by=ddpjob", 9400, ("namespace", "pod")),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One series of an answer: its labels and its value."""

    labels: dict[str, str]
    value: float

    def __str__(self) -> str:
        labels = ", ".join(f'{name}="{value}"' for name, value in sorted(self.labels.items()))
        return f"{{{labels}}} {self.value:.6g}"


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running server."""

    url: str

    def query(self, promql: str) -> list[Sample]:
        """The answer to an instant query.

        Raises urllib.error.HTTPError if the query is wrong.
        """
        answer = self._get("query", query=promql)
        return [Sample(series["metric"], float(series["value"][1])) for series in answer["result"]]

    def scrape_errors(self) -> list[str]:
        """Why targets could not be scraped."""
        return [target["lastError"] for target in self._get("targets")["activeTargets"] if target["lastError"]]

    def scraped(self, job: str) -> set[str]:
        """Pods of one scrape job that answered at least once in the last ten minutes."""
        return {sample.labels["pod"] for sample in self.query(f'max_over_time(up{{job="{job}"}}[10m]) == 1')}

    def _get(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=60) as answer:
            return json.load(answer)["data"]


@contextmanager
def prometheus(binary: Path, kubectl: Kubectl, folder: Path) -> Iterator[Prometheus]:
    """Run Prometheus until the end of the block; its data and log stay in `folder`.

    It has two scrape jobs: `operator`, and `trainer` for the pods of all DDPJobs.
    """
    with ExitStack() as cleanup:
        secrets = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="ddpjob-prometheus-")))
        server, login = _login(kubectl.kubeconfig, secrets)
        for name, pods in SCRAPED.items():
            cleanup.enter_context(_targets(kubectl, server, pods, folder / f"{name}.json"))
        scrapes = [_scrape(folder, server, login, name) for name in SCRAPED]
        yield cleanup.enter_context(started(binary, scrapes, folder))


@contextmanager
def started(
    binary: Path, scrapes: list[dict[str, Any]], folder: Path, rules: Path | None = None, every: str = "2s"
) -> Iterator[Prometheus]:
    """Run Prometheus with these scrape configurations, and with a file of rules, until the end of the block.

    It scrapes, and evaluates the rules, `every` so often.
    """
    port = free_port()
    config = folder / "prometheus.yml"
    timing = {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every}
    files = [str(rules)] if rules is not None else []
    config.write_text(
        yaml.safe_dump({"global": timing, "rule_files": files, "scrape_configs": scrapes}, sort_keys=False)
    )
    with ExitStack() as cleanup:
        log = folder / "prometheus.log"
        process = cleanup.enter_context(
            _process(
                [
                    str(binary),
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=cleanup.enter_context(log.open("w")),
                stderr=subprocess.STDOUT,
            )
        )
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: _ready(url, process, log), "Prometheus is ready")
        yield Prometheus(url)


@contextmanager
def _targets(kubectl: Kubectl, server: str, pods: Pods, file: Path) -> Iterator[None]:
    """Keep a target file in step with the pods that run, by a watch, until the end of the block."""
    watch = Watch(kubectl, "/api/v1/pods", relist=True, labelSelector=pods.selector)
    thread = threading.Thread(target=_write_targets, args=(watch, server, pods, file), daemon=True)
    thread.start()
    try:
        yield
    finally:
        watch.stop()
        thread.join(5)


def _write_targets(watch: Watch, server: str, pods: Pods, file: Path) -> None:
    running: dict[str, Object] = {}
    for type_, pod in watch:
        metadata = pod["metadata"]
        if type_ != "DELETED" and pod["status"].get("phase") == "Running":
            path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}:{pods.port}/proxy/metrics"
            running[metadata["uid"]] = {
                "targets": [server.removeprefix("https://")],
                "labels": {"__metrics_path__": path, **_labels(pods, metadata)},
            }
        else:
            running.pop(metadata["uid"], None)
        new = file.with_suffix(".new")
        new.write_text(json.dumps(list(running.values())))
        new.replace(file)


def _labels(pods: Pods, metadata: Object) -> dict[str, str]:
    values = {"namespace": metadata["namespace"], "pod": metadata["name"]}
    return {name: values[name] for name in pods.labels}


def _scrape(folder: Path, server: str, login: dict[str, Any], name: str) -> dict[str, Any]:
    return {
        "job_name": name,
        "scheme": "https" if server.startswith("https:") else "http",
        "file_sd_configs": [{"files": [str(folder / f"{name}.json")]}],
        **login,
    }


@contextmanager
def _process(command: list[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process that ends with the block. A Ctrl-C in the terminal is not for it: it ends in its turn."""
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _login(kubeconfig: Path, secrets: Path) -> tuple[str, dict[str, Any]]:
    """The API server's URL, and Prometheus' settings to log in there."""
    config = yaml.safe_load(kubeconfig.read_text())
    context = _named(config["contexts"], config["current-context"])["context"]
    cluster = _named(config["clusters"], context["cluster"])["cluster"]
    user = _named(config["users"], context["user"])["user"]
    tls: dict[str, Any] = {}
    for source, key, setting in (
        (cluster, "certificate-authority", "ca_file"),
        (user, "client-certificate", "cert_file"),
        (user, "client-key", "key_file"),
    ):
        if key in source:
            tls[setting] = source[key]
        elif f"{key}-data" in source:
            file = secrets / key
            file.write_bytes(base64.b64decode(source[f"{key}-data"]))
            tls[setting] = str(file)
    login: dict[str, Any] = {"tls_config": tls}
    if "token" in user:
        file = secrets / "token"
        file.write_text(user["token"])
        login["authorization"] = {"credentials_file": str(file)}
    return cluster["server"], login


def _named(entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(entry for entry in entries if entry["name"] == name)


def _ready(url: str, process: subprocess.Popen[bytes], log: Path) -> bool:
    if process.poll() is not None:
        raise RuntimeError(f"Prometheus ended with exit code {process.returncode}:\n{log.read_text()[-2000:]}")
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
