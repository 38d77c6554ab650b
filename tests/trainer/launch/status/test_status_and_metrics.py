"""/status, /metrics and /healthz of the launcher."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from ddp_trainer.contract.environment import PodEnvironment
from ddp_trainer.contract.heartbeat import Heartbeat, heartbeat_dir, read_heartbeats
from ddp_trainer.launch.assignment import Assignment
from ddp_trainer.launch.status.counters import CounterLedger
from ddp_trainer.launch.status.metrics import metrics_page
from ddp_trainer.launch.status.pod_state import PodState, status
from ddp_trainer.launch.status.server import StatusServer

CONTRACT = (Path(__file__).parents[4] / "docs" / "contracts.md").read_text()
SECTION = CONTRACT.split("## 4.")[1].split("## 5.")[0]
EXAMPLE = json.loads(re.search(r"```json\n(.*?)```", SECTION, re.DOTALL)[1])


@pytest.fixture
def pod(tmp_path):
    return PodEnvironment(
        job="digits",
        namespace="default",
        uid="0b0c",
        attempt=0,
        node_rank=0,
        nodes=2,
        procs_per_node=1,
        pod_ip="127.0.0.1",
        rdzv_host="127.0.0.1",
        rdzv_port=29500,
        status_port=0,
        shared=tmp_path,
        run_dir=tmp_path,
        termination_log=tmp_path / "log",
    )


def trained(directory: Path, rank: int = 0, resumed: int = 0, steps: int = 120) -> Heartbeat:
    """A rank that has trained: its heartbeat is the real writer's."""
    heartbeat = Heartbeat(heartbeat_dir(directory), rank=rank)
    heartbeat.resumed(resumed, samples=resumed * 64)
    heartbeat.enter("train")
    for step in range(resumed + 1, resumed + steps + 1):
        heartbeat.step(
            step=step, epoch=3, total_steps=400, samples=step * 64, loss=0.31, samples_per_second=900.5,
            learning_rate=0.1, step_seconds=0.07,
        )  # fmt: skip
    heartbeat.snapshot(100, 1763703999.0, True, stall_seconds=0.01, save_seconds=0.2, result="ok")
    heartbeat.metrics(eval_accuracy=0.96, eval_loss=0.2)
    return heartbeat


def pod_state(directory: Path, now: float | None = None) -> PodState:
    heartbeats = read_heartbeats(directory)
    ranks = [
        {"rank": heartbeat["rank"], "localRank": heartbeat["localRank"], "pid": heartbeat["pid"], "time": 0.0}
        for heartbeat in heartbeats
    ]
    return PodState(
        now=now or max((heartbeat["time"] for heartbeat in heartbeats), default=0.0) + 0.05,
        wall=5.0,
        ranks=ranks,
        heartbeats=heartbeats,
    )


