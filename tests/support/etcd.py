"""The history of Kubernetes objects as etcd has it, which no watch of the API can have missed.

The clusters that cluster.sh makes never compact etcd, so every version of every object is there. Custom resources are
stored as JSON; pods are stored as protobuf, and only what identifies a pod is read of them.
"""

from __future__ import annotations

import base64
import http.client
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

PREFIXES = {"ddpjobs": "/registry/training.ddpjob.io/ddpjobs", "pods": "/registry/pods"}
PROTOBUF = b"k8s\0"
"""What begins a stored protobuf message: k8s.io/apimachinery/pkg/runtime/serializer/protobuf."""
READ_SECONDS = 60
RETRY_SECONDS = 0.5
WATCHES = 10
"""How many may end before the end of what is asked for."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One version of an object. `type` is ADDED, MODIFIED or DELETED, as a watch of the API calls it."""

    kind: str
    type: str
    revision: int
    object: dict[str, Any]

    @property
    def key(self) -> tuple[str, str, int]:
        """What tells it from every other change: kind, uid and revision."""
        return key_of(self.kind, self.object)


def key_of(kind: str, obj: dict[str, Any]) -> tuple[str, str, int]:
    """Kind, uid and revision of a version of an object. The last version of one that was deleted has that revision."""
    return kind, obj["metadata"]["uid"], int(obj["metadata"]["resourceVersion"])


@dataclass(frozen=True, slots=True)
class Etcd:
    """That of one cluster, which listens on 127.0.0.1."""

    port: int

    @classmethod
    def beside(cls, kubeconfig: Path) -> Etcd | None:
        """That of the cluster with this kubeconfig; None where cluster.sh has not made it on this host."""
        if not (kubeconfig.parent / "run" / "etcd.pid").exists():
            return None
        (cluster,) = yaml.safe_load(kubeconfig.read_text())["clusters"]
        api_port = urlsplit(cluster["cluster"]["server"]).port
        assert api_port is not None
        return cls(api_port + 1)  # tests/cluster/lib/settings.sh

    def changes(self, kind: str, namespace: str, until: int, since: int = 1) -> list[Stored]:
        """All changes of a namespace's objects from one revision to another; `until` is one of them."""
        return list(_decoded(kind, self._events(f"{PREFIXES[kind]}/{namespace}", since, until)))

    def differences(self, namespace: str, record: Iterable[tuple[str, dict[str, Any]]], since: int = 1) -> list[str]:
        """How a record (kind, object) of a namespace's changes since a revision differs from etcd's, up to its end."""
        recorded = {key_of(kind, obj) for kind, obj in record}
        wrong = []
        for kind in PREFIXES:
            ours = {key for key in recorded if key[0] == kind}
            until = max((revision for *_, revision in ours), default=0)
            stored = {change.key for change in self.changes(kind, namespace, until, since)} if ours else set()
            wrong += [f"only etcd has {key}" for key in sorted(stored - ours)]
            wrong += [f"etcd lacks {key}" for key in sorted(ours - stored)]
        return wrong

    def _events(self, prefix: str, since: int, until: int) -> Iterator[dict[str, Any]]:
        """Events of the keys under a prefix. etcd may end a watch at any time; the next one begins where it ended."""
        ended: list[Any] = []
        while len(ended) < WATCHES:
            for answer in self._watch(prefix, since):
                result = answer.get("result", {"canceled": True})
                for event in result.get("events", ()):
                    revision = int(event["kv"]["mod_revision"])
                    if revision <= until:
                        yield event
                    if revision >= until:
                        return
                    since = revision + 1  # Kubernetes changes one key in a revision
                if result.get("canceled"):
                    ended.append(answer)
                    break
            else:
                ended.append("closed")
            time.sleep(RETRY_SECONDS)
        raise AssertionError(f"etcd ended the history of {prefix} before revision {until}: {ended}")

    def _watch(self, prefix: str, since: int) -> Iterator[dict[str, Any]]:
        """Answers of etcd's API, rpc Watch, as its gateway has them in JSON: `result`, or at the end `error`."""
        request = {"key": _base64(prefix + "/"), "range_end": _base64(prefix + "0"), "start_revision": str(since),
                   "prev_kv": True, "fragment": True}  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=READ_SECONDS)
        try:
            connection.request("POST", "/v3/watch", json.dumps({"create_request": request}))
            for line in connection.getresponse():
                yield json.loads(line)
        finally:
            connection.close()


def _decoded(kind: str, events: Iterator[dict[str, Any]]) -> Iterator[Stored]:
    for event in events:
        kv = event["kv"]
        deleted = event.get("type") == "DELETE"
        obj = decode(base64.b64decode(event["prev_kv"]["value"] if deleted else kv["value"]))
        type_ = "DELETED" if deleted else "ADDED" if kv["create_revision"] == kv["mod_revision"] else "MODIFIED"
        obj["metadata"]["resourceVersion"] = kv["mod_revision"]
        yield Stored(kind, type_, int(kv["mod_revision"]), obj)


def decode(value: bytes) -> dict[str, Any]:
    """A stored object; of a pod only name, namespace, uid and labels, and its phase."""
    if not value.startswith(PROTOBUF):
        obj: dict[str, Any] = json.loads(value)
        return obj
    unknown = _fields(value.removeprefix(PROTOBUF))
    pod = _fields(unknown[2][0])
    # numbers of the fields: k8s.io/api/core/v1/generated.proto and apimachinery/pkg/apis/meta/v1/generated.proto
    meta, status = _fields(pod[1][0]), _fields(pod.get(3, [b""])[0])
    entries = [_fields(entry) for entry in meta.get(11, ())]
    labels = {entry[1][0].decode(): entry.get(2, [b""])[0].decode() for entry in entries}
    name, namespace, uid = (meta[number][0].decode() for number in (1, 3, 5))
    phase = status.get(1, [b""])[0].decode()
    return {
        "metadata": {"name": name, "namespace": namespace, "uid": uid, "labels": labels},
        "status": {"phase": phase},
    }


def _fields(message: bytes) -> dict[int, list[bytes]]:
    """The length-delimited fields of a protobuf message by number (https://protobuf.dev/programming-guides/encoding)."""
    found: dict[int, list[bytes]] = {}
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        match tag & 7:
            case 0:
                _, at = _varint(message, at)
            case 1:
                at += 8
            case 2:
                length, at = _varint(message, at)
                found.setdefault(tag >> 3, []).append(message[at : at + length])
                at += length
            case 5:
                at += 4
            case wire:
                raise ValueError(f"wire type {wire} at byte {at}")
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
        if not byte & 0x80:
            return value, at


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
