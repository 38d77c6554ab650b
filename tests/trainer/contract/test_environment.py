"""What the launcher accepts from the operator, and what it says to anything else."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_trainer.contract.environment import (
    Assignment,
    JobEnvironment,
    RankEnvironment,
    SubmittedCode,
    Target,
    first_live_rank,
    parse_agent,
    parse_job,
    parse_pod,
    parse_rank,
    parse_target,
)
from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.launch.torchrun import torchrun_arguments, torchrun_environment, usable_cpus

GOOD = {
    "DDPJOB_NAME": "digits",
    "DDPJOB_NAMESPACE": "default",
    "DDPJOB_UID": "0b0c",
    "DDPJOB_ATTEMPT": "3",
    "DDPJOB_NODE_RANK": "1",
    "DDPJOB_NODES": "2",
    "DDPJOB_PROCS_PER_NODE": "4",
    "POD_IP": "10.244.1.3",
    "DDPJOB_RDZV_HOST": "10.96.0.7",
    "DDPJOB_RDZV_PORT": "29500",
    "DDPJOB_STATUS_PORT": "9400",
    "DDPJOB_SHARED": "/mnt/shared",
    "DDPJOB_RUN_DIR": "/tmp/ddpjob",
    "DDPJOB_TERMINATION_LOG": "/dev/termination-log",
}

CODE = {"DDPJOB_CODE_DIR": "/etc/ddpjob/code", "DDPJOB_CODE_SHA256": "ab" * 32}


def test_a_complete_environment_is_parsed_into_values():
    pod = parse_pod(GOOD)
    assert (pod.attempt, pod.node_rank, pod.world_size) == (3, 1, 8)
    assert pod.log_dir == Path("/mnt/shared/logs/digits")


@pytest.mark.parametrize("name", GOOD)
def test_each_variable_that_is_missing_is_named(name):
    with pytest.raises(UserError, match=f"{name} is not set"):
        parse_pod({key: value for key, value in GOOD.items() if key != name})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("DDPJOB_NODES", "0", "from 1"),
        ("DDPJOB_NODES", "1e3", "whole number"),
        ("DDPJOB_NODE_RANK", "2", "from 0 to 1"),
        ("DDPJOB_NODE_RANK", "-1", "from 0 to 1"),
        ("DDPJOB_RDZV_PORT", "70000", "65535"),
        ("DDPJOB_PROCS_PER_NODE", "٣", "whole number"),
        ("DDPJOB_RUN_DIR", "tmp", "absolute"),
        ("DDPJOB_STALL_MIN_SECONDS", "nan", "seconds above 0"),
        ("DDPJOB_SHUTDOWN_SECONDS", "soon", "seconds above 0"),
        ("DDPJOB_STALL_MIN_SECONDS", "9000", "greater than DDPJOB_STALL_MAX_SECONDS"),
        ("DDPJOB_CODE_DIR", "code", "absolute"),
        ("DDPJOB_CODE_SHA256", "A" * 64, "lower-case hexadecimal"),
        ("DDPJOB_CODE_SHA256", "", "is not set"),
        ("DDPJOB_CODE_REQUIREMENTS", "../requirements.txt", "below the submitted folder"),
        ("DDPJOB_CODE_REQUIREMENTS", "/requirements.txt", "below the submitted folder"),
    ],
)
def test_a_bad_value_is_named_with_what_it_must_be(name, value, words):
    with pytest.raises(UserError, match=f"{name}.*{words}"):
        parse_pod(GOOD | CODE | {name: value})


def test_pod_and_rank_know_the_code_that_was_submitted():
    code = SubmittedCode(Path("/etc/ddpjob/code"), "ab" * 32)
    assert parse_pod(GOOD | CODE).code == code
    assert parse_pod(GOOD | CODE | {"DDPJOB_CODE_REQUIREMENTS": "r.txt"}).code == replace(code, requirements="r.txt")
    assert parse_job(GOOD | CODE, default_name="").code_sha256 == code.sha256
    without = GOOD | {"DDPJOB_CODE_SHA256": code.sha256}
    assert (parse_pod(without).code, parse_job(without, default_name="").code_sha256) == (None, None)


@pytest.mark.parametrize(
    ("argv", "target"),
    [
        (["--module", "a.b", "--", "--x", "--", "y"], Target("module", "a.b", ("--x", "--", "y"))),
        (["--script", "/t.py"], Target("script", "/t.py", ())),
        (["--script", "/t.py", "--"], Target("script", "/t.py", ())),
    ],
)
def test_everything_after_the_first_dashes_is_the_scripts_own(argv, target):
    assert parse_target(argv) == target


@pytest.mark.parametrize("argv", [[], ["--module"], ["--module", ""], ["train.py", "x"], ["--module", "a", "--lr=1"]])
def test_any_other_command_line_is_refused(argv):
    with pytest.raises(UserError):
        parse_target(argv)


@pytest.mark.parametrize(("node_rank", "endpoint"), [("0", "10.244.1.3:29500"), ("1", "10.96.0.7:29500")])
def test_node_rank_0_hosts_the_rendezvous_and_the_others_go_through_the_service(node_rank, endpoint):
    arguments = torchrun_arguments(
        parse_pod(GOOD | {"DDPJOB_NODE_RANK": node_rank}), Target("module", "m", ("--", "-m"))
    )
    assert f"--rdzv-endpoint={endpoint}" in arguments
    assert {"--rdzv-backend=static", f"--node-rank={node_rank}"} <= set(arguments)
    assert {"--rdzv-id=0b0c-3", "--local-addr=10.244.1.3", "--max-restarts=0", "--nnodes=2"} <= set(arguments)
    assert arguments[-4:] == ["module", "m", "--", "-m"]


def test_a_place_in_another_attempt_takes_the_place_of_the_variables_for_torchrun_and_for_the_ranks():
    pod = parse_pod(GOOD | {"DDPJOB_NODE_RANK": "none"}, Assignment(attempt=4, node_rank=0, nodes=3))
    arguments = torchrun_arguments(pod, Target("module", "m", ()))
    assert {"--rdzv-id=0b0c-4", "--node-rank=0", "--nnodes=3"} <= set(arguments)
    assert "--rdzv-endpoint=10.244.1.3:29500" in arguments
    env = torchrun_environment(pod, GOOD, cpus=1)
    assert [env[f"DDPJOB_{name}"] for name in ("ATTEMPT", "NODE_RANK", "NODES")] == ["4", "0", "3"]


def test_packages_of_the_code_come_before_what_the_image_has_in_its_python_path():
    pod = replace(parse_pod(GOOD), site_packages=Path("/mnt/shared/envs/k/lib"))
    assert torchrun_environment(pod, {"PYTHONPATH": "/opt/a:/opt/b"}, cpus=1)["PYTHONPATH"] == (
        "/mnt/shared/envs/k/lib:/opt/a:/opt/b"
    )
    assert torchrun_environment(pod, {}, cpus=1)["PYTHONPATH"] == "/mnt/shared/envs/k/lib"
    assert "PYTHONPATH" not in torchrun_environment(parse_pod(GOOD), {}, cpus=1)


def test_ranks_know_the_number_of_their_node_by_the_name_that_composer_has_for_it():
    pod = parse_pod(GOOD, Assignment(attempt=4, node_rank=1, nodes=3))
    assert torchrun_environment(pod, {}, cpus=1)["NODE_RANK"] == "1"
    assert torchrun_environment(pod, {"NODE_RANK": "7"}, cpus=1)["NODE_RANK"] == "7", "the job's own"
    assert "NODE_RANK" not in torchrun_environment(replace(pod, node_rank=None), {}, cpus=1), "of a spare"


def test_ipv6_addresses_are_bracketed():
    arguments = torchrun_arguments(parse_pod(GOOD | {"DDPJOB_RDZV_HOST": "fd00::7"}), Target("module", "m", ()))
    assert "--rdzv-endpoint=[fd00::7]:29500" in arguments


def test_ranks_share_the_cpus_unless_the_job_says_otherwise():
    pod = parse_pod(GOOD)
    assert torchrun_environment(pod, {}, cpus=8)["OMP_NUM_THREADS"] == "2"
    assert torchrun_environment(pod, {}, cpus=2)["OMP_NUM_THREADS"] == "1"
    assert torchrun_environment(pod, {"OMP_NUM_THREADS": "7"}, cpus=8)["OMP_NUM_THREADS"] == "7"


def test_torchrun_does_not_end_what_the_kernel_holds_on_to() -> None:
    """It would say that all ranks were done."""
    of_image = {"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "60"}
    assert not of_image.keys() & torchrun_environment(parse_pod(GOOD), of_image, cpus=1).keys()


def test_gloo_gets_the_interface_that_nobody_has_chosen() -> None:
    pod, chosen = parse_pod(GOOD), {"GLOO_SOCKET_IFNAME": "ib0"}
    assert torchrun_environment(pod, {}, cpus=1, interface="eth0")["GLOO_SOCKET_IFNAME"] == "eth0"
    assert torchrun_environment(pod, chosen, cpus=1, interface="eth0")["GLOO_SOCKET_IFNAME"] == "ib0"
    assert "GLOO_SOCKET_IFNAME" not in torchrun_environment(pod, {}, cpus=1)


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, len(os.sched_getaffinity(0))),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, len(os.sched_getaffinity(0))),
        ({}, len(os.sched_getaffinity(0))),
    ],
    ids=["version 2", "version 2 without a limit", "version 1", "version 1 without a limit", "no control group"],
)
def test_the_cpus_of_a_container_are_its_quota(tmp_path, files, cpus):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cpus(tmp_path) == cpus


def test_a_rank_reads_what_torchrun_and_the_launcher_set():
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    found = parse_rank({**torchrun, "DDPJOB_RUN_DIR": "/run/ddpjob", "DDPJOB_AGENT_PID": "17"})
    assert found == RankEnvironment(5, 8, 1, 4, under_torchrun=True, run_dir=Path("/run/ddpjob"), agent_pid=17)


def test_without_torchrun_there_is_one_rank():
    assert parse_rank({}) == RankEnvironment()


def test_a_rank_reads_its_job():
    environ = GOOD | {"DDPJOB_CREATED": "17", "DDPJOB_SNAPSHOT_EVERY": "2epochs", "DDPJOB_SNAPSHOT_KEEP": "5"}
    found = parse_job(environ, default_name="training")
    assert found == JobEnvironment("digits", "0b0c", 17, 3, 2, Path("/mnt/shared"), "2epochs", 5)
    assert found.log_dir == Path("/mnt/shared/logs/digits")


def test_without_the_operator_each_start_is_a_new_run_of_a_job_named_after_its_task(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = parse_job({}, default_name="my_package.tasks:Mine")
    assert (first.name, first.uid, first.attempt, first.nodes) == ("my-package-tasks-mine", "local", 0, 1)
    assert (first.shared, first.snapshot_every, first.snapshot_keep) == (tmp_path / "shared", "100steps", 3)
    assert first.created > 1_700_000_000


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "eight", "WORLD_SIZE": "8"}, "RANK='eight' must be a whole number from 0 to 7"),
        ({"RANK": "8", "WORLD_SIZE": "8"}, "RANK='8' must be a whole number from 0 to 7"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' must be a whole number from 1"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK='-1' must be a whole number from 0"),
    ],
)
def test_a_bad_rank_is_named_with_what_it_must_be(environ, words):
    with pytest.raises(UserError, match=words):
        parse_rank(environ)


@pytest.mark.parametrize(
    ("name", "value"),
    [("DDPJOB_ATTEMPT", "-1"), ("DDPJOB_CREATED", "now"), ("DDPJOB_NODES", "0"), ("DDPJOB_SNAPSHOT_KEEP", "0")],
)
def test_a_bad_job_is_named_with_what_it_must_be(name, value):
    with pytest.raises(UserError, match=f"{name}='{value}' must be a whole number from "):
        parse_job({name: value}, default_name="training")


def test_the_agent_names_all_that_it_lacks_at_once():
    with pytest.raises(UserError, match=r"DDPJOB_RUN_DIR is not set.*; DDPJOB_LAUNCHER_PID is not set"):
        parse_agent({})


def test_a_pod_that_waits_for_a_place_has_an_agent_already():
    env = {"DDPJOB_RUN_DIR": "/run", "DDPJOB_LAUNCHER_PID": "7", "DDPJOB_LIVE": "true", "DDPJOB_NODE_RANK": "None"}
    assert (parse_agent(env).launcher_pid, parse_agent(env).shutdown_seconds) == (7, 45.0)
    assert parse_agent(env | {"DDPJOB_SHUTDOWN_SECONDS": "300"}).shutdown_seconds == 300.0


def test_ranks_that_recover_live_are_numbered_from_the_first_of_their_pod():
    place = {"DDPJOB_ATTEMPT": "0", "DDPJOB_NODE_RANK": "2", "DDPJOB_NODES": "3"}
    live = place | {"DDPJOB_LIVE": "true", "DDPJOB_PROCS_PER_NODE": "4", "POD_IP": "10.0.0.1"}
    assert (first_live_rank(place), first_live_rank(live)) == (0, 8)


def test_no_other_module_reads_rank_or_attempt_from_the_environment():
    package = Path(__file__).parents[3] / "trainer_image" / "ddp_trainer"
    quoted = re.compile(r"""["'](RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|DDPJOB_ATTEMPT)["']""")
    readers = {path.name for path in package.rglob("*.py") if quoted.search(path.read_text())}
    assert readers == {"environment.py"}
