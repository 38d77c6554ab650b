"""docs/contracts.md is what operator and trainer agree on: both sides read and write its own examples here."""

import json
import re
from dataclasses import MISSING, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_trainer.contract import exit_codes as trainer_exits
from ddp_trainer.contract import pod_logs
from ddp_trainer.contract.environment import (
    JobEnvironment,
    LivePlace,
    PodEnvironment,
    SubmittedCode,
    Target,
    parse_pod,
    parse_rank,
    parse_target,
)
from ddp_trainer.contract.environment import parse_job as parse_job_variables
from ddp_trainer.launch.assignment import Assignment, read_assignment
from ddp_trainer.launch.exit.termination_message import ExitCause, ExitEvidence, encode, message_of
from ddp_trainer.launch.status.pod_state import PodState, status
from ddp_trainer.launch.supervisor import AGENT_SECONDS
from ddp_trainer.logs.losses import LossLog
from ddp_trainer.logs.pods import main as print_logs
from ddp_trainer.snapshots.trust.fence import Attempt, Fence
from ddp_trainer.snapshots.trust.manifest import FileEntry, Manifest
from ddp_trainer.snapshots.values import Identity
from ddpjob_operator.api.status import DDPJobStatus
from ddpjob_operator.api.template_rules import RESERVED_ENV, RESERVED_ENV_PREFIXES, is_reserved
from ddpjob_operator.core.failure import detect as operator_exits
from ddpjob_operator.core.ledger.progress import with_report
from ddpjob_operator.core.manifests.admitted import Admitted
from ddpjob_operator.core.manifests.pod_environment import Place, environment, launch_args
from ddpjob_operator.core.manifests.pods import build_pod
from ddpjob_operator.core.values.job import Defaults
from ddpjob_operator.core.values.look import Look
from ddpjob_operator.core.values.observed import Observed, PodPhase, PodView, ServiceView, Termination
from ddpjob_operator.core.values.trainer_report import TrainerReport, read_status, read_termination
from ddpjob_operator.follow.lines import Wanted
from ddpjob_operator.local.assignment import write_assignment
from ddpjob_operator.local.processes import log_header
from ddpjob_operator.local.volume import log_tail
from ddpjob_operator.page.files import course_of
from ddpjob_operator.page.folder import FolderLogs
from ddpjob_operator.page.shared import Shared
from ddpjob_operator.page.values import LossPoint
from ddpjob_operator.wire.jobs import parse_job

DOCUMENT = (Path(__file__).parents[3] / "docs/contracts.md").read_text()
EXAMPLES = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", DOCUMENT, re.DOTALL)]
STATUS = next(example for example in EXAMPLES if "ranks" in example)
TERMINATION = next(example for example in EXAMPLES if "outcome" in example)
MANIFEST = next(example for example in EXAMPLES if "files" in example)
NOW = datetime(2026, 1, 1, tzinfo=UTC)
REPORT = read_status(json.dumps(STATUS)) or TrainerReport()


def job(**spec: Any) -> Any:
    return parse_job(
        {
            "metadata": {
                "name": "digits",
                "namespace": "default",
                "uid": "0b0c",
                "creationTimestamp": "2025-11-21T05:46:40Z",
            },
            "spec": {"nodes": 2, "args": ["--task", "digits", "--note", "$(POD_IP);rm -rf"], **spec},
        }
    )


