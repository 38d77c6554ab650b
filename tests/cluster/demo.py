"""`make demo-cluster`: a DDPJob on a real cluster, from nothing to Succeeded, with one pod killed halfway.

    python -m tests.cluster.demo

Starts the test cluster, loads the images, installs the chart with Helm, applies manifests/samples/ddpjob.yaml,
deletes a worker's pod by force when half the steps are done, waits for Succeeded, and asks a real Prometheus, which has
watched all along, three questions. Takes everything away at the end; a cluster that was running before stays.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from shutil import which
from typing import Any

import yaml
from tests.cluster.installation import (
    ROOT,
    cluster_started,
    load_images,
    operator_installed,
    wait_operator,
)
from tests.cluster.kube import Kubectl, KubectlFailed, Object, describe
from tests.cluster.prometheus import Prometheus, prometheus
from tests.kubernetes import Impossible, script
from tests.support.waiting import NeverHappened, eventually

SAMPLE = ROOT / "manifests" / "samples" / "ddpjob.yaml"
NAMESPACE = "ddpjob-demo"
JOB_SECONDS = 600
"""Half a minute of work on a machine that does nothing else."""

BEGAN = time.monotonic()


def main() -> int:
    """Run the demo.

    Returns:
        0 when the job succeeded after one restart and Prometheus saw it all, 1 when not, 3 where no cluster can be had.
    """
    for name in (signal.SIGINT, signal.SIGTERM):  # a background job of a shell starts with SIGINT ignored
        signal.signal(name, signal.default_int_handler)
    try:
        with ExitStack() as cleanup:
            return _demo(cleanup)
    except Impossible as missing:
        print(missing, file=sys.stderr)
        return 3
    except (NeverHappened, KubectlFailed, RuntimeError) as failed:
        print(f"demo-cluster: {failed}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo-cluster: stopped; all that it started has been taken away", file=sys.stderr)
        return 130


def _demo(cleanup: ExitStack) -> int:
    _print_step("the cluster")
    kubectl = cleanup.enter_context(cluster_started())
    _print_step("the images, on every node")
    images = load_images()
    script("cluster.sh", "need", "prometheus")
    _print_step("helm install ddpjob-operator charts/ddpjob-operator")
    cleanup.enter_context(operator_installed(kubectl, images))
    wait_operator(kubectl)
    folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="ddpjob-demo-")))
    watching = cleanup.enter_context(prometheus(Path(which("prometheus") or "prometheus"), kubectl, folder))
    demo = _fresh_namespace(kubectl)
    cleanup.callback(demo.run, "delete", "namespace", NAMESPACE, "--timeout=60s", check=False, seconds=90)

    name = yaml.safe_load(SAMPLE.read_text())["metadata"]["name"]
    _print_step(f"kubectl apply -f {SAMPLE.relative_to(ROOT)}")
    began = time.monotonic()
    demo.run("apply", "-f", str(SAMPLE))
    victim = _kill_halfway(demo, watching, name)
    job = _finish(demo, name, began + JOB_SECONDS)
    eventually(lambda: _restarts(watching), "Prometheus has seen the restart")
    _show(demo, watching, name)
    return _verdict(job, watching, victim, time.monotonic() - began)


def _kill_halfway(kubectl: Kubectl, watching: Prometheus, name: str) -> str:
    """Wait until half the steps are done and both pods have been scraped, then take the last pod away by force."""
    pods = eventually(lambda: _pods(kubectl, name), f"{name} has its pods", instead=lambda: describe(kubectl))
    eventually(
        lambda: _halfway(kubectl, pods[0]) and watching.scraped("trainer") >= set(pods),
        f"{name} has done half of its steps, and Prometheus has scraped both pods",
        JOB_SECONDS / 2,
        lambda: describe(kubectl),
    )
    _print_step(f"half of the steps are done: kubectl delete pod {pods[-1]} --force --grace-period=0")
    kubectl.run("delete", "pod", pods[-1], "--force", "--grace-period=0")
    return pods[-1]


def _pods(kubectl: Kubectl, name: str) -> list[str] | None:
    """The gang's pods in the order of their node rank, once every one of them runs."""
    pods = kubectl.list("pods", f"training.ddpjob.io/job={name}")
    ready = [pod for pod in pods if pod["status"].get("phase") == "Running"]
    if len(ready) != yaml.safe_load(SAMPLE.read_text())["spec"]["nodes"]:
        return None
    return sorted(pod["metadata"]["name"] for pod in ready)


