"""A pod's manifest as a command for this machine."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpjob_operator.core.manifests.admitted import Admitted
from ddpjob_operator.core.manifests.initializer import build_initializer
from ddpjob_operator.core.manifests.pod_environment import Place
from ddpjob_operator.core.manifests.pods import build_pod
from ddpjob_operator.core.values.job import Defaults, Job
from ddpjob_operator.core.values.observed import ServiceView
from ddpjob_operator.local.environment import (
    Command,
    Endpoints,
    Machine,
    NotOnThisMachine,
    build_command,
    gpus_of_node,
    left_out,
)
from ddpjob_operator.wire.jobs import parse_job

SHARED = Path("/home/ann/shared")
MACHINE = Machine(host="laptop", shared=SHARED, environ={"PATH": "/usr/bin", "HOME": "/home/ann"}, cores=8)
ENDPOINTS = Endpoints(rendezvous_port=20001, status_port=20002, scratch=Path("/dev/shm/x"))


def job_of(spec: dict[str, Any]) -> Job:
    return parse_job(
        {
            "apiVersion": "training.ddpjob.io/v1alpha1",
            "kind": "DDPJob",
            "metadata": {"name": "digits", "uid": "u-1"},
            "spec": spec,
        },
        strict=True,
    )


def command_of(spec: dict[str, Any], *, machine: Machine = MACHINE, node_rank: int = 0) -> Command:
    job = job_of(spec)
    manifest = build_pod(Admitted(job, Defaults()), Place(3, node_rank, ServiceView("10.0.0.1", 3)))
    own = frozenset(variable.name for variable in job.spec.env)
    return build_command(manifest, machine, ENDPOINTS, own=own)


def test_the_launcher_runs_under_this_python() -> None:
    assert command_of({"args": ["--lr", "0.1"]}).argv == (
        *(sys.executable, "-m", "ddp_trainer.launch"),
        *("--module", "ddp_trainer.train", "--", "--lr", "0.1"),
    )


def test_ports_folders_and_addresses_are_those_of_this_machine() -> None:
    env = command_of({"nodes": 2}, node_rank=1).env
    assert {name: env[name] for name in env if name.startswith("DDPJOB_") or name == "POD_IP"} == {
        "DDPJOB_NAME": "digits",
        "DDPJOB_NAMESPACE": "default",
        "DDPJOB_UID": "u-1",
        "DDPJOB_CREATED": "0",
        "DDPJOB_ATTEMPT": "3",
        "DDPJOB_NODE_RANK": "1",
        "DDPJOB_NODES": "2",
        "DDPJOB_PROCS_PER_NODE": "1",
        "DDPJOB_POD_NAME": "digits-3-1",
        "DDPJOB_NODE_NAME": "laptop",
        "POD_IP": "127.0.0.1",
        "DDPJOB_RDZV_HOST": "127.0.0.1",
        "DDPJOB_RDZV_PORT": "20001",
        "DDPJOB_STATUS_PORT": "20002",
        "DDPJOB_SHARED": "/home/ann/shared",
        "DDPJOB_RUN_DIR": "/dev/shm/x/run",
        "DDPJOB_SCRATCH": "/dev/shm/x",
        "DDPJOB_TERMINATION_LOG": "/dev/shm/x/termination-log",
        "DDPJOB_KEEP_OUTPUT": "false",
        "DDPJOB_SNAPSHOT_EVERY": "60seconds",
        "DDPJOB_SNAPSHOT_KEEP": "3",
        "DDPJOB_STALL_MIN_SECONDS": "30",
        "DDPJOB_STALL_MAX_SECONDS": "1800",
    }


def test_a_pod_whose_place_may_change_reads_it_from_its_own_scratch() -> None:
    env = command_of({"nodes": 2, "restart": {"scope": "InPlace"}}).env
    assert env["DDPJOB_ASSIGNMENT_DIR"] == "/dev/shm/x/assignment"


SHELL = {
    "PATH": "/bin",
    "https_proxy": "p",
    "LD_PRELOAD": "jemalloc.so",
    "PYTHONPATH": "lib",
    "CC": "gcc",
    "NCCL_DEBUG": "INFO",
    "OMP_NUM_THREADS": "4",
    "HF_HOME": "/hub",
    "TOKENIZERS_PARALLELISM": "false",
}
OF_A_SURROUNDING_TORCHRUN = {"RANK": "3", "MASTER_ADDR": "x", "TORCHELASTIC_RUN_ID": "y", "DDPJOB_DEBUG": "1"}
KEYS = {"HF_TOKEN": "t", "AWS_SECRET_ACCESS_KEY": "k", "WANDB_API_KEY": "k", "TORCH_HUB_TOKEN": "t", "MY_PASSWORD": "p"}
OTHERS = {"SSH_AUTH_SOCK": "s", "KUBECONFIG": "k", "DISPLAY": ":0", "RANKING": "1"}


def test_ranks_have_of_the_shell_how_programs_and_libraries_are_set() -> None:
    """A pod of the same job has no key either, and the job file may be somebody else's."""
    outer = SHELL | OF_A_SURROUNDING_TORCHRUN | KEYS | OTHERS
    env = command_of({}, machine=replace(MACHINE, environ=outer)).env
    assert env.items() & outer.items() == SHELL.items()


