"""The manifest of a snapshot: what is in it, and the checksums that prove it (docs/contracts.md section 6).

A manifest is accepted only as a whole: every field is checked, and a checksum over the manifest itself catches the
flipped bit that would turn `"samples": 6400` into 6401 and still be JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from ddp_trainer.snapshots.trust.errors import CorruptSnapshotError, IncompatibleSnapshotError
from ddp_trainer.snapshots.trust.names import MANIFEST, is_plain_file_name

VERSION = 1

Kind = Literal["periodic", "final", "preempted", "emergency"]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size and SHA-256 (hexadecimal) of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What training needs to know of a snapshot before it loads one.

    `step` counts finished optimizer steps, `epoch` whole epochs, `samples` global samples, `time` is seconds since
    the epoch. `files` is empty until the store has written and summed them.
    """

    job: str
    uid: str
    attempt: int
    step: int
    epoch: int
    samples: int
    world_size: int
    strategy: str
    global_batch: int
    time: float
    kind: Kind = "periodic"
    loss_is_finite: bool = True
    """Whether the loss of this step was, as far as it is known."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """The settings of the run, as JSON."""

    code_sha256: str | None = None
    """Digest of the submitted code that trained; None where it is in the image or on the volume."""

    files: Mapping[str, FileEntry] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(entry.bytes for entry in self.files.values())

    def with_files(self, files: Mapping[str, FileEntry]) -> Manifest:
        """The same manifest for these files."""
        return replace(self, files=dict(files))

    def to_json(self) -> bytes:
        """The bytes of manifest.json: readable by people, keys in contract order, checksum last."""
        fields: dict[str, Any] = {
            "version": VERSION,
            "job": self.job,
            "uid": self.uid,
            "attempt": self.attempt,
            "step": self.step,
            "epoch": self.epoch,
            "samples": self.samples,
            "worldSize": self.world_size,
            "strategy": self.strategy,
            "globalBatch": self.global_batch,
            "time": self.time,
            "kind": self.kind,
            "lossIsFinite": self.loss_is_finite,
            "config": self.config,
            **({"codeSha256": self.code_sha256} if self.code_sha256 is not None else {}),
            "files": {name: {"bytes": f.bytes, "sha256": f.sha256} for name, f in sorted(self.files.items())},
        }
        return (json.dumps({**fields, "checksum": _checksum(fields)}, indent=1) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Parse and check manifest.json.

        Raises CorruptSnapshotError naming the field that is wrong, and IncompatibleSnapshotError for a later format
        version.
        """
        try:
            fields = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise CorruptSnapshotError(f"{MANIFEST} is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise CorruptSnapshotError(f"{MANIFEST} is not a JSON object")
        checksum = fields.pop("checksum", None)
        if checksum != _checksum(fields):
            raise CorruptSnapshotError(f"{MANIFEST} does not match its own checksum")
        version = _integer(fields, "version")
        if version != VERSION:
            raise IncompatibleSnapshotError(
                f"its format is version {version}, this image reads version {VERSION}: "
                "use the image that wrote it, or a newer one"
            )
        return cls(
            job=_text(fields, "job"),
            uid=_text(fields, "uid"),
            attempt=_integer(fields, "attempt"),
            step=_integer(fields, "step"),
            epoch=_integer(fields, "epoch"),
            samples=_integer(fields, "samples"),
            world_size=_integer(fields, "worldSize", least=1),
            strategy=_text(fields, "strategy"),
            global_batch=_integer(fields, "globalBatch"),
            time=_number(fields, "time"),
            kind=_kind(fields),
            # older images write neither
            loss_is_finite=_boolean(fields, "lossIsFinite", default=True),
            config=_config(fields),
            code_sha256=_digest("codeSha256", fields["codeSha256"]) if "codeSha256" in fields else None,
            files=_files(fields),
        )

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """The manifest of the snapshot in `directory`. Raises as `from_json` does, and CorruptSnapshotError where
        there is none.
        """
        path = directory / MANIFEST
        try:
            if path.is_symlink():
                raise CorruptSnapshotError(f"{MANIFEST} is a symbolic link")
            return cls.from_json(path.read_bytes())
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise CorruptSnapshotError(f"{MANIFEST} is missing") from error


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """One line about a snapshot for people. `step` and `problem` are all that is certain of one that was set aside."""

    step: int
    path: Path
    time: float | None = None
    kind: str | None = None
    bytes: int | None = None
    loss_is_finite: bool = True
    problem: str | None = None


def _checksum(fields: Mapping[str, Any]) -> str:
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _wrong(name: str, value: Any, want: str) -> CorruptSnapshotError:
    return CorruptSnapshotError(f"{MANIFEST}: {name} is {value!r}, not {want}")


def _integer(fields: Mapping[str, Any], name: str, *, least: int = 0) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _wrong(name, value, f"a whole number of at least {least}")
    return value


def _number(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise _wrong(name, value, "a time in seconds")
    return float(value)


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise _wrong(name, value, "text")
    return value


def _kind(fields: Mapping[str, Any]) -> Kind:
    value = fields.get("kind")
    for kind in get_args(Kind):
        if value == kind:
            return kind  # type: ignore[no-any-return]
    raise _wrong("kind", value, "one of " + ", ".join(get_args(Kind)))


def _boolean(fields: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def _config(fields: Mapping[str, Any]) -> dict[str, Any]:
    value = fields.get("config", {})
    if not isinstance(value, dict):
        raise _wrong("config", value, "an object")
    return value


def _files(fields: Mapping[str, Any]) -> dict[str, FileEntry]:
    value = fields.get("files")
    if not isinstance(value, dict) or not value:
        raise _wrong("files", value, "an object with at least one file")
    entries = {}
    for name, entry in value.items():
        if not is_plain_file_name(name) or name == MANIFEST:
            raise _wrong("files", name, "a file below the snapshot")
        if not isinstance(entry, dict):
            raise _wrong(f"files[{name!r}]", entry, "an object")
        entries[name] = FileEntry(_integer(entry, "bytes"), _digest(f"files[{name!r}].sha256", entry.get("sha256")))
    return entries


def _digest(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) != 64 or set(value) - set("0123456789abcdef"):
        raise _wrong(name, value, "64 hexadecimal digits")
    return value