def _halfway(kubectl: Kubectl, pod: str) -> bool:
    """Asks the trainer itself: the job's status is written more seldom than a short job needs."""
    path = f"/api/v1/namespaces/{kubectl.namespace}/pods/{pod}:9400/proxy/status"
    answer = kubectl.run("get", "--raw", path, check=False)
    if answer.returncode:
        return False
    report = json.loads(answer.stdout)
    return bool(report["totalSteps"]) and report["step"] >= report["totalSteps"] / 2


def _finish(kubectl: Kubectl, name: str, deadline: float) -> Object:
    """The job in its last phase."""

    def final() -> Object | None:
        job = kubectl.get("ddpjob", name)
        return job if job and job.get("status", {}).get("phase") in ("Succeeded", "Failed") else None

    return eventually(final, f"{name} ends", deadline - time.monotonic(), lambda: describe(kubectl))


def _show(kubectl: Kubectl, watching: Prometheus, name: str) -> None:
    for arguments in (
        ("get", "ddpjobs"),
        ("get", "events", "--field-selector", f"involvedObject.kind=DDPJob,involvedObject.name={name}",
         "--sort-by=.lastTimestamp"),
    ):  # fmt: skip
        _print_step(f"kubectl {' '.join(arguments)}")
        print(kubectl.run(*arguments).stdout, flush=True)
    for question, promql in _questions(name):
        _print_step(f"Prometheus: {question}\n   {promql}")
        for sample in watching.query(promql):
            print(f"   {sample}")


def _questions(name: str) -> list[tuple[str, str]]:
    window = f"[{JOB_SECONDS}s]"
    job = f'ddpjob="{name}", namespace="{NAMESPACE}"'
    with_attempt = f"ddpjob_train_step{{{job}}} * on (namespace, pod) group_left (attempt) ddpjob_trainer_info{{{job}}}"
    return [
        (
            "how far did each attempt get?",
            f"max by (attempt) (max_over_time(({with_attempt})[{JOB_SECONDS}s:2s]))",
        ),
        (
            "which accuracy was reached on images never trained on?",
            f'max by (ddpjob) (max_over_time(ddpjob_train_metric{{{job}, metric="eval_accuracy"}}{window}))',
        ),
        ("which restarts did the operator count?", "sum by (reason) (ddpjob_operator_restarts_total)"),
    ]


def _restarts(watching: Prometheus) -> float:
    return sum(sample.value for sample in watching.query("ddpjob_operator_restarts_total"))


def _verdict(job: Object, watching: Prometheus, victim: str, seconds: float) -> int:
    """What was to be shown, and whether it was."""
    status: dict[str, Any] = job["status"]
    name = job["metadata"]["name"]
    attempts = {sample.labels["attempt"] for sample in watching.query(_questions(name)[0][1])}
    wrong = []
    if status["phase"] != "Succeeded":
        wrong.append(f"the job ended {status['phase']}: {status.get('lastFailure')}")
    if status.get("restarts") != 1:
        wrong.append(f"one pod was deleted, but the job counts {status.get('restarts')} restarts")
    if attempts != {"0", "1"}:
        wrong.append(f"Prometheus scraped trainers of the attempts {sorted(attempts)}, not of both")
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    _print_step(f"{name}: Succeeded after {seconds:.0f} s, with one restart for {victim}")
    return 0


def _fresh_namespace(kubectl: Kubectl) -> Kubectl:
    kubectl.run("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=60s", seconds=90)
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}})
    demo = kubectl.within(NAMESPACE)
    eventually(lambda: demo.get("serviceaccount", "default"), f"{NAMESPACE} has its service account")
    return demo


def _print_step(text: str) -> None:
    print(f"\n== {time.monotonic() - BEGAN:4.0f} s  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
