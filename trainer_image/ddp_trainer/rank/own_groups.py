"""Process groups of a script that numbers its ranks itself, as for `torch.multiprocessing.spawn`.

Such a script names an address in MASTER_ADDR and MASTER_PORT, or in `tcp://`, and expects its rank 0 to host the store
there. Under torchrun no rank hosts a store, and `init_process_group` would wait half an hour for one. So each group is
compared with what torchrun has said:

- The script asks for the rank that torchrun gave, at another address: torchrun's address is used.
- It asks for other ranks in a job with one rank, mostly in processes that it started: its rank 0 hosts the store, as
  under plain python. Where the script takes the port from the environment, it is at another one than torchrun's.
- It asks for other ranks in a job with more ranks: refused, since each rank of the job would train on its own.
- The ranks recover live: refused, since `attach_live` makes their groups.

A group with a store of its own is left alone, and so is `tcp://` with torchrun's address.

A group may also meet in a file, `file://`. The file of ranks that were killed stays, with their addresses, and every
later attempt would connect to those. So the group of all ranks meets where torchrun says, and others in a file that
their attempt alone has.

Ultralytics makes a group for several GPUs only, and most releases take it that there is one wherever LOCAL_RANK is set,
which torchrun sets for a single rank too. So in a job with one rank it is as under plain python, and as in the newest
releases, which look at WORLD_SIZE as well.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from urllib.parse import parse_qs, urlparse, urlunparse

from ddp_trainer.contract.environment import RankEnvironment, parse_rank, rank_variables
from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.contract.standard_error import say
from ddp_trainer.rank.after_import import after_import, after_import_in_all_processes
from ddp_trainer.rank.live_scripts import NEEDED

RENDEZVOUS: Final = "torch.distributed.rendezvous"
ULTRALYTICS: Final = "ultralytics.utils"
_TORCHRUN_HOSTS: Final = "TORCHELASTIC_USE_AGENT_STORE"
_refusals: Final[list[Any]] = []
"""Hooks of torch."""


@dataclass(frozen=True)
class Place:
    """What torchrun has said to a rank: its number, that of all, and the address of the store."""

    rank: int
    size: int
    address: tuple[str, str]
    pid: int
    attempt: str = ""
    """A name that no other attempt has, of this job or of another one."""

    own_port: str = ""
    """For the store of ranks that the only rank of a job starts, where they have no port but torchrun's."""

    is_live: bool = False
    """Whether ranks recover live: torchrun then knows those of one pod, and a script makes no group."""


def address(environ: Mapping[str, str]) -> tuple[str, str]:
    """Host and port of the store that these variables name."""
    return environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")


def address_in(url: str) -> tuple[str, str]:
    """Host and port of `tcp://`."""
    parts = urlparse(url)
    return parts.hostname or "", str(parts.port or "")


def at_address(url: str, place: tuple[str, str]) -> str:
    """The same `tcp://` with another host and port."""
    host, port = place
    return urlunparse(urlparse(url)._replace(netloc=f"[{host}]:{port}" if ":" in host else f"{host}:{port}"))


def in_file_of(attempt: str, url: str) -> str:
    """The same `file://` with a file that no other attempt has."""
    parts = urlparse(url)
    return urlunparse(parts._replace(path=f"{parts.path}.{attempt}"))


def guard(own: RankEnvironment, *, attempt: str, is_live: bool = False) -> None:
    """Compare the groups of the script that this rank is about to run, and of all processes that it starts."""
    own_port = _free_port() if own.world_size == 1 else ""
    place = Place(own.rank, own.world_size, address(os.environ), os.getpid(), attempt, own_port, is_live)
    after_import_in_all_processes(RENDEZVOUS, partial(_install, place))
    if own.world_size == 1:
        after_import(ULTRALYTICS, _train_without_group)


