"""A manifest is believed whole or not at all."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ddp_trainer.snapshots.trust.errors import CorruptSnapshotError, IncompatibleSnapshotError
from ddp_trainer.snapshots.trust.manifest import FileEntry, Manifest, _checksum

MANIFEST = Manifest(
    job="digits",
    uid="0b0c",
    attempt=0,
    step=100,
    epoch=2,
    samples=6400,
    world_size=2,
    strategy="ddp",
    global_batch=64,
    time=1763703999.0,
    files={"model.safetensors": FileEntry(12345, "a" * 64)},
)


def changed(**fields: Any) -> bytes:
    """A manifest with other fields whose own checksum is right."""
    value = json.loads(MANIFEST.to_json()) | fields
    value.pop("checksum")
    return json.dumps({**value, "checksum": _checksum(value)}).encode()


def test_what_is_written_is_what_is_read() -> None:
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST


def test_the_fields_are_those_of_the_contract() -> None:
    value = json.loads(MANIFEST.to_json())
    value.pop("checksum")
    assert value == {
        "version": 1, "job": "digits", "uid": "0b0c", "attempt": 0, "step": 100, "epoch": 2, "samples": 6400,
        "worldSize": 2, "strategy": "ddp", "globalBatch": 64, "time": 1763703999.0, "kind": "periodic",
            "lossIsFinite": True, "config": {},
        "files": {"model.safetensors": {"bytes": 12345, "sha256": "a" * 64}},
    }  # fmt: skip


def test_the_digest_of_submitted_code_is_in_it_and_may_be_absent() -> None:
    with_code = replace(MANIFEST, code_sha256="b" * 64)
    assert json.loads(with_code.to_json())["codeSha256"] == "b" * 64
    assert Manifest.from_json(with_code.to_json()) == with_code
    with pytest.raises(CorruptSnapshotError, match="codeSha256"):
        Manifest.from_json(changed(codeSha256="no digest"))


def test_no_flipped_bit_goes_unseen() -> None:
    data = MANIFEST.to_json()
    believed = []
    for position in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        try:
            if Manifest.from_json(bytes(flipped)) != MANIFEST:
                believed.append(position)
        except (CorruptSnapshotError, IncompatibleSnapshotError):
            continue
    assert believed == []


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"{}", b"[" * 100_000, MANIFEST.to_json()[:-40]]
)
def test_garbage_is_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptSnapshotError):
        Manifest.from_json(data)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"step": -1}, "step"),
        ({"step": 1.5}, "step"),
        ({"step": True}, "step"),
        ({"worldSize": 0}, "worldSize"),
        ({"time": "now"}, "time"),
        ({"kind": "other"}, "kind"),
        ({"job": None}, "job"),
        ({"files": {}}, "files"),
        ({"files": {"a": 1}}, "files"),
        ({"files": {"a": {"bytes": -1, "sha256": "a" * 64}}}, "bytes"),
        ({"files": {"a": {"bytes": 1, "sha256": "g" * 64}}}, "sha256"),
        ({"files": {"../a": {"bytes": 1, "sha256": "a" * 64}}}, "files"),
        ({"files": {"/etc/passwd": {"bytes": 1, "sha256": "a" * 64}}}, "files"),
        ({"files": {"manifest.json": {"bytes": 1, "sha256": "a" * 64}}}, "files"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(CorruptSnapshotError, match=named):
        Manifest.from_json(changed(**fields))


@pytest.mark.fault(38)
def test_a_later_format_is_refused_by_name_and_not_called_corrupt() -> None:
    with pytest.raises(
        IncompatibleSnapshotError, match=r"version 2, this image reads version 1: use the image that wrote it"
    ):
        Manifest.from_json(changed(version=2))


def test_a_field_that_a_later_image_adds_is_no_reason_to_refuse() -> None:
    assert replace(Manifest.from_json(changed(note="new"))) == MANIFEST
