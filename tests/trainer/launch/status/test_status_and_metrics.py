"""/status, /metrics and /healthz of the launcher."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from tests.support.tiers import program
from tests.support.waiting import eventually

from ddp_trainer.contract.environment import PodEnvironment
from ddp_trainer.contract.heartbeat import Heartbeat, heartbeat_dir, read_heartbeats
from ddp_trainer.launch.assignment import Assignment
from ddp_trainer.launch.status import host
from ddp_trainer.launch.status.counters import CounterLedger
from ddp_trainer.launch.status.host import Throttling, Usage
from ddp_trainer.launch.status.metric_table import CONTAINER, GPU, POD, RUN, TABLE
from ddp_trainer.launch.status.metrics import MOST_METRICS, metrics_page
from ddp_trainer.launch.status.pod_state import PodState, status
from ddp_trainer.launch.status.server import MOST_CONNECTIONS, StatusServer
from ddp_trainer.live.costs import Costs

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
CONTRACT = (Path(__file__).parents[4] / "docs" / "contracts.md").read_text()
SECTION = CONTRACT.split("## 4.")[1].split("## 5.")[0]
EXAMPLE = json.loads(re.search(r"```json\n(.*?)```", SECTION, re.DOTALL)[1])


def trained(directory: Path, rank: int = 0, resumed: int = 0, steps: int = 120) -> Heartbeat:
    """A rank that has trained: its heartbeat is the real writer's."""
    heartbeat = Heartbeat(heartbeat_dir(directory), rank=rank)
    heartbeat.resumed(resumed, samples=resumed * 64)
    heartbeat.enter("train")
    for step in range(resumed + 1, resumed + steps + 1):
        heartbeat.waited_for_data(0.004)
        heartbeat.passes_took(0.05)
        heartbeat.step(
            step=step, epoch=3, total_steps=400, samples=step * 64, loss=0.31, samples_per_second=900.5,
            learning_rate=0.1, step_seconds=0.07,
        )  # fmt: skip
    heartbeat.snapshot(100, 1763703999.0, True, size=4096, stall_seconds=0.01, save_seconds=0.2, result="saved")
    heartbeat.metrics(eval_accuracy=0.96, eval_loss=0.2)
    recovered = Costs().after("lost", 0.2, has_dropped=True).after("joined", 0.13, has_dropped=False)
    heartbeat.recovers_live(2, recovered.to_json())
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
        throttling=Throttling(60.0, 600, 380, 45.2),
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
    heartbeat.non_finite_loss(110)
    answer = status(pod, 1.0, pod_state(tmp_path))
    assert shape(answer) == shape(EXAMPLE)
    assert (answer["worldSize"], answer["step"], answer["samples"], answer["loss"]) == (2, 120, 7680, 0.31)
    assert answer["etaSeconds"] == pytest.approx(280 * 0.07)
    assert answer["live"] == EXAMPLE["live"]


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


def shown(pod: PodEnvironment, state: PodState, ledger: CounterLedger | None = None) -> dict[str, float]:
    """The samples of one scrape, where nothing is known of the container."""
    page = metrics_page(lambda: (pod, state), ledger or CounterLedger(), Usage, tuple)
    return samples(page("")[0].decode())


def family(name: str) -> str:
    """The name that OpenMetrics has for the family of a series."""
    return re.sub("_(total|info)$", "", name)


def test_the_page_is_strict_openmetrics_with_every_row_of_the_table_and_no_other(pod, tmp_path):
    trained(tmp_path)
    used, gpu = Usage(2.5, 200, 512), host.GPU(0, 0.4, 3, 8)
    page = metrics_page(lambda: (pod, pod_state(tmp_path)), CounterLedger(), lambda: used, lambda: [gpu])
    body, content_type = page(OPEN_METRICS)
    families = {found.name: found for found in text_string_to_metric_families(body.decode())}
    assert content_type.startswith("application/openmetrics-text")
    assert set(families) == {family(name) for name in TABLE}
    for name, row in TABLE.items():
        found = families[family(name)]
        assert (found.type, found.documentation) == (row.type, row.help)
        assert {frozenset(sample.labels) - {"le"} for sample in found.samples} == {frozenset(row.labels)}, name


