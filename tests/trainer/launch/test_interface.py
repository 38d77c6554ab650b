"""Which interface gloo is given, and that it is the one with the address."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_trainer.contract.environment import parse_pod
from ddp_trainer.launch import attempt, interface
from ddp_trainer.launch.interface import gloo_interface, interface_to_name

INTERFACES = (("lo", "127.0.0.1"), ("eth0", "10.0.0.7"), ("ib0", "192.168.4.7"))


@pytest.mark.parametrize(
    ("pod_ip", "own", "name"),
    [
        ("10.0.0.7", ["10.0.0.7"], None),
        ("10.0.0.7", ["10.0.0.7", "127.0.1.1"], None),
        ("10.0.0.7", ["192.168.4.7"], None),
        ("10.0.0.7", ["127.0.1.1"], "eth0"),
        ("10.0.0.7", ["127.0.1.1", "10.0.0.7"], "eth0"),
        ("10.0.0.7", ["::1", "10.0.0.7"], "eth0"),
        ("10.0.0.7", [], "eth0"),
        ("10.0.0.8", ["127.0.1.1"], None),
        ("127.0.0.1", ["127.0.1.1"], None),
    ],
)
def test_gloo_is_given_an_interface_where_the_name_of_the_host_leads_to_itself(
    pod_ip: str, own: list[str], name: str | None
) -> None:
    assert interface_to_name(pod_ip, own, INTERFACES) == name


def test_a_machine_alone_is_not_asked_for_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may take seconds where a name server does not answer."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("its name was looked up"))
    assert gloo_interface("127.0.0.1") is None


def test_the_interface_with_an_address_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as routed:
        try:
            routed.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            pytest.skip("this machine has no network but its own")
        own = routed.getsockname()[0]
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    found = gloo_interface(own)
    assert found in {name for _, name in socket.if_nameindex()} - {"lo"}
    monkeypatch.setattr(socket, "gethostname", lambda: own)
    assert gloo_interface(own) is None


def test_the_interface_with_an_address_of_ipv6_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only one that a node of such a cluster may have."""
    file = tmp_path / "if_inet6"
    file.write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fd000000000000000000000000000007 02 40 00 80     eth0\n"
        "fe800000000000000042acfffe110002 02 40 20 80     eth0\n"
        "fd0000000000000000000000000000a7 03 40 00 80 ibp12s0f0\n"
    )
    monkeypatch.setattr(interface, "_IPV6", file)
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert [gloo_interface(address) for address in ("fd00::7", "fd00::a7", "fd00::8")] == ["eth0", "ibp12s0f0", None]
    file.unlink()
    assert gloo_interface("fd00::7") is None


def test_torchrun_and_its_ranks_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {
        "DDPJOB_NAME": "digits", "DDPJOB_NAMESPACE": "default", "DDPJOB_UID": "u-1", "DDPJOB_ATTEMPT": "0",
        "DDPJOB_NODE_RANK": "1", "DDPJOB_NODES": "2", "DDPJOB_PROCS_PER_NODE": "1", "DDPJOB_RDZV_HOST": "10.96.0.7",
        "DDPJOB_RDZV_PORT": "29500", "DDPJOB_STATUS_PORT": "9400", "POD_IP": "10.0.0.7",
        "DDPJOB_SHARED": "/mnt/shared", "DDPJOB_RUN_DIR": "/dev/shm/ddpjob",
        "DDPJOB_TERMINATION_LOG": "/dev/termination-log",
    }  # fmt: skip
    given: dict[str, str] = {}

    def start(argv: list[str], *, env: dict[str, str], **others: Any) -> SimpleNamespace:
        given.update(env)
        return SimpleNamespace(pid=71)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(attempt, "gloo_interface", lambda pod_ip: f"that of {pod_ip}")
    assert attempt._start_torchrun(parse_pod(environ), []) == 71
    assert given["GLOO_SOCKET_IFNAME"] == "that of 10.0.0.7"
