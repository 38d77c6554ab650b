"""What the launcher accepts from the operator, and what it says to anything else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddp_trainer.contract.environment import Assignment, Target, parse_environment, parse_target
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


def test_a_complete_environment_is_parsed_into_values():
    pod = parse_environment(GOOD)
    assert (pod.attempt, pod.node_rank, pod.world_size) == (3, 1, 8)
    assert pod.log_dir == Path("/mnt/shared/logs/digits")


@pytest.mark.parametrize("name", GOOD)
def test_each_variable_that_is_missing_is_named(name):
    with pytest.raises(UserError, match=f"{name} is not set"):
        parse_environment({key: value for key, value in GOOD.items() if key != name})


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
    ],
)
def test_a_bad_value_is_named_with_what_it_must_be(name, value, words):
    with pytest.raises(UserError, match=f"{name}.*{words}"):
        parse_environment(GOOD | {name: value})


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
        parse_environment(GOOD | {"DDPJOB_NODE_RANK": node_rank}), Target("module", "m", ("--", "-m"))
    )
    assert f"--rdzv-endpoint={endpoint}" in arguments
    assert {"--rdzv-backend=static", f"--node-rank={node_rank}"} <= set(arguments)
    assert {"--rdzv-id=0b0c-3", "--local-addr=10.244.1.3", "--max-restarts=0", "--nnodes=2"} <= set(arguments)
    assert arguments[-4:] == ["module", "m", "--", "-m"]


def test_a_place_in_another_attempt_takes_the_place_of_the_variables_for_torchrun_and_for_the_ranks():
    pod = parse_environment(GOOD | {"DDPJOB_NODE_RANK": "none"}, Assignment(attempt=4, node_rank=0, nodes=3))
    arguments = torchrun_arguments(pod, Target("module", "m", ()))
    assert {"--rdzv-id=0b0c-4", "--node-rank=0", "--nnodes=3"} <= set(arguments)
    assert "--rdzv-endpoint=10.244.1.3:29500" in arguments
    env = torchrun_environment(pod, GOOD, cpus=1)
    assert [env[f"DDPJOB_{name}"] for name in ("ATTEMPT", "NODE_RANK", "NODES")] == ["4", "0", "3"]


def test_ipv6_addresses_are_bracketed():
    arguments = torchrun_arguments(parse_environment(GOOD | {"DDPJOB_RDZV_HOST": "fd00::7"}), Target("module", "m", ()))
    assert "--rdzv-endpoint=[fd00::7]:29500" in arguments


def test_ranks_share_the_cpus_unless_the_job_says_otherwise():
    pod = parse_environment(GOOD)
    assert torchrun_environment(pod, {}, cpus=8)["OMP_NUM_THREADS"] == "2"
    assert torchrun_environment(pod, {}, cpus=2)["OMP_NUM_THREADS"] == "1"
    assert torchrun_environment(pod, {"OMP_NUM_THREADS": "7"}, cpus=8)["OMP_NUM_THREADS"] == "7"


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