def test_no_metric_has_a_label_that_prometheus_sets_itself_and_only_the_info_has_the_attempt():
    assert [row.name for row in TABLE.values() if {"job", "namespace", "instance", "pod"} & set(row.labels)] == []
    assert [row.name for row in TABLE.values() if "attempt" in row.labels] == ["ddpjob_trainer_info"]


def test_names_follow_the_conventions():
    assert [row.name for row in TABLE.values() if row.name.endswith("_total") != (row.type == "counter")] == []
    assert [row.name for row in TABLE.values() if row.unit not in row.name or not row.help.endswith(".")] == []
    assert len(TABLE) == len(POD) + len(CONTAINER) + len(GPU) + len(RUN), "every name is unique"


def test_the_first_failed_save_and_the_first_skipped_step_follow_a_zero(pod, tmp_path):
    heartbeat = trained(tmp_path)
    failed, skipped = (
        'ddpjob_snapshot_saves_total{ddpjob="digits",result="failed"}',
        'ddpjob_train_skipped_steps_total{ddpjob="digits",reason="rollback"}',
    )
    before = shown(pod, pod_state(tmp_path))
    heartbeat.skipped_steps("rollback")
    heartbeat.snapshot(result="failed")
    after = shown(pod, pod_state(tmp_path))
    assert [(page[failed], page[skipped]) for page in (before, after)] == [(0, 0), (1, 1)]


def test_each_live_recovery_is_in_the_histogram_of_its_kind_and_dropped_steps_are_counted(pod, tmp_path):
    trained(tmp_path)
    values = shown(pod, pod_state(tmp_path))
    of = 'ddpjob_train_live_recovery_seconds_{}{{ddpjob="digits",kind="{}"{}}}'.format
    assert [values[of("count", kind, "")] for kind in ("lost", "left", "joined")] == [1, 0, 1]
    assert values[of("sum", "lost", "")] == 0.2
    bounds = ("0.1", "0.25", "30.0", "+Inf")
    assert [values[of("bucket", "lost", f',le="{bound}"')] for bound in bounds] == [0, 1, 1, 1]
    assert values['ddpjob_train_steps_dropped_total{ddpjob="digits"}'] == 1


def test_while_ranks_are_lost_the_world_size_is_that_of_the_others(pod, tmp_path):
    size = 'ddpjob_train_world_size{ddpjob="digits"}'
    heartbeat = trained(tmp_path)
    heartbeat.recovers_live(1, Costs().to_json())
    assert shown(pod, pod_state(tmp_path))[size] == 1
    assert size not in shown(pod, dataclasses.replace(pod_state(tmp_path), ranks=[])), "none trains"


def test_a_job_with_another_scope_has_its_world_size_and_no_series_of_live_recovery(pod, tmp_path):
    heartbeat = Heartbeat(heartbeat_dir(tmp_path))
    heartbeat.step(step=1)
    values = shown(pod, pod_state(tmp_path))
    assert values['ddpjob_train_world_size{ddpjob="digits"}'] == 2
    assert [name for name in values if "live" in name or "dropped" in name] == []
    assert status(pod, 1.0, pod_state(tmp_path))["live"] is None


def test_a_process_that_joins_in_another_pod_goes_on_with_the_count(pod, tmp_path):
    """The pod with node rank 0 was lost: the new one has the costs from its peers, and counts nothing twice."""
    ledger = CounterLedger()
    starting = Heartbeat(heartbeat_dir(tmp_path))
    starting.enter("rendezvous")
    lost = 'ddpjob_train_live_recovery_seconds_count{ddpjob="digits",kind="lost"}'
    assert lost not in shown(pod, pod_state(tmp_path), ledger), "as a 0 it would be a reset"
    costs = Costs().after("lost", 0.2, has_dropped=True)
    for _ in range(2):
        starting.recovers_live(2, costs.to_json())
        assert shown(pod, pod_state(tmp_path), ledger)[lost] == 1


def test_what_no_rank_measures_has_no_series(pod, tmp_path):
    heartbeat = Heartbeat(heartbeat_dir(tmp_path))
    heartbeat.enter("train")
    heartbeat.step(step=1)
    assert [name for name in shown(pod, pod_state(tmp_path)) if "data_wait" in name or "passes" in name] == []


