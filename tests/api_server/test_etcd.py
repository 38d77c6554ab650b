"""etcd's history is what the API server announced, and a record that lacks a change of it is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.api_server.harness import Cluster
from tests.api_server.history import Change, recorded
from tests.support.etcd import Etcd

from ddpjob_operator.cluster import paths


@pytest.fixture
async def changes(cluster: Cluster) -> list[Change]:
    """A job and a pod: created, changed and deleted, as a watch saw it. With a token of its service account, the pod
    would be refused until there is one.
    """
    pod = {
        "metadata": {"name": "some", "labels": {"training.ddpjob.io/uid": "u", "empty": ""}},
        "spec": {
            "schedulerName": "none",
            "automountServiceAccountToken": False,
            "containers": [{"name": "c", "image": "i"}],
        },
    }
    places = {"ddpjobs": (paths.jobs(cluster.namespace), "digits"), "pods": (paths.pods(cluster.namespace), "some")}
    async with recorded(cluster) as history:
        await cluster.apply_job()
        await cluster.client.create(places["pods"][0], "pods", pod)
        for kind, (path, name) in places.items():
            await cluster.client.merge_patch(f"{path}/{name}", kind, {"metadata": {"labels": {"new": "label"}}})
            await cluster.client.merge_patch(f"{path}/{name}/status", kind, {"status": {"phase": "Running"}})
            await cluster.client.delete(f"{path}/{name}?gracePeriodSeconds=0", kind)
        await cluster.apply_job("last")
        await cluster.client.create(places["pods"][0], "pods", pod | {"metadata": {"name": "last"}})
    return history.changes


@pytest.fixture
def etcd(cluster: Cluster) -> Etcd:
    found = Etcd.beside(cluster.kubeconfig)
    if found is None:
        pytest.skip("the cluster was there already: its etcd cannot be read")
    return found


def test_etcd_has_what_the_api_server_announced(cluster: Cluster, etcd: Etcd, changes: list[Change]) -> None:
    for kind in ("ddpjobs", "pods"):
        ours = [change for change in changes if change.kind == kind]
        stored = etcd.changes(kind, cluster.namespace, int(ours[-1].object["metadata"]["resourceVersion"]))
        assert [one.type for one in stored] == [change.type for change in ours]
        assert {"ADDED", "MODIFIED", "DELETED"} == {one.type for one in stored}
        for one, change in zip(stored, ours, strict=True):
            said = change.object["metadata"]
            assert one.object["metadata"].get("labels", {}) == said.get("labels", {})
            assert one.object["metadata"]["name"] == said["name"]
            assert one.object["status"]["phase"] == change.object["status"]["phase"] if kind == "pods" else True


class Interrupted(Etcd):
    """Ends each watch after one event, as where etcd has no leader for a moment."""

    def _watch(self, prefix: str, since: int) -> Iterator[dict[str, Any]]:
        for answer in super()._watch(prefix, since):
            events = answer["result"].get("events", [])
            yield {"result": {"events": events[:1]}}
            if events:
                yield {"error": {"message": "etcdserver: no leader"}}
                return


def test_a_watch_that_etcd_ends_goes_on_where_it_ended(
    cluster: Cluster, etcd: Etcd, changes: list[Change], monkeypatch: pytest.MonkeyPatch
) -> None:
    until = max(int(change.object["metadata"]["resourceVersion"]) for change in changes if change.kind == "ddpjobs")
    interrupted = Interrupted(etcd.port).changes("ddpjobs", cluster.namespace, until)
    assert interrupted == etcd.changes("ddpjobs", cluster.namespace, until)
    monkeypatch.setattr("tests.support.etcd.WATCHES", 2)
    with pytest.raises(AssertionError, match="no leader"):
        Interrupted(etcd.port).changes("ddpjobs", cluster.namespace, until)


async def test_a_change_that_a_record_lacks_is_noticed(cluster: Cluster, etcd: Etcd, changes: list[Change]) -> None:
    record = [(change.kind, change.object) for change in changes]
    assert etcd.differences(cluster.namespace, record) == []
    for number, (kind, obj) in enumerate(record):
        if obj["metadata"]["name"] == "last":  # up to which the two are compared
            continue
        missing = (kind, obj["metadata"]["uid"], int(obj["metadata"]["resourceVersion"]))
        rest = record[:number] + record[number + 1 :]
        assert etcd.differences(cluster.namespace, rest) == [f"only etcd has {missing}"]
    made_up = (kind, obj | {"metadata": obj["metadata"] | {"uid": "of nothing"}})
    (wrong,) = etcd.differences(cluster.namespace, [*record, made_up])
    assert wrong.startswith("etcd lacks")
