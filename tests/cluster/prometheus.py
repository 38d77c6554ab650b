"""A real Prometheus that watches a cluster from outside.

It finds the operator and the trainer pods with Kubernetes service discovery, and scrapes them through the API server's
proxy: a pod's own address can be reached from here on some clusters only, the API server on all of them.
"""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tests.cluster.kube import wait_for

SCRAPE_SECONDS = 1


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

    def up(self, job: str) -> list[str]:
        """Pods of one scrape job whose last scrape worked."""
        targets = self._get("targets", state="active")["activeTargets"]
        return [t["labels"]["pod"] for t in targets if t["scrapePool"] == job and t["health"] == "up"]

    def _get(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
            return json.load(answer)["data"]


@contextmanager
def prometheus(binary: Path, kubeconfig: Path, folder: Path) -> Iterator[Prometheus]:
    """Run Prometheus until the end of the block; its data and log stay in `folder`."""
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="ddpjob-prometheus-") as secrets:
        config = folder / "prometheus.yml"
        config.write_text(yaml.safe_dump(configuration(kubeconfig, Path(secrets)), sort_keys=False))
        with (folder / "prometheus.log").open("w") as log:
            process = subprocess.Popen(
                [
                    binary,
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            server = Prometheus(f"http://127.0.0.1:{port}")
            wait_for(
                lambda: _ready(server.url, process), 30, "Prometheus is ready", (folder / "prometheus.log").read_text
            )
            yield server
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def configuration(kubeconfig: Path, secrets: Path) -> dict[str, Any]:
    """Two scrape jobs: `operator`, and `trainer` for the pods of all DDPJobs.

    `secrets` gets what a kubeconfig holds inline and Prometheus wants as files.
    """
    server, login = _login(kubeconfig, secrets)
    return {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "scrape_timeout": f"{SCRAPE_SECONDS}s"},
        "scrape_configs": [
            _scrape(server, login, "operator", "app.kubernetes.io/name=ddpjob-operator", 8080),
            _scrape(server, login, "trainer", "app.kubernetes.io/managed-by=ddpjob", 9400),
        ],
    }


def _scrape(server: str, login: dict[str, Any], name: str, selector: str, port: int) -> dict[str, Any]:
    host = server.removeprefix("https://")
    proxied = f"/api/v1/namespaces/${{1}}/pods/${{2}}:{port}/proxy/metrics"
    namespace, pod = "__meta_kubernetes_namespace", "__meta_kubernetes_pod_name"
    return {
        "job_name": name,
        "scheme": "https",
        # job and namespace are the DDPJob's own in a trainer's metrics
        "honor_labels": True,
        **login,
        "kubernetes_sd_configs": [
            {"role": "pod", "api_server": server, **login, "selectors": [{"role": "pod", "label": selector}]}
        ],
        "relabel_configs": [
            {"source_labels": ["__meta_kubernetes_pod_container_port_number"], "regex": str(port), "action": "keep"},
            {"source_labels": ["__meta_kubernetes_pod_phase"], "regex": "Running", "action": "keep"},
            {"target_label": "__address__", "replacement": host},
            {"source_labels": [namespace, pod], "regex": "(.+);(.+)", "target_label": "__metrics_path__",
             "replacement": proxied},
            {"source_labels": [pod], "target_label": "pod"},
        ],
    }  # fmt: skip


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


def _ready(url: str, process: subprocess.Popen[bytes]) -> bool:
    if process.poll() is not None:
        raise RuntimeError(f"Prometheus ended with exit code {process.returncode}")
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