def test_the_rank_that_waits_longest_for_its_samples_is_told_from_the_others_of_its_gang(pod, tmp_path):
    pages: dict[str, float] = {}
    for rank, wait in ((0, 0.001), (1, 0.05)):
        folder = tmp_path / str(rank)
        heartbeat = Heartbeat(heartbeat_dir(folder), rank=rank)
        for step in range(1, 4):
            heartbeat.waited_for_data(wait)
            heartbeat.step(step=step)
        heartbeat.flush()
        pages |= shown(dataclasses.replace(pod, node_rank=rank), pod_state(folder))
    waits = [pages[f'ddpjob_rank_data_wait_seconds{{ddpjob="digits",rank="{rank}"}}'] for rank in (0, 1)]
    assert max(waits) - min(waits) == pytest.approx(0.049)


def test_what_a_program_reports_beyond_the_limit_has_no_series(pod, tmp_path):
    trained(tmp_path).metrics(**{f"mine_{number}": 1.0 for number in range(200)})
    names = [name for name in shown(pod, pod_state(tmp_path)) if name.startswith("ddpjob_train_metric{")]
    assert len(names) == MOST_METRICS


def test_a_reported_value_that_is_not_finite_has_no_series_and_the_page_is_served(pod, tmp_path):
    trained(tmp_path).metrics(mine=1.0, diverged=float("nan"))
    names = [name for name in shown(pod, pod_state(tmp_path)) if name.startswith("ddpjob_train_metric{")]
    assert [name for name in names if "diverged" in name] == []
    assert [name for name in names if "mine" in name] == ['ddpjob_train_metric{ddpjob="digits",metric="mine"}']


def test_only_node_rank_0_counts_the_run_so_that_a_sum_over_pods_is_right(pod, tmp_path):
    """Both pods of a gang, whose ranks all report the steps of the run."""
    pages = []
    for node_rank in (0, 1):
        trained(tmp_path / str(node_rank), rank=node_rank)
        of_rank = dataclasses.replace(pod, node_rank=node_rank, run_dir=tmp_path / str(node_rank))
        pages.append(shown(of_rank, pod_state(tmp_path / str(node_rank))))
    assert sum(page.get('ddpjob_train_steps_total{ddpjob="digits"}', 0.0) for page in pages) == 120
    assert [name for name in pages[1] if "_train_" in name or "_snapshot_" in name] == []
    assert [f'ddpjob_rank_heartbeat_age_seconds{{ddpjob="digits",rank="{rank}"}}' in pages[rank] for rank in (0, 1)]


def test_counters_go_on_when_another_process_takes_the_ranks_place(pod, tmp_path, monkeypatch):
    ledger, totals = CounterLedger(), []
    for pid, resumed, steps in ((11, 0, 120), (12, 100, 30)):
        monkeypatch.setattr("ddp_trainer.contract.heartbeat._pid", pid)
        trained(tmp_path, resumed=resumed, steps=steps)
        values = shown(pod, pod_state(tmp_path), ledger)
        totals.append(
            [value for name, value in values.items() if re.match(r"ddpjob\w*(_total|_count|_bucket|_sum)", name)]
        )
    assert all(before <= after for before, after in zip(*totals, strict=True))
    assert values['ddpjob_train_steps_total{ddpjob="digits"}'] == 150


def test_a_look_that_does_not_find_the_heartbeat_of_rank_0_counts_nothing_twice(tmp_path):
    ledger = CounterLedger()
    for rank in (0, 1):
        trained(tmp_path, rank=rank, steps=120)
    both = [beat | {"pid": 11 + beat["rank"]} for beat in read_heartbeats(tmp_path)]
    assert [ledger.totals(0, found)["steps"] for found in (both, both[1:], both)] == [120, 120, 120]


def test_counters_go_on_in_the_next_attempt_of_the_same_pod(pod, tmp_path):
    ledger = CounterLedger()
    trained(tmp_path, steps=120)
    shown(pod, pod_state(tmp_path), ledger)
    trained(tmp_path, steps=125)
    ledger.totals(pod.attempt, pod_state(tmp_path).heartbeats)  # the last heartbeats, which no scrape has seen
    later = pod.placed(Assignment(attempt=1, node_rank=0, nodes=3))
    trained(tmp_path, resumed=100, steps=30)  # by a process that got the same pid
    assert shown(later, pod_state(tmp_path), ledger)['ddpjob_train_steps_total{ddpjob="digits"}'] == 155