def test_a_variable_that_the_job_names_is_passed_on() -> None:
    token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    env = command_of({"env": [token]}, machine=replace(MACHINE, environ=SHELL | KEYS)).env
    assert env.items() & KEYS.items() == {("HF_TOKEN", "t")}


def test_an_initializer_has_no_more_of_the_shell_than_the_ranks() -> None:
    token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    initializer = {"name": "data", "path": "data", "script": "true", "env": [token]}
    shell = SHELL | OF_A_SURROUNDING_TORCHRUN | KEYS | OTHERS
    pod = build_initializer(Admitted(job_of({"initializers": [initializer]}), Defaults()), 0)
    (container,) = pod["spec"]["containers"]
    env = build_command(pod, replace(MACHINE, environ=shell), ENDPOINTS, container=container).env
    assert shell.items() & env.items() == SHELL.items() | {("HF_TOKEN", "t")}


def test_home_stays_the_users_unless_the_job_sets_it() -> None:
    assert command_of({}).env["HOME"] == "/home/ann"
    assert command_of({"env": [{"name": "HOME", "value": "/tmp/h"}]}).env["HOME"] == "/tmp/h"
    without = replace(MACHINE, environ={"PATH": "/usr/bin"})
    assert "HOME" not in command_of({}, machine=without).env, "below an empty one, ~/.cache is /.cache"


@pytest.mark.parametrize(
    ("given", "here"),
    [
        ("/mnt/shared", "/home/ann/shared"),
        ("/mnt/shared/datasets/x.bin", "/home/ann/shared/datasets/x.bin"),
        ("--data=/mnt/shared/datasets", "--data=/home/ann/shared/datasets"),
        ("/mnt/shared/a:/mnt/shared/b", "/home/ann/shared/a:/home/ann/shared/b"),
        ('{"in": "/mnt/shared/x", "out": "/mnt/shared"}', '{"in": "/home/ann/shared/x", "out": "/home/ann/shared"}'),
        ("paths=[/mnt/shared/a,/mnt/shared/b]", "paths=[/home/ann/shared/a,/home/ann/shared/b]"),
        ("cp -r x '/mnt/shared/a b'\ncd /mnt/shared; ls", "cp -r x '/home/ann/shared/a b'\ncd /home/ann/shared; ls"),
        ("cd ${DATA:-/mnt/shared/data}", "cd ${DATA:-/home/ann/shared/data}"),
        ("/mnt/shared2/a", "/mnt/shared2/a"),
        ("/mnt/shared-2/a", "/mnt/shared-2/a"),
        ("/old/mnt/shared/a", "/old/mnt/shared/a"),
        ("${ROOT}/mnt/shared/a", "${ROOT}/mnt/shared/a"),
        ("https://host.example/mnt/shared/a", "https://host.example/mnt/shared/a"),
    ],
)
def test_paths_on_the_volume_become_paths_in_the_shared_folder(given: str, here: str) -> None:
    command = command_of({"args": [given], "env": [{"name": "DATA", "value": given}]})
    assert (command.argv[-1], command.env["DATA"]) == (here, here)


