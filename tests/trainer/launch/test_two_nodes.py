"""Two launchers on this machine as two nodes of a gang."""

from __future__ import annotations

import resource
import socket

import pytest
from tests.support.ports import free_port
from tests.support.waiting import eventually

ALL_REDUCE = """
    import os, sys, torch, torch.distributed as dist
    from ddp_trainer.contract.heartbeat import Heartbeat
    heartbeat = Heartbeat.from_env()
    heartbeat.enter("rendezvous")
    dist.init_process_group("gloo")
    heartbeat.enter("train")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size() == 2
    heartbeat.step(step=1, epoch=0, total_steps=1, samples=64, loss=total)
"""


def start_gang(start_pod, script, *arguments, **env):
    gang = {"DDPJOB_NODES": "2", "DDPJOB_UID": "gang", "DDPJOB_RDZV_PORT": str(free_port())} | env
    return [start_pod(script, *arguments, **gang, DDPJOB_NODE_RANK=str(node)) for node in (0, 1)]


def test_two_nodes_find_each_other_and_both_succeed(start_pod):
    script = ALL_REDUCE + "    dist.destroy_process_group()\n    heartbeat.enter('done')\n"
    pods = start_gang(start_pod, script, fresh=True)  # each program is started as in a pod
    assert [pod.wait() for pod in pods] == [0, 0], [pod.log for pod in pods]
    assert [pod.message["nodeRank"] for pod in pods] == [0, 1]
    assert {pod.message["loss"] for pod in pods} == {2.0}


def test_ranks_may_open_more_files_than_a_container_runtime_begins_with(start_pod):
    """torchrun on node rank 0 has a connection of each rank, so that a job of 1,024 would not start."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, most), most))
    try:
        # a forked one would have the limits that held when its server was started
        pod = start_pod("import resource; print('files:', resource.getrlimit(resource.RLIMIT_NOFILE)[0])", fresh=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))
    assert pod.wait() == 0, pod.log
    assert f"files: {min(65536, most)}" in pod.log


def test_two_nodes_with_addresses_of_version_6_find_each_other_and_are_asked_there(start_pod, tmp_path):
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError as error:
            pytest.skip(f"this machine has no ::1: {error}")
    go = tmp_path / "go"
    go_on = "    while not os.path.exists(sys.argv[1]): time.sleep(0.05)\n    dist.destroy_process_group()\n"
    gang = {"DDPJOB_NODES": "2", "DDPJOB_UID": "gang", "DDPJOB_RDZV_PORT": str(free_port())}
    over_6 = {"POD_IP": "::1", "DDPJOB_RDZV_HOST": "::1"}
    script = ALL_REDUCE.replace("import os,", "import time, os,") + go_on
    pods = [start_pod(script, str(go), **gang, **over_6, DDPJOB_NODE_RANK=node) for node in ("0", "1")]
    for pod in pods:
        eventually(lambda pod=pod: pod.status(host="[::1]")["step"] == 1, "a step at [::1]")
        assert pod.status(host="127.0.0.1")["step"] == 1, "of version 4 too, as a scraper may use"
    go.touch()
    assert [pod.wait() for pod in pods] == [0, 0], [pod.log for pod in pods]


def test_a_script_may_open_a_store_of_its_own_at_any_port_of_the_first_node(start_pod):
    """As at MASTER_PORT + 1. The Service, which the other nodes meet it at, has the port of torchrun's store alone."""
    script = (
        ALL_REDUCE
        + """
    rank, first = dist.get_rank(), os.environ["MASTER_ADDR"]
    assert first == "127.0.0.1", first
    store = dist.TCPStore(first, int(sys.argv[1]), 2, is_master=rank == 0)
    store.set(f"hello {rank}", first)
    store.wait([f"hello {1 - rank}"])
    dist.barrier()
    dist.destroy_process_group()
    heartbeat.enter("done")
    """
    )
    service = {"DDPJOB_RDZV_HOST": "127.0.0.2"}
    pods = start_gang(start_pod, script, str(free_port()), **service)
    assert [pod.wait() for pod in pods] == [0, 0], [pod.log for pod in pods]


def test_ranks_follow_node_ranks_whichever_node_comes_first(start_pod):
    gang = {"DDPJOB_NODES": "2", "DDPJOB_UID": "gang", "DDPJOB_RDZV_PORT": str(free_port())}
    script = "import os; assert os.environ['RANK'] == os.environ['DDPJOB_NODE_RANK'], os.environ['RANK']"
    # the later a node comes, the greater its process id, by which c10d would number nodes of one address
    pods = [start_pod(script, **gang, DDPJOB_NODE_RANK=node_rank) for node_rank in ("1", "0")]
    assert [pod.wait() for pod in pods] == [0, 0], [pod.log for pod in pods]


def test_the_node_whose_rank_survives_reports_only_a_lost_peer(start_pod):
    pods = start_gang(
        start_pod,
        ALL_REDUCE
        + """
    if os.environ["DDPJOB_NODE_RANK"] == "1":
        os.kill(os.getpid(), 9)
    dist.all_reduce(total)
    """,
    )
    assert [pod.wait() for pod in pods] == [1, 1], [pod.log for pod in pods]
    assert [pod.message["reason"] for pod in pods] == ["PeerLost", "WorkerKilled"]
    assert "after step 1" in pods[1].message["message"]


@pytest.mark.fault(32)
def test_a_node_of_another_attempt_is_not_let_in(start_pod):
    gang = {"DDPJOB_NODES": "2", "DDPJOB_UID": "gang", "DDPJOB_RDZV_PORT": str(free_port())}
    current = start_pod("", **gang, DDPJOB_ATTEMPT="1")
    stale = start_pod("", **gang, DDPJOB_ATTEMPT="0", DDPJOB_NODE_RANK="1")
    fresh = start_pod("", **gang, DDPJOB_ATTEMPT="1", DDPJOB_NODE_RANK="1")
    assert [current.wait(), fresh.wait()] == [0, 0]
    assert list((stale.run_dir / "ranks").iterdir()) == []