def variables_of_group(place: Place, rank: int, size: int, asked: tuple[str, str], *, in_rank: bool) -> dict[str, str]:
    """What to set for a group that is asked for at the address `asked`, in the rank or in a process that it started.

    Raises UserError for one that cannot be meant.
    """
    if (rank, size) == (place.rank, place.size) and (in_rank or asked == place.address):
        return _torchruns(place)
    if place.size == 1:
        # all ranks are on one machine, where torchrun listens at its port, whatever name the script has for that
        is_taken = asked[1] == place.address[1]
        at_own_port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": place.own_port} if is_taken else {}
        return rank_variables(rank, size) | {_TORCHRUN_HOSTS: "False"} | at_own_port
    raise UserError(
        f"the script makes a process group as rank {rank} of {size} at {':'.join(asked)}, and the job has started it "
        f"as rank {place.rank} of {place.size} at {':'.join(place.address)}. Leave out mp.spawn, call the function of "
        "a rank once, and init_process_group() without rank and world_size; or set nodes: 1 and procsPerNode: 1, and "
        "the script starts its ranks itself"
    )


def _free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def _train_without_group() -> None:
    """What Ultralytics reads the variables into, before its other modules take it from there."""
    constants: Any = sys.modules[ULTRALYTICS]
    constants.RANK = constants.LOCAL_RANK = -1


def _install(place: Place) -> None:
    """Answer for `env://`, `tcp://` and `file://`, before torch does; once in a process."""
    handlers = sys.modules[RENDEZVOUS]._rendezvous_handlers
    torchs_env, torchs_tcp, torchs_file = handlers["env"], handlers["tcp"], handlers["file"]
    if getattr(torchs_env, "guards", False):
        return

    def env_rendezvous(url: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        if place.is_live:
            raise UserError(NEEDED)
        if _torchrun_hosts():
            query = parse_qs(urlparse(url).query)
            own = parse_rank(os.environ)
            rank = int(query["rank"][0]) if "rank" in query else own.rank
            size = int(query["world_size"][0]) if "world_size" in query else own.world_size
            _meet(place, rank, size, address(os.environ))
        yield from torchs_env(url, *args, **kwargs)

    def tcp_rendezvous(url: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        if place.is_live:
            raise UserError(NEEDED)
        query, asked = parse_qs(urlparse(url).query), address_in(url)
        if _torchrun_hosts() and asked != place.address and {"rank", "world_size"} <= query.keys():
            _meet(place, int(query["rank"][0]), int(query["world_size"][0]), asked)
            if _torchrun_hosts() or asked[1] == place.address[1]:
                url = at_address(url, address(os.environ))
        yield from torchs_tcp(url, *args, **kwargs)

    def file_rendezvous(url: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        if place.is_live:
            raise UserError(NEEDED)
        parts, own = urlparse(url), {"rank": [str(place.rank)], "world_size": [str(place.size)]}
        if _torchrun_hosts() and os.getpid() == place.pid and parse_qs(parts.query) == own:
            os.environ.update(_torchruns(place))
            _say_where(place, f"in {parts.path}")
            yield from torchs_env(f"env://?{parts.query}", *args, **kwargs)
        else:
            yield from torchs_file(in_file_of(place.attempt, url) if parts.path else url, *args, **kwargs)

    env_rendezvous.guards = True  # type: ignore[attr-defined]
    handlers.update(env=env_rendezvous, tcp=tcp_rendezvous, file=file_rendezvous)


def _torchrun_hosts() -> bool:
    """Whether torch takes it that no rank has to host the store."""
    return os.environ.get(_TORCHRUN_HOSTS) == "True"


def _meet(place: Place, rank: int, size: int, asked: tuple[str, str]) -> None:
    """Set the variables of a group that is asked for at the address `asked`."""
    try:
        variables = variables_of_group(place, rank, size, asked, in_rank=os.getpid() == place.pid)
    except UserError as error:
        _refuse_steps(str(error))
        raise
    os.environ.update(variables)
    if _torchrun_hosts() and asked != place.address:
        _say_where(place, f"at {':'.join(asked)}")


def _refuse_steps(why: str) -> None:
    """Also the first step of a script that takes any error for a machine with one process, as V-JEPA's does: each rank
    would train for itself, and the job would succeed.
    """

    def refuse(*_: object) -> None:
        if not sys.modules["torch.distributed"].is_initialized():
            raise UserError(why)

    _refusals.append(sys.modules["torch.optim.optimizer"].register_optimizer_step_pre_hook(refuse))


def _torchruns(place: Place) -> dict[str, str]:
    return {"MASTER_ADDR": place.address[0], "MASTER_PORT": place.address[1]}


def _say_where(place: Place, asked: str) -> None:
    say(
        f"ddp_trainer: the ranks meet at {':'.join(place.address)}, where torchrun says, and not {asked}, which the "
        "script has set"
    )
