"""Scripts that number their ranks themselves: what is refused, what is corrected, and what runs as it is."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ddp_trainer.contract.environment import parse_rank, rank_variables
from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.contract.outcomes import outcome_of
from ddp_trainer.rank import own_groups
from ddp_trainer.rank.own_groups import RENDEZVOUS, ULTRALYTICS, Place, _install, guard, variables_of_group

TORCHRUNS, OWN = ("10.0.0.1", "29500"), ("localhost", "12355")
OF_TWO, ALONE = Place(1, 2, TORCHRUNS, pid=7), Place(0, 1, TORCHRUNS, pid=7)
MEET = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("place", "rank", "size", "asked", "in_rank"),
    [
        pytest.param(OF_TWO, 1, 2, TORCHRUNS, True, id="the rank itself"),
        pytest.param(OF_TWO, 1, 2, OWN, True, id="the rank itself, at an address of its own"),
        pytest.param(OF_TWO, 1, 2, TORCHRUNS, False, id="a process that trains for the rank"),
        pytest.param(ALONE, 0, 1, OWN, True, id="the only rank"),
    ],
)
def test_the_group_of_all_ranks_meets_where_torchrun_says(place, rank, size, asked, in_rank) -> None:
    assert variables_of_group(place, rank, size, asked, in_rank=in_rank) == MEET


@pytest.mark.parametrize("in_rank", [True, False])
def test_ranks_that_the_only_rank_of_a_job_starts_host_their_store_themselves(in_rank: bool) -> None:
    wanted = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    assert variables_of_group(ALONE, 3, 4, OWN, in_rank=in_rank) == wanted | {"TORCHELASTIC_USE_AGENT_STORE": "False"}


@pytest.mark.parametrize("host", ["10.0.0.1", "localhost"])
@pytest.mark.parametrize("in_rank", [True, False])
def test_their_store_is_not_at_torchrun_s_port_where_they_find_no_other(in_rank: bool, host: str) -> None:
    """Many scripts set MASTER_ADDR, and MASTER_PORT where it is not set."""
    asked = (host, TORCHRUNS[1])
    set_by_us = variables_of_group(replace(ALONE, own_port="40000"), 3, 4, asked, in_rank=in_rank)
    assert (set_by_us["MASTER_ADDR"], set_by_us["MASTER_PORT"]) == ("127.0.0.1", "40000")
    assert set_by_us["TORCHELASTIC_USE_AGENT_STORE"] == "False"


@pytest.mark.parametrize(
    ("rank", "size", "in_rank"), [(0, 4, True), (0, 2, True), (1, 2, False), (0, 4, False)], ids=str
)
def test_ranks_that_each_rank_of_a_job_starts_are_refused(rank: int, size: int, in_rank: bool) -> None:
    with pytest.raises(UserError, match=r"rank \d of \d at localhost:12355.* as rank 1 of 2 .*procsPerNode: 1"):
        variables_of_group(OF_TWO, rank, size, OWN, in_rank=in_rank)


Join = Callable[[Place, str], tuple[str, bool]]


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Iterator[Join]:
    """Asks for a group in the process that a Place names; returns the URL that torch gets, and whether it takes it that
    torchrun hosts the store.
    """
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    for name, value in (MEET | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)

    def torchs(url: str) -> Iterator[tuple[str, bool]]:
        yield url, os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"

    def join(place: Place, url: str) -> tuple[str, bool]:
        handlers = {"env": torchs, "tcp": lambda url: torchs(url), "file": lambda url: torchs(url)}
        monkeypatch.setitem(sys.modules, RENDEZVOUS, SimpleNamespace(_rendezvous_handlers=handlers))
        _install(place)
        return next(handlers[url.partition(":")[0]](url))

    yield join
    while own_groups._refusals:
        own_groups._refusals.pop().remove()


@pytest.mark.parametrize("place", [ALONE, Place(0, 1, TORCHRUNS, pid=os.getpid())], ids=["started", "rank"])
def test_the_store_of_ranks_that_the_only_rank_starts_is_at_their_tcp_address(join: Join, place: Place) -> None:
    url = "tcp://localhost:12355?rank=1&world_size=2"
    assert join(place, url) == (url, False)


def test_nor_is_it_at_torchrun_s_port_in_a_tcp_address(join: Join) -> None:
    place = replace(ALONE, own_port="40000")
    wanted = ("tcp://127.0.0.1:40000?rank=1&world_size=2", False)
    assert join(place, "tcp://localhost:29500?rank=1&world_size=2") == wanted


def test_the_group_of_all_ranks_at_a_tcp_address_of_its_own_meets_where_torchrun_says(join: Join) -> None:
    place = Place(1, 2, TORCHRUNS, pid=os.getpid())
    asked = "tcp://localhost:12355?rank=1&world_size=2&use_libuv=0"
    assert join(place, asked) == ("tcp://10.0.0.1:29500?rank=1&world_size=2&use_libuv=0", True)
    over_ipv6 = Place(1, 2, ("fd00::1", "29500"), pid=os.getpid())
    assert join(over_ipv6, asked)[0].startswith("tcp://[fd00::1]:29500?")


def test_ranks_that_each_rank_of_a_job_starts_are_refused_at_a_tcp_address(join: Join) -> None:
    with pytest.raises(UserError, match=r"rank 0 of 4 at localhost:12355.* as rank 1 of 2"):
        join(OF_TWO, "tcp://localhost:12355?rank=0&world_size=4")


def test_a_script_that_takes_the_refusal_for_a_machine_with_one_process_is_refused_at_its_first_step(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`except Exception: world_size, rank = 1, 0`, as V-JEPA has it."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with pytest.raises(UserError):
        join(OF_TWO, "tcp://localhost:12355?rank=0&world_size=4")
    with pytest.raises(UserError, match=r"Leave out mp\.spawn"):
        optimizer.step()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    optimizer.step()  # the script has tried again, rightly


@pytest.mark.parametrize("numbers", ["?rank=0&world_size=4", ""])
def test_a_group_at_torchrun_s_own_tcp_address_is_left_alone(join: Join, numbers: str) -> None:
    url = f"tcp://10.0.0.1:29500{numbers}"
    assert join(OF_TWO, url) == (url, True)


def test_the_group_of_all_ranks_in_a_file_meets_where_torchrun_says(
    join: Join, capfd: pytest.CaptureFixture[str]
) -> None:
    place = Place(1, 2, TORCHRUNS, pid=os.getpid(), attempt="a-1")
    os.environ["MASTER_ADDR"] = "localhost"
    assert join(place, "file:///mnt/shared/meet?rank=1&world_size=2") == ("env://?rank=1&world_size=2", True)
    assert os.environ["MASTER_ADDR"] == "10.0.0.1"
    assert "10.0.0.1:29500, where torchrun says, and not in /mnt/shared/meet" in capfd.readouterr().err


@pytest.mark.parametrize("place", [ALONE, OF_TWO], ids=["of the only rank", "of one of two"])
def test_other_ranks_meet_in_a_file_of_their_attempt(join: Join, place: Place) -> None:
    urls = [
        join(replace(place, attempt=attempt), "file:///mnt/shared/meet?rank=0&world_size=4")[0]
        for attempt in ("a-0", "a-1")
    ]
    assert urls == [f"file:///mnt/shared/meet.{attempt}?rank=0&world_size=4" for attempt in ("a-0", "a-1")]


@pytest.mark.parametrize(
    "url", ["env://", "tcp://localhost:12355?rank=0&world_size=2", "file:///meet?rank=0&world_size=2"]
)
def test_a_group_of_ranks_that_recover_live_is_refused(join: Join, url: str) -> None:
    with pytest.raises(UserError, match="attach_live"):
        join(Place(0, 2, TORCHRUNS, pid=7, is_live=True), url)


@pytest.mark.parametrize(("size", "seen"), [(1, -1), (2, 0)])
def test_ultralytics_expects_no_group_in_a_job_with_one_rank(
    size: int, seen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a LOCAL_RANK, it makes a DistributedSampler, which asks for the size of the group."""
    constants = SimpleNamespace(RANK=0, LOCAL_RANK=0)
    monkeypatch.setitem(sys.modules, ULTRALYTICS, constants)
    monkeypatch.setattr(own_groups, "after_import_in_all_processes", lambda *_: None)
    guard(parse_rank(rank_variables(0, size)), attempt="a-0")
    assert vars(constants) == {"RANK": seen, "LOCAL_RANK": seen}


class ProcessRaisedException(Exception):
    """As torch.multiprocessing has it."""


@pytest.mark.parametrize(
    ("last", "reason", "message"),
    [
        ("ddp_trainer.contract.exit_codes.UserError: no", "UserError", "no"),
        ("ValueError: a bug", "WorkerException", "ValueError: a bug"),
    ],
)
def test_the_error_of_a_spawned_process_is_the_rank_s(last: str, reason: str, message: str) -> None:
    error = ProcessRaisedException(f"\n\n-- Process 1 terminated with the following error:\nTraceback (…):\n{last}\n")
    outcome = outcome_of(error, rank=0, local_rank=0, pid=1)
    assert (outcome["reason"], outcome["message"]) == (reason, message)