def shape(value):
    """The keys and kinds of a JSON value; numbers are one kind."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def test_status_has_the_shape_of_the_contract(pod, tmp_path):
    heartbeat = trained(tmp_path)
    interval, problem = EXAMPLE["snapshotInterval"], EXAMPLE["snapshotProblem"]
    heartbeat.snapshot(result="skipped", interval=interval, problem=problem, set_aside=EXAMPLE["snapshotsSetAside"][0])
    answer = status(pod, 1.0, pod_state(tmp_path))
    assert shape(answer) == shape(EXAMPLE)
    assert (answer["worldSize"], answer["step"], answer["samples"], answer["loss"]) == (2, 120, 7680, 0.31)
    assert answer["etaSeconds"] == pytest.approx(280 * 0.07)


def test_before_the_first_heartbeat_everything_unknown_is_null(pod, tmp_path):
    answer = status(pod, 1.0, pod_state(tmp_path))
    assert set(answer) == set(EXAMPLE)
    assert (answer["phase"], answer["ranks"], answer["metrics"]) == ("rendezvous", [], {})
    assert [answer[name] for name in ("epoch", "step", "loss", "etaSeconds", "snapshot", "resumedFromStep")] == [
        None
    ] * 6


def samples(page: str) -> dict[str, float]:
    """Sample name with labels → value, of a Prometheus page."""
    lines = [line for line in page.splitlines() if line and not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_every_metric_of_the_contract_is_there_and_no_other(pod, tmp_path):
    trained(tmp_path)
    page = metrics_page(lambda: (pod, pod_state(tmp_path)), CounterLedger())().decode()
    documented = set(re.findall(r"`(ddpjob_\w+)", SECTION))
    families = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
    assert families == documented
    labels = 'attempt="0",job="digits",namespace="default",node_rank="0"'
    values = {re.sub(r"\{.*\}", "", name): value for name, value in samples(page).items()}
    assert all(set(re.findall(r'\w+="[^"]*"', name)) >= set(labels.split(",")) for name in samples(page))
    assert values["ddpjob_train_steps_total"] == 120
    assert values["ddpjob_train_step_seconds_count"] == 120
    assert values["ddpjob_snapshot_saves_total"] == 1


def test_counters_go_on_when_another_process_takes_the_ranks_place(pod, tmp_path, monkeypatch):
    page = metrics_page(lambda: (pod, pod_state(tmp_path)), CounterLedger())
    totals = []
    for pid, resumed, steps in ((11, 0, 120), (12, 100, 30)):
        monkeypatch.setattr("os.getpid", lambda pid=pid: pid)
        trained(tmp_path, resumed=resumed, steps=steps)
        values = samples(page().decode())
        totals.append(
            [value for name, value in values.items() if re.match(r"ddpjob\w*(_total|_count|_bucket|_sum)", name)]
        )
    assert all(before <= after for before, after in zip(*totals, strict=True))
    assert (
        'ddpjob_train_steps_total{attempt="0",job="digits",namespace="default",node_rank="0"} 150.0' in page().decode()
    )


def test_counters_go_on_in_the_next_attempt_of_the_same_pod_under_its_labels(pod, tmp_path):
    ledger = CounterLedger()
    trained(tmp_path, steps=120)
    metrics_page(lambda: (pod, pod_state(tmp_path)), ledger)()
    trained(tmp_path, steps=125)
    ledger.totals(pod.attempt, pod_state(tmp_path).heartbeats)  # the life's last words, which nobody scraped
    later = pod.placed(Assignment(attempt=1, node_rank=1, nodes=3))
    trained(tmp_path, resumed=100, steps=30)  # by a process that got the same pid
    page = metrics_page(lambda: (later, pod_state(tmp_path)), ledger)().decode()
    assert samples(page)['ddpjob_train_steps_total{attempt="1",job="digits",namespace="default",node_rank="1"}'] == 155


def test_a_pod_that_waits_shows_what_ended_and_no_rank(pod, tmp_path):
    trained(tmp_path)
    waiting = dataclasses.replace(pod_state(tmp_path), ranks=[], idle="waiting", ended={"reason": "PeerLost"})
    answer = status(pod, 1.0, waiting)
    assert (answer["phase"], answer["phaseSeconds"], answer["ranks"]) == ("waiting", 4.0, [])
    assert (answer["step"], answer["ended"]) == (120, {"reason": "PeerLost"})
    page = metrics_page(lambda: (pod, waiting), CounterLedger())().decode()
    assert "ddpjob_rank_heartbeat_age_seconds{" not in page
    assert samples(page)['ddpjob_train_step{attempt="0",job="digits",namespace="default",node_rank="0"}'] == 120


def test_a_spare_has_no_node_rank(pod, tmp_path):
    spare = dataclasses.replace(pod, node_rank=None)
    nothing = dataclasses.replace(pod_state(tmp_path), idle="spare")
    answer = status(spare, 1.0, nothing)
    assert (answer["phase"], answer["nodeRank"], answer["step"]) == ("spare", None, None)
    assert 'node_rank="none"' in metrics_page(lambda: (spare, nothing), CounterLedger())().decode()


def test_promtool_finds_nothing_to_complain_about(pod, tmp_path):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    trained(tmp_path)
    trained(tmp_path, rank=1)
    page = metrics_page(lambda: (pod, pod_state(tmp_path)), CounterLedger())()
    check = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, check=False)
    assert (check.returncode, check.stdout, check.stderr) == (0, b"", b"")


@pytest.fixture
def server():
    served = StatusServer(0, lambda: {"version": 1}, lambda: b"ddpjob_x 1\n")
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{served.server_address[1]}"
    served.shutdown()
    served.server_close()


@pytest.mark.parametrize(
    ("path", "body"), [("/healthz", b"ok\n"), ("/status", b'{"version": 1}'), ("/metrics?x=1", b"ddpjob_x 1\n")]
)
def test_each_page_answers(server, path, body):
    with urllib.request.urlopen(server + path, timeout=5) as response:
        assert response.read() == body


@pytest.mark.parametrize(
    ("path", "method", "code"), [("/", "GET", 404), ("/status/", "GET", 404), ("/status", "POST", 501)]
)
def test_anything_else_is_refused(server, path, method, code):
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(server + path, method=method), timeout=5)
    assert refused.value.code == code


@pytest.mark.trainer
def test_the_launcher_serves_what_its_ranks_report_while_they_train(start_pod, eventually):
    pod = start_pod(
        """
        import time
        from ddp_trainer.contract.heartbeat import Heartbeat
        heartbeat = Heartbeat.from_env()
        heartbeat.enter("train")
        heartbeat.step(step=7, total_steps=10)
        time.sleep(600)
        """
    )
    assert pod.get("/healthz") == b"ok\n"
    assert set(pod.status()) == set(EXAMPLE)
    eventually(lambda: pod.status()["step"] == 7, "step 7 on /status")
    seen = pod.status()["ranks"][0]
    assert (seen["rank"], seen["phase"], seen["pid"]) == (0, "train", pod.pids()[0])
    assert b"ddpjob_train_step{" in pod.get("/metrics")
