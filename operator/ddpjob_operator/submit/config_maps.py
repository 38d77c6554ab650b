"""The ConfigMaps that carry packed code into a cluster.

Each is immutable and named by the digest of its content: jobs with the same code share it, and what is there is not
sent again. Its owners are the jobs that use it, so the garbage collector deletes it with the last of them.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable

from ddpjob_operator.api import API_VERSION, KIND
from ddpjob_operator.core.manifests.code import KEY
from ddpjob_operator.core.values.job import Manifest
from ddpjob_operator.core.values.names import DOMAIN
from ddpjob_operator.runtime.client import Client, Json
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.paths import collection
from ddpjob_operator.submit.pack import name_of

LABELS = {f"{DOMAIN}/code": "true", "app.kubernetes.io/managed-by": "ddpjob"}
_RESOURCE = "configmaps"


def config_map(part: bytes) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name_of(part), "labels": LABELS},
        "immutable": True,
        "binaryData": {KEY: b64encode(part).decode()},
    }


async def send(client: Client, namespace: str, parts: Iterable[bytes]) -> int:
    """Create those that are not there. The bytes that were sent.

    Raises:
        ApiError: the server refused one.
    """
    sent = 0
    for part in parts:
        if not await _exists(client, namespace, name_of(part)):
            await _create(client, namespace, config_map(part))
            sent += len(part)
    return sent


async def keep_with(client: Client, namespace: str, job: Json, parts: Iterable[bytes]) -> None:
    """Make a job one of their owners. One that was collected since it was sent is created again.

    Raises:
        ApiError: the server refused.
    """
    owner = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": job["metadata"]["name"],
        "uid": job["metadata"]["uid"],
    }
    for part in parts:
        path = f"{_collection(namespace)}/{name_of(part)}"
        try:
            # owners are merged by uid, so two jobs at the same time do not remove each other
            await client.strategic_merge_patch(path, _RESOURCE, {"metadata": {"ownerReferences": [owner]}})
        except ApiError as error:
            if not error.not_found:
                raise
            manifest = config_map(part)
            manifest["metadata"] = {**manifest["metadata"], "ownerReferences": [owner]}
            await _create(client, namespace, manifest)


async def release(client: Client, namespace: str, uid: str, names: Iterable[str]) -> None:
    """Take a job that is about to be deleted from their owners. The garbage collector may otherwise delete one that has
    just got a new owner: it reads the owners, and then deletes with the uid as the only precondition (seen on 1.20).

    Raises:
        ApiError: the server refused.
    """
    body = {"metadata": {"ownerReferences": [{"$patch": "delete", "uid": uid}]}}
    for name in names:
        try:
            await client.strategic_merge_patch(f"{_collection(namespace)}/{name}", _RESOURCE, body)
        except ApiError as error:
            if not error.not_found:
                raise


async def fetch(client: Client, namespace: str, names: Iterable[str]) -> list[bytes]:
    """Their contents, in this order.

    Raises:
        ApiError: one is not there, or has no packed code.
    """
    parts = []
    for name in names:
        found = await client.get(f"{_collection(namespace)}/{name}", _RESOURCE)
        packed = (found.get("binaryData") or {}).get(KEY)
        if packed is None:
            raise ApiError(0, "NotCode", f"the ConfigMap {name} has no key {KEY} in its binaryData")
        parts.append(b64decode(packed))
    return parts


async def _exists(client: Client, namespace: str, name: str) -> bool:
    try:
        found = await client.get_metadata(f"{_collection(namespace)}/{name}", _RESOURCE)
    except ApiError as error:
        if error.not_found:
            return False
        raise
    return "deletionTimestamp" not in found["metadata"]


async def _create(client: Client, namespace: str, manifest: Manifest) -> None:
    try:
        await client.create(_collection(namespace), _RESOURCE, manifest)
    except ApiError as error:
        if not error.already_exists:
            raise


def _collection(namespace: str) -> str:
    return collection("v1", _RESOURCE, namespace)