def test_a_pod_that_becomes_node_rank_0_counts_from_then_on(pod, tmp_path):
    """The pod that had node rank 0 before has counted the steps until then."""
    ledger, second = CounterLedger(), dataclasses.replace(pod, node_rank=1)
    trained(tmp_path, rank=1, steps=120)
    shown(second, pod_state(tmp_path), ledger)
    shutil.rmtree(heartbeat_dir(tmp_path))
    first = second.placed(Assignment(attempt=1, node_rank=0, nodes=2))
    trained(tmp_path, resumed=100, steps=30)
    assert shown(first, pod_state(tmp_path), ledger)['ddpjob_train_steps_total{ddpjob="digits"}'] == 30


def test_a_pod_that_waits_shows_what_ended_and_no_rank(pod, tmp_path):
    trained(tmp_path)
    waiting = dataclasses.replace(pod_state(tmp_path), ranks=[], idle="waiting", ended={"reason": "PeerLost"})
    answer = status(pod, 1.0, waiting)
    assert (answer["phase"], answer["phaseSeconds"], answer["ranks"]) == ("waiting", 4.0, [])
    assert (answer["step"], answer["ended"]) == (120, {"reason": "PeerLost"})
    values = shown(pod, waiting)
    assert not any(name.startswith("ddpjob_rank_heartbeat_age_seconds") for name in values)
    assert values['ddpjob_train_step{ddpjob="digits"}'] == 120


def test_a_spare_has_no_node_rank(pod, tmp_path):
    spare = dataclasses.replace(pod, node_rank=None)
    nothing = dataclasses.replace(pod_state(tmp_path), idle="spare")
    answer = status(spare, 1.0, nothing)
    assert (answer["phase"], answer["nodeRank"], answer["step"]) == ("spare", None, None)
    assert list(shown(spare, nothing)) == [
        'ddpjob_trainer_info{attempt="0",ddpjob="digits",node_rank="none",world_size="2"}'
    ]


@pytest.mark.processes
def test_promtool_finds_nothing_to_complain_about(pod, tmp_path):
    promtool = program("prometheus", "promtool")
    trained(tmp_path)
    trained(tmp_path, rank=1)
    page, _ = metrics_page(lambda: (pod, pod_state(tmp_path)), CounterLedger())("")
    check = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, check=False)
    assert (check.returncode, check.stdout, check.stderr) == (0, b"", b"")


@pytest.fixture
def server():
    served = StatusServer(0, lambda: {"version": 1}, lambda accept: (b"ddpjob_x 1\n", "text/plain"))
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{served.server_address[1]}"
    served.shutdown()
    served.server_close()


@pytest.mark.parametrize(
    ("path", "body"), [("/healthz", b"ok\n"), ("/status", b'{"version": 1}'), ("/metrics?x=1", b"ddpjob_x 1\n")]
)
def test_each_page_answers(server, path, body):
    with urllib.request.urlopen(server + path, timeout=60) as response:
        assert response.read() == body


def test_connections_for_which_no_thread_could_be_started_leave_their_places_to_others(server, monkeypatch):
    def refused(*_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        for _ in range(MOST_CONNECTIONS):
            with pytest.raises(OSError):
                urllib.request.urlopen(server + "/healthz", timeout=60)
    with urllib.request.urlopen(server + "/healthz", timeout=60) as response:
        assert response.read() == b"ok\n"


def test_connections_beyond_the_most_are_closed_and_the_next_are_served_again(server):
    address = urlsplit(server)
    open_ones = [socket.create_connection((address.hostname, address.port)) for _ in range(MOST_CONNECTIONS)]
    with socket.create_connection((address.hostname, address.port), timeout=60) as one_more:
        answer = b""
        with contextlib.suppress(ConnectionError):
            one_more.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            answer = one_more.recv(1)
        assert answer == b"", "closed without an answer"
    for connection in open_ones:
        connection.close()

    def served():
        try:
            with urllib.request.urlopen(server + "/healthz", timeout=60) as response:
                return response.read() == b"ok\n"
        except OSError:
            return False

    eventually(served, "connections that have ended leave their places to others")


@pytest.mark.parametrize(
    ("path", "method", "code"), [("/", "GET", 404), ("/status/", "GET", 404), ("/status", "POST", 501)]
)
def test_anything_else_is_refused(server, path, method, code):
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(server + path, method=method), timeout=60)
    assert refused.value.code == code


def test_the_launcher_serves_what_its_ranks_report_while_they_train(start_pod):
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
