"""Which job's snapshots these are, where they lie and how often there is to be one, as the operator and torchrun set it
up (docs/contracts.md section 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.snapshots.interval import SaveInterval
from ddp_trainer.snapshots.trust.names import job_directory
from ddp_trainer.snapshots.values import Identity


@dataclass(frozen=True, slots=True)
class Settings:
    """What `Snapshots` is built with."""

    directory: Path
    every: SaveInterval
    keep: int
    identity: Identity

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """Raises UserError for a variable that is missing or no number."""
        identity = Identity(
            job=_setting(environ, "DDPJOB_NAME"),
            uid=_setting(environ, "DDPJOB_UID"),
            created=_whole(environ, "DDPJOB_CREATED"),
            attempt=_whole(environ, "DDPJOB_ATTEMPT"),
            rank=_whole(environ, "RANK", "0"),
            world_size=_whole(environ, "WORLD_SIZE", "1"),
            nodes=_whole(environ, "DDPJOB_NODES", "1"),
        )
        return cls(
            directory=job_directory(Path(_setting(environ, "DDPJOB_SHARED")), identity.job),
            every=SaveInterval.parse(_setting(environ, "DDPJOB_SNAPSHOT_EVERY", "100steps")),
            keep=_whole(environ, "DDPJOB_SNAPSHOT_KEEP", "3"),
            identity=identity,
        )


def _setting(environ: Mapping[str, str], name: str, default: str | None = None) -> str:
    value = environ.get(name, default)
    if not value:
        raise UserError(f"{name} is not set: start the script with `ddpjob run` or from a DDPJob, or set it")
    return value


def _whole(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    value = _setting(environ, name, default)
    if not value.isdecimal():
        raise UserError(f"{name} is {value!r}, not a whole number")
    return int(value)
