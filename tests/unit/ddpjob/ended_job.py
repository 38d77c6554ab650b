"""An API server with a job that has ended, for what is read from its volume."""

from __future__ import annotations

import threading
from typing import Any

from aiohttp import web
from tests.unit.answers import Server, ok

PREFIX = "/api/v1/namespaces/default"
READ = ["[rank 0] step 1", "[rank 1] step 1"]


class Api:
    """An API server with a job that has ended, its claim, and a kubelet that runs the pod that reads the volume."""

    def __init__(self, server: Server, phase: str = "Succeeded") -> None:
        metadata = {"name": "train", "namespace": "default", "uid": "u", "creationTimestamp": "2030-01-01T00:00:00Z"}
        self.job: dict[str, Any] | None = {"metadata": metadata, "spec": {"nodes": 2}, "status": {"phase": phase}}
        annotations = {"training.ddpjob.io/trainer-image": "trainer:1"}
        self.claims = {"train-shared": annotations, "mine": {}}
        self.log, self.code, self.gone = READ, 0, threading.Event()
        self.readers: dict[str, dict[str, Any]] = {}
        self.commands: list[list[str]] = []
        server.answers = [self.answer]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path, name = request.path, request.path.rpartition("/")[2]
        if request.method == "POST":
            body = await request.json()
            self.readers[body["metadata"]["name"]] = body
            self.commands.append(body["spec"]["containers"][0]["args"])
            return ok(body)
        if request.method == "DELETE":
            del self.readers[name]
            self.gone.set()
            return ok({})
        if path.endswith("/log"):
            return web.Response(text="".join(f"2030-01-01T00:00:0{n}Z {line}\n" for n, line in enumerate(self.log)))
        found: dict[str, Any] | None = None
        if "/ddpjobs/" in path:
            found = self.job
        elif "/persistentvolumeclaims/" in path and name in self.claims:
            found = {"metadata": {"name": name, "namespace": "default", "uid": "c", "annotations": self.claims[name]}}
        elif name in self.readers:
            role = self.readers[name]["spec"]["containers"][0]["name"]
            ended = {"name": role, "state": {"terminated": {"exitCode": self.code}}}
            found = self.readers[name] | {"status": {"phase": "Succeeded", "containerStatuses": [ended]}}
        elif path == f"{PREFIX}/pods" or path.endswith("/ddpjobs"):
            found = {"metadata": {"resourceVersion": "1"}, "items": []}
        missing = {"kind": "Status", "reason": "NotFound", "message": f"{name} not found"}
        return web.json_response(missing, status=404) if found is None else ok(found)