@pytest.mark.parametrize("text", ["$(POD_IP)", "$$(POD_IP)", "$$", "a $(b", "$5"])
def test_a_users_dollar_signs_arrive_as_they_were_written(text: str) -> None:
    command = command_of({"args": [text], "env": [{"name": "TEXT", "value": text}]})
    assert (command.argv[-1], command.env["TEXT"]) == (text, text)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata.name", "digits-3-0"),
        ("metadata.namespace", "default"),
        ("metadata.labels['training.ddpjob.io/attempt']", "3"),
        ("metadata.annotations['absent']", ""),
        ("spec.nodeName", "laptop"),
        ("status.podIP", "127.0.0.1"),
    ],
)
def test_field_references_tell_of_the_pod_and_this_machine(path: str, value: str) -> None:
    env = command_of({"env": [{"name": "X", "valueFrom": {"fieldRef": {"fieldPath": path}}}]}).env
    assert env["X"] == value


@pytest.mark.parametrize(
    ("kind", "source", "why"),
    [
        ("secretKeyRef", {"name": "hub", "key": "token"}, "hub/token needs a cluster, and there is none here"),
        ("configMapKeyRef", {"name": "hub", "key": "url"}, "hub/url needs a cluster, and there is none here"),
        (
            "fileKeyRef",
            {"volumeName": "v", "path": "env", "key": "url"},
            "v/url needs a cluster, and there is none here",
        ),
        (
            "resourceFieldRef",
            {"resource": "limits.cpu"},
            "limits.cpu is a limit of a container, and there is none here",
        ),
    ],
)
def test_what_only_a_cluster_knows_is_refused_with_its_name_and_the_way_out(
    kind: str, source: dict[str, str], why: str
) -> None:
    token = {"name": "HF_TOKEN", "valueFrom": {kind: source}}
    with pytest.raises(NotOnThisMachine) as refusal:
        command_of({"env": [token]})
    (problem,) = refusal.value.problems
    way_out = "set HF_TOKEN in this shell (export HF_TOKEN=…) and run again"
    assert problem == f"spec.env HF_TOKEN: {kind} {why}; {way_out}"


def test_a_secret_that_the_shell_sets_is_taken_from_there() -> None:
    token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    machine = replace(MACHINE, environ={"HF_TOKEN": "s3cret"})
    assert command_of({"env": [token]}, machine=machine).env["HF_TOKEN"] == "s3cret"


def test_an_optional_secret_is_left_out_as_in_a_cluster() -> None:
    token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token", "optional": True}}}
    assert "HF_TOKEN" not in command_of({"env": [token]}).env


def test_a_whole_config_map_is_refused_by_name() -> None:
    source = {"configMapRef": {"name": "settings"}}
    template = {"spec": {"containers": [{"name": "trainer", "envFrom": [source]}]}}
    with pytest.raises(NotOnThisMachine, match=r"envFrom: configMapRef settings needs a cluster.*list its variables"):
        command_of({"podTemplate": template})


def test_sidecars_are_said_to_be_left_out() -> None:
    manifest = {"spec": {"initContainers": [{"name": "fetch"}], "containers": [{"name": "trainer"}, {"name": "vpn"}]}}
    assert list(left_out(manifest)) == [
        "spec.podTemplate.spec.initContainers: fetch is not run on this machine",
        "spec.podTemplate.spec.containers: vpn is not run on this machine",
    ]