def pod_environment(node_rank: int = 1, **spec: Any) -> dict[str, str]:
    """What a kubelet makes of the operator's environment."""
    downward = {"metadata.name": "digits-0-1", "spec.nodeName": "node-1", "status.podIP": "10.0.0.7"}
    listed = environment(job(**spec), Place(3, node_rank, ServiceView(host="10.96.0.7", attempt=3)))
    return {
        entry["name"]: entry["value"] if "value" in entry else downward[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        for entry in listed
    }


def test_the_trainer_understands_the_environment_that_the_operator_sets() -> None:
    pod = parse_pod(pod_environment())
    assert (pod.job, pod.uid, pod.attempt, pod.node_rank, pod.nodes) == ("digits", "0b0c", 3, 1, 2)
    assert (pod.rdzv_host, pod.rdzv_port, pod.status_port, pod.pod_ip) == ("10.96.0.7", 29500, 9400, "10.0.0.7")


WHOLE: dict[str, Any] = {
    "procsPerNode": 4,
    "code": {"configMaps": ["ddpjob-code-1"], "sha256": "5" * 64, "requirements": "requirements.txt"},
    "elastic": {"minNodes": 2},
    "snapshots": {"every": "7steps", "keep": 5, "keepEvery": 20, "resume": "Own"},
    "restart": {"scope": "Live", "backoff": {"maxSeconds": 480}},
    "stall": {"minSeconds": 31, "maxSeconds": 1801},
    "observeScript": False,
    "shutdownSeconds": 46,
    "nonFiniteLossPolicy": "Rollback",
}
"""Each field that becomes a variable, with a value other than its default."""


def without_a_value_of_their_own(parsed: PodEnvironment | JobEnvironment) -> list[str]:
    """Fields that are what they are where the operator sets nothing."""
    given = [(field.name, field.default) for field in fields(parsed) if field.default is not MISSING]
    return [name for name, default in given if getattr(parsed, name) == default]


def test_the_trainer_reads_every_field_of_a_spec_that_is_not_the_default() -> None:
    variables = pod_environment(**WHOLE)
    pod, of_rank = parse_pod(variables), parse_job_variables(variables, default_name="")
    assert pod == PodEnvironment(
        job="digits",
        namespace="default",
        uid="0b0c",
        attempt=3,
        node_rank=1,
        nodes=2,
        procs_per_node=4,
        pod_ip="10.0.0.7",
        rdzv_host="10.96.0.7",
        rdzv_port=29500,
        status_port=9400,
        shared=Path("/mnt/shared"),
        run_dir=Path("/dev/shm/ddpjob"),
        termination_log=Path("/dev/termination-log"),
        shutdown_seconds=46,
        stall_min_seconds=31,
        stall_max_seconds=1801,
        assignment_dir=Path("/etc/ddpjob/assignment"),
        reassign_seconds=600,
        code=SubmittedCode(Path("/etc/ddpjob/code"), "5" * 64, "requirements.txt"),
        live=True,
        name="digits-0-1",
        keeps_output=True,
    )
    assert of_rank == JobEnvironment(
        name="digits",
        uid="0b0c",
        created=int(datetime(2025, 11, 21, 5, 46, 40, tzinfo=UTC).timestamp()),
        attempt=3,
        nodes=2,
        shared=Path("/mnt/shared"),
        snapshot_every="7steps",
        snapshot_keep=5,
        snapshot_keep_every=20,
        snapshot_resume="Own",
        non_finite_loss="Rollback",
        elastic_min_nodes=2,
        code_sha256="5" * 64,
        live=LivePlace(node_rank=1, local_rank=0, ranks=8, procs_per_node=4, host="10.0.0.7"),
    )
    assert without_a_value_of_their_own(pod) == ["site_packages"], "which no variable has"
    assert without_a_value_of_their_own(of_rank) == []
    world: Any = SimpleNamespace(rank=0, size=8)
    assert Identity.of_job(of_rank, world).begins_anew
    assert not parse_rank(variables).observe_script
    default = pod_environment()
    assert parse_rank(default).observe_script
    assert not Identity.of_job(parse_job_variables(default, default_name=""), world).begins_anew


def test_every_variable_that_the_operator_sets_is_in_the_document() -> None:
    assert [name for name in pod_environment(**WHOLE) if name not in DOCUMENT] == []


@pytest.mark.parametrize(("most", "seconds"), [(60, 300), (180, 300), (300, 420), (3600, 900)])
def test_a_pod_that_is_kept_outlasts_the_longest_backoff(most: int, seconds: int) -> None:
    """Else the pods of an attempt that begins after it are all new, whatever the scope."""
    variables = pod_environment(restart={"scope": "InPlace", "backoff": {"maxSeconds": most}})
    assert parse_pod(variables).reassign_seconds == seconds


def test_a_job_cannot_override_a_variable_of_the_contract() -> None:
    ours = [name for name in pod_environment(**WHOLE) if name.startswith("DDPJOB_") or name == "POD_IP"]
    assert len(ours) > 30
    assert all(is_reserved(name) for name in ours)
    reserved = [*RESERVED_ENV, *(f"{prefix}*" for prefix in RESERVED_ENV_PREFIXES)]
    assert [name for name in reserved if f"`{name}`" not in DOCUMENT] == []


@pytest.mark.parametrize(
    ("entrypoint", "target"),
    [
        ({}, ("module", "ddp_trainer.train")),
        ({"module": "mine.train"}, ("module", "mine.train")),
        ({"script": "/mnt/shared/train.py"}, ("script", "/mnt/shared/train.py")),
    ],
)
def test_the_launcher_understands_the_arguments_that_the_operator_gives(
    entrypoint: dict[str, str], target: tuple[str, str]
) -> None:
    args = [argument.replace("$$(", "$(") for argument in launch_args(job(entrypoint=entrypoint))]  # the kubelet's part
    assert parse_target(args) == Target(*target, args=("--task", "digits", "--note", "$(POD_IP);rm -rf"))


def test_both_sides_mean_the_same_by_an_exit_code() -> None:
    assert trainer_exits.EXIT_USER == operator_exits.EXIT_USER
    assert trainer_exits.EXIT_FENCED == operator_exits.EXIT_FENCED
    assert trainer_exits.EXIT_PREEMPTED == operator_exits.EXIT_PREEMPTED
    for code in (trainer_exits.EXIT_USER, trainer_exits.EXIT_FENCED, trainer_exits.EXIT_PREEMPTED):
        assert f"| {code} |" in DOCUMENT


@pytest.mark.parametrize(("uid", "known"), [("uid-1", 3), ("uid-2", None)])
def test_the_operator_reads_which_attempt_of_the_job_has_fenced_this_one(
    tmp_path: Path, uid: str, known: int | None
) -> None:
    Fence.acquire(tmp_path, created=1, attempt=3, uid=uid)
    with pytest.raises(trainer_exits.FencedError) as fenced:
        Fence.acquire(tmp_path, created=1, attempt=1, uid="uid-1")
    ended = Termination(77, message=json.dumps({"version": 1, "reason": "Fenced", "message": str(fenced.value)}))
    pod = PodView("digits-1-0", "pod-1", 1, 0, PodPhase.FAILED, termination=ended)
    (failure,) = operator_exits.find_failures([pod], [], NOW)
    assert failure.fenced_by == known


def test_the_launcher_answers_status_with_exactly_the_documented_fields() -> None:
    pod = parse_pod(pod_environment())
    answer = status(pod, 0.0, PodState(now=1.0, wall=2.0, ranks=(), heartbeats=()))
    assert set(answer) == set(STATUS)


def test_the_operator_reads_every_field_of_its_report_from_the_documented_status() -> None:
    nothing = TrainerReport()
    assert [name for name in nothing.__slots__ if getattr(REPORT, name) == getattr(nothing, name)] == []


def read(status: DDPJobStatus, uid: str = STATUS["uid"]) -> DDPJobStatus:
    """What the operator makes of the documented status for a job of that uid."""
    of_job = replace(job(), uid=uid, status=status)
    return with_report(Look(of_job, Observed(report=REPORT), NOW, Defaults(), status)).status


def test_the_operator_reads_progress_from_the_documented_status() -> None:
    after = read(DDPJobStatus())
    assert after.progress is not None
    assert after.snapshot is not None
    assert (after.progress.epoch, after.progress.step, after.progress.total_steps) == (3, 120, 400)
    assert (after.progress.loss, after.progress.metrics) == (0.31, {"eval_accuracy": 0.96, "eval_loss": 0.2})
    assert (after.snapshot.step, after.snapshot.verified) == (100, True)


def test_the_operator_ignores_the_status_of_another_life_of_the_job() -> None:
    assert read(DDPJobStatus(), uid="another-uid") == DDPJobStatus()
    assert read(DDPJobStatus(attempt=1)) == DDPJobStatus(attempt=1)


def test_the_operator_reads_the_termination_message_that_the_launcher_writes() -> None:
    pod = parse_pod(pod_environment())
    cause = ExitCause(1, "WorkerKilled", "rank 1 was killed by SIGKILL after step 120", rank=1, signal="SIGKILL")
    written = encode(message_of(cause, pod, ExitEvidence(wall=5.0, procs=1)))
    assert set(json.loads(written)) == set(TERMINATION)
    report = read_termination(written.decode())
    assert report is not None
    assert (report.reason, report.signal, report.rank, report.attempt) == ("WorkerKilled", "SIGKILL", 1, 3)


def test_the_trainer_reads_its_place_from_the_files_that_a_kubelet_makes_of_the_pods_labels(tmp_path: Path) -> None:
    assignable = job(restart={"scope": "InPlace"})
    pod = build_pod(Admitted(assignable, Defaults()), Place(3, 1, ServiceView(host="10.96.0.7", attempt=3)))
    (volume,) = (volume for volume in pod["spec"]["volumes"] if "downwardAPI" in volume)
    for item in volume["downwardAPI"]["items"]:
        label = re.fullmatch(r"metadata\.labels\['(.+)'\]", item["fieldRef"]["fieldPath"])
        assert label is not None
        (tmp_path / item["path"]).write_text(pod["metadata"]["labels"][label[1]])
    assert read_assignment(tmp_path) == Assignment(attempt=3, node_rank=1, nodes=2)
    variables = pod_environment(restart={"scope": "InPlace"})
    assert parse_pod(variables, read_assignment(tmp_path)).assignment_dir == Path("/etc/ddpjob/assignment")


def test_the_trainer_reads_the_place_that_a_run_on_this_machine_gives_it(tmp_path: Path) -> None:
    write_assignment(tmp_path / "place", attempt=3, node_rank=None, nodes=2)
    assert read_assignment(tmp_path / "place") == Assignment(3, None, 2)
    write_assignment(tmp_path / "place", attempt=4, node_rank=1, nodes=3)
    assert read_assignment(tmp_path / "place") == Assignment(4, 1, 3)
    link, data = sorted((tmp_path / "place").iterdir(), key=lambda path: not path.is_symlink())
    assert link.resolve() == data.resolve()


def test_the_command_reads_the_log_that_the_launcher_keeps_of_a_pod(tmp_path: Path) -> None:
    pod = parse_pod(pod_environment(resources={"limits": {"nvidia.com/gpu": 4}}) | {"DDPJOB_SHARED": str(tmp_path)})
    path = pod.output_log
    assert path is not None
    assert pod.keeps_output
    path.parent.mkdir(parents=True)
    head = pod_logs.header(NOW.timestamp(), "digits-3-1", pod.uid, pod.procs_per_node)
    path.write_bytes(head + f"{pod_logs.stamp(NOW.timestamp())} [local rank 2] loss 1\n".encode())
    (line,) = FolderLogs(Shared(tmp_path), "digits", Wanted(attempt=3, node=1)).now()
    assert (line.rank, line.text, line.stamp) == (6, "loss 1", "2026-01-01T00:00:00.000000Z")
    assert "---- <time> <pod> (<uid>) starts, <R> ranks, with times" in DOCUMENT


def test_the_trainer_reads_the_log_that_a_run_on_this_machine_keeps_of_a_pod(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "logs/digits/pods/digits-3-1.log"
    path.parent.mkdir(parents=True)
    env = pod_environment(resources={"limits": {"nvidia.com/gpu": 4}})
    head = log_header("digits-3-1", "of-the-pod", env, NOW)
    path.write_text(f"{head}\nold\n{head}\n[local rank 2] loss 1\n")
    assert print_logs([str(tmp_path), "digits"]) == 0
    assert capsys.readouterr().out == "[rank 6] loss 1\n"
    (line,) = FolderLogs(Shared(tmp_path), "digits", Wanted(attempt=3)).now()
    assert line.text == "loss 1"
    assert log_tail(path, "of-the-pod") == "[local rank 2] loss 1"
    assert head.endswith(" digits-3-1 of 0b0c with 4 ranks (of-the-pod) starts")
    assert "`---- <time> <pod> of <uid of the job> with <R> ranks (<uid of the pod>) starts`" in DOCUMENT


def test_the_page_reads_the_losses_and_the_throughput_that_the_trainer_wrote(tmp_path: Path) -> None:
    log = LossLog(tmp_path / "logs/digits/losses" / f"{Attempt(1, 3, 'u').name}.jsonl", 3)
    log.resumed(6)
    log.append(step=7, epoch=0, loss=0.5)
    log.append(step=8, epoch=0, loss=0.25, samples_per_second=812.46)
    log.close()
    assert course_of(Shared(tmp_path), "digits", []).kept == (LossPoint(7, 0.5, 3), LossPoint(8, 0.25, 3, 812.5))
    assert '`{"step","epoch","loss","attempt","samplesPerSecond"}`' in DOCUMENT


def test_a_manifest_has_exactly_the_documented_fields() -> None:
    made = Manifest("digits", "u", 0, 100, 2, 6400, 2, "ddp", 64, 1.0, files={"a": FileEntry(1, "0" * 64)})
    assert set(json.loads(made.to_json())) == set(MANIFEST)


GRACE = "terminationGracePeriodSeconds"


@pytest.mark.parametrize(
    ("spec", "shutdown", "grace"),
    [
        pytest.param({}, 45, 60, id="the default"),
        pytest.param({"shutdownSeconds": 300}, 300, 315, id="the spec"),
        pytest.param({"podTemplate": {"spec": {GRACE: 120}}}, 105, 120, id="a grace period of the user's"),
        pytest.param({"shutdownSeconds": 100, "podTemplate": {"spec": {GRACE: 30}}}, 100, 115, id="one too short"),
        pytest.param({"shutdownSeconds": 30, "podTemplate": {"spec": {GRACE: 600}}}, 30, 600, id="one longer"),
    ],
)
def test_a_pods_grace_period_covers_the_launchers_shutdown_and_its_report(
    spec: dict[str, Any], shutdown: int, grace: int
) -> None:
    """Less, and the kubelet kills the launcher before it has killed hanging ranks and written why."""
    built = build_pod(Admitted(job(**spec), Defaults()), Place(0, 0, ServiceView(host="10.96.0.7", attempt=0)))
    variables = {item["name"]: item.get("value", "x") for item in built["spec"]["containers"][0]["env"]}
    assert (parse_pod(variables).shutdown_seconds, built["spec"][GRACE]) == (shutdown, grace)
    assert grace >= shutdown + AGENT_SECONDS
