"""A watch that its server ends, at any time and for any reason, misses no change or says that it did."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from tests.cluster.kube import Kubectl, Object
from tests.cluster.watch import Watch, WatchExpired


def pod(name: str, version: int) -> Object:
    return {"metadata": {"name": name, "uid": f"uid of {name}", "resourceVersion": str(version)}}


EXPIRED = {"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}
BROKEN = {"type": "ERROR", "object": {"code": 500, "message": "etcd has no leader"}}


class Server(ThreadingHTTPServer):
    """Answers with the next of `lists`, the last of them ever after, and each watch with the next of `watches`; then it
    ends the watch."""

    def __init__(self, watches: list[list[Object | str]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.watches = watches
        self.lists: list[list[Object] | str] = [[pod("first", 4)]]
        self.asked_from: list[str] = []


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        if "watch" in query:
            self.server.asked_from += query["resourceVersion"]
            events = self.server.watches.pop(0) if self.server.watches else []
            body = "".join(event if isinstance(event, str) else json.dumps(event) + "\n" for event in events)
        else:
            items = self.server.lists.pop(0) if len(self.server.lists) > 1 else self.server.lists[0]
            whole = json.dumps({"metadata": {"resourceVersion": "10"}, "items": items})
            body = items if isinstance(items, str) else whole
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server([]) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def kubectl(server: Server, tmp_path: Path) -> Kubectl:
    config = {
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c"}}],
        "current-context": "c",
    }
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config"} | config))
    return Kubectl(kubeconfig)


@pytest.fixture
def watch(kubectl: Kubectl) -> Iterator[Watch]:
    watch = Watch(kubectl, "/api/v1/pods")
    yield watch
    watch.stop()


def test_a_watch_that_ends_goes_on_from_the_version_that_was_seen_last(server: Server, watch: Watch) -> None:
    server.watches += [
        [{"type": "ADDED", "object": pod("second", 11)}],
        [{"type": "BOOKMARK", "object": pod("", 15)}],
        [BROKEN],
        ['{"type": "MODIFIED", "obj'],  # the server has died
        [{"type": "DELETED", "object": pod("first", 16)}],
    ]
    events = iter(watch)
    seen = [(type_, obj["metadata"]["name"]) for type_, obj in (next(events) for _ in range(3))]
    assert seen == [("ADDED", "first"), ("ADDED", "second"), ("DELETED", "first")]
    assert server.asked_from == ["10", "11", "15", "15", "15"]


def test_a_list_that_is_cut_off_is_asked_for_again(server: Server, watch: Watch) -> None:
    server.lists.insert(0, '{"metadata": {"resource')
    assert next(iter(watch)) == ("ADDED", pod("first", 4))
    assert watch.problem


def test_a_watch_that_missed_changes_says_so(server: Server, watch: Watch) -> None:
    server.watches += [[{"type": "ADDED", "object": pod("second", 11)}], [EXPIRED]]
    with pytest.raises(WatchExpired, match="too old resource version"):
        list(watch)


def test_a_watch_that_missed_changes_can_go_on_with_what_there_is_now(server: Server, kubectl: Kubectl) -> None:
    server.lists = [[pod("first", 4), pod("second", 5)], [pod("second", 20), pod("third", 21)]]
    server.watches += [
        [{"type": "ADDED", "object": pod("fourth", 11)}],
        [EXPIRED],
        [],
        [{"type": "DELETED", "object": pod("third", 22)}],
    ]
    watch = Watch(kubectl, "/api/v1/pods", relist=True)
    events = iter(watch)
    seen = [(type_, obj["metadata"]["name"]) for type_, obj in (next(events) for _ in range(8))]
    watch.stop()
    assert seen[:3] == [("ADDED", "first"), ("ADDED", "second"), ("ADDED", "fourth")]
    assert sorted(seen[3:7]) == [
        ("ADDED", "third"),
        ("DELETED", "first"),
        ("DELETED", "fourth"),
        ("MODIFIED", "second"),
    ]
    assert seen[7] == ("DELETED", "third")
    assert server.asked_from == ["10", "11", "10", "10"]