@pytest.mark.parametrize(
    ("cores", "nodes", "ranks", "threads"), [(8, 2, 1, "4"), (8, 1, 3, "2"), (2, 4, 2, "1"), (1, 1, 1, "1")]
)
def test_ranks_share_the_cores(cores: int, nodes: int, ranks: int, threads: str) -> None:
    env = command_of({"nodes": nodes, "procsPerNode": ranks}, machine=replace(MACHINE, cores=cores)).env
    assert env["OMP_NUM_THREADS"] == threads


def test_a_thread_count_that_somebody_chose_is_kept() -> None:
    assert command_of({"env": [{"name": "OMP_NUM_THREADS", "value": "3"}]}).env["OMP_NUM_THREADS"] == "3"
    machine = replace(MACHINE, environ={"OMP_NUM_THREADS": "5"})
    assert command_of({}, machine=machine).env["OMP_NUM_THREADS"] == "5"


@pytest.mark.parametrize(
    ("gpus", "seat", "seats", "ranks", "seen"),
    [
        (("0", "1", "2", "3"), 0, 2, 2, ("0", "1")),
        (("0", "1", "2", "3"), 1, 2, 2, ("2", "3")),
        (("4", "7"), 1, 2, 1, ("7",)),
        (("0",), 0, 2, 1, ()),
    ],
)
def test_every_rank_has_a_gpu_of_its_own_or_none_has_one(
    gpus: tuple[str, ...], seat: int, seats: int, ranks: int, seen: tuple[str, ...]
) -> None:
    assert gpus_of_node(gpus, seat, seats, ranks) == seen


@pytest.mark.parametrize(
    ("own", "gpus", "rocm", "variable", "seen"),
    [
        ({}, ("1",), False, "CUDA_VISIBLE_DEVICES", "1"),
        ({}, (), False, "CUDA_VISIBLE_DEVICES", ""),
        ({}, ("1",), True, "HIP_VISIBLE_DEVICES", "1"),
        ({}, (), True, "HIP_VISIBLE_DEVICES", "-1"),
        ({"HIP_VISIBLE_DEVICES": "3"}, ("1",), True, "HIP_VISIBLE_DEVICES", "3"),
        ({"ROCR_VISIBLE_DEVICES": "3"}, ("1",), True, "HIP_VISIBLE_DEVICES", "0,1"),
    ],
)
def test_a_pod_sees_its_gpus_alone_unless_the_job_chooses_them(
    own: dict[str, str], gpus: tuple[str, ...], rocm: bool, variable: str, seen: str
) -> None:
    shell = {"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0,1"}
    machine = replace(MACHINE, environ=shell, gpus=("0", "1"), rocm=rocm)
    job = job_of({"env": [{"name": name, "value": value} for name, value in own.items()]})
    manifest = build_pod(Admitted(job, Defaults()), Place(0, 0, ServiceView("10.0.0.1", 1)))
    command = build_command(manifest, machine, ENDPOINTS, own=frozenset(own), gpus=gpus)
    assert command.env[variable] == seen


@pytest.mark.parametrize(
    ("count", "seat", "seats", "asked", "seen"),
    [
        (8, 0, 1, 4, ("0", "1", "2", "3")),
        (8, 1, 2, 4, ("4", "5", "6", "7")),
        (6, 1, 2, 4, ("3", "4", "5")),
        (2, 1, 2, 8, ("1",)),
        (4, 0, 1, 0, ("0",)),
    ],
)
def test_a_rank_has_all_the_gpus_that_its_pod_asks_for(
    count: int, seat: int, seats: int, asked: int, seen: tuple[str, ...]
) -> None:
    gpus = tuple(str(index) for index in range(count))
    assert gpus_of_node(gpus, seat, seats, 1, asked) == seen
