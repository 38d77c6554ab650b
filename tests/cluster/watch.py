"""A watch that goes on: API servers end every watch sooner or later, and a slow reader's at any time.

A new one begins at the version that was seen last, as informers do it, so that no change is missed.
"""

from __future__ import annotations

import json
import subprocess
import threading
import urllib.parse
from collections.abc import Iterator

from tests.cluster.kube import Kubectl, KubectlFailed, Object

GONE = 410
RETRY_SECONDS = 0.2


class WatchExpired(Exception):
    """The API server no longer has the changes since the version that was seen last; the message is its own."""


class Watch:
    """All objects under one API path, and then their changes, until `stop`.

    To be iterated by one thread; `stop` may be called by any. `problem` is why the last request ended, if it failed.
    """

    def __init__(self, kubectl: Kubectl, path: str, *, relist: bool = False, **query: str) -> None:
        """`relist`: where changes were missed, go on with what there is now. An API server that was started anew lacks
        all changes before its start."""
        self.problem = ""
        self.listed = threading.Event()
        """That what there was at the beginning has been read: all changes since then are."""
        self._relist = relist
        self._kubectl = kubectl
        self._path = path
        self._query = query
        self._stopped = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._starting = threading.Lock()

    def __iter__(self) -> Iterator[tuple[str, Object]]:
        """Pairs of ADDED, MODIFIED or DELETED and the object.

        Raises WatchExpired where changes were missed.
        """
        known: dict[str, Object] = {}
        while not self._stopped.is_set():
            listed = self._list()
            items = {item["metadata"].get("uid", item["metadata"]["name"]): item for item in listed["items"]}
            yield from (("DELETED", known[uid]) for uid in known.keys() - items.keys())
            yield from (("MODIFIED" if uid in known else "ADDED", item) for uid, item in items.items())
            known = items
            self.listed.set()
            try:
                yield from self._changes(listed["metadata"]["resourceVersion"], known)
            except WatchExpired:
                if not self._relist:
                    raise

    def _changes(self, version: str, known: dict[str, Object]) -> Iterator[tuple[str, Object]]:
        while not self._stopped.is_set():
            for line in self._lines(version):
                try:
                    event = json.loads(line)
                except ValueError:  # the API server died within it
                    break
                if event["type"] == "ERROR":
                    self.problem = event["object"].get("message", line)
                    if event["object"].get("code") == GONE:
                        raise WatchExpired(self.problem)
                    break
                version = event["object"]["metadata"]["resourceVersion"]
                if event["type"] == "BOOKMARK":
                    continue
                if self._relist:
                    uid = event["object"]["metadata"]["uid"]
                    known.pop(uid, None)
                    if event["type"] != "DELETED":
                        known[uid] = event["object"]
                yield event["type"], event["object"]
            if "too old resource version" in self.problem:  # the request itself was refused, with 410
                raise WatchExpired(self.problem)
            self._stopped.wait(RETRY_SECONDS)

    def stop(self) -> None:
        """End the iteration."""
        with self._starting:
            self._stopped.set()
            if self._process is not None:
                self._process.terminate()

    def _list(self) -> Object:
        while True:
            try:
                listed: Object = self._kubectl.raw(self._url())
                return listed
            except (KubectlFailed, subprocess.TimeoutExpired, ValueError) as failed:  # half an answer is no JSON
                self.problem = str(failed)
            if self._stopped.wait(RETRY_SECONDS):
                return {"metadata": {"resourceVersion": ""}, "items": []}

    def _lines(self, version: str) -> Iterator[str]:
        command = self._kubectl.command(
            "get", "--raw", self._url(watch="true", allowWatchBookmarks="true", resourceVersion=version)
        )
        with self._starting:
            if self._stopped.is_set():
                return
            # of its own session: a Ctrl-C in the terminal is for pytest alone
            self._process = process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=self._kubectl.environment(),
                start_new_session=True,
            )
        with process:
            assert process.stdout is not None
            assert process.stderr is not None
            try:
                yield from process.stdout
                self.problem = process.stderr.read().strip()
            finally:
                process.terminate()

    def _url(self, **more: str) -> str:
        query = urllib.parse.urlencode(self._query | more)
        return f"{self._path}?{query}" if query else self._path
