"""Whether a bearer token may read a path of this process: the API server says so, as for its own paths.

A TokenReview says whose token it is, and a SubjectAccessReview whether that user may get the path
(`nonResourceURLs` of a ClusterRole). Both answers are remembered for some seconds, by a digest of the token.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from ddpjob_operator.runtime.client import Client
from ddpjob_operator.runtime.errors import ApiError

logger = logging.getLogger(__name__)

TOKEN_REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"  # noqa: S105 - a path
ACCESS_REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"

ALLOWED_SECONDS = 60.0
"""Several scrapes. A token that is revoked, or a role that is removed, has effect after this time."""
REFUSED_SECONDS = 10.0
"""A role that is granted has effect after this time."""
REMEMBERED = 256
REVIEW_SECONDS = 5.0
"""Prometheus gives a scrape 10 s."""
WAITING = 16
"""Reviews at once. Any client of the port causes them, and each costs the API server two calls."""

OK, UNAUTHORIZED, FORBIDDEN, UNAVAILABLE = 200, 401, 403, 503


@dataclass(eq=False)
class Access:
    """Asks the API server about tokens, through a client of its own."""

    client: Client
    path: str
    _known: OrderedDict[bytes, tuple[int, float]] = field(default_factory=OrderedDict)
    """Status by digest, and until when it holds by the loop's clock."""
    _reviews: int = 0

    async def status(self, authorization: str) -> int:
        """The HTTP status for a request with this Authorization header: `OK`, `UNAUTHORIZED`, `FORBIDDEN`, or
        `UNAVAILABLE` where the API server does not answer or too many ask at once."""
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            return UNAUTHORIZED
        digest, now = hashlib.sha256(token.encode(errors="replace")).digest(), asyncio.get_running_loop().time()
        status, until = self._known.get(digest, (0, 0.0))
        if now < until:
            return status
        if self._reviews >= WAITING:
            return UNAVAILABLE
        self._reviews += 1
        try:
            async with asyncio.timeout(REVIEW_SECONDS):
                status = await self._review(token)
        except (ApiError, TimeoutError) as error:
            logger.warning("a request for %s cannot be authenticated: %s", self.path, error or "no answer in time")
            return UNAVAILABLE
        finally:
            self._reviews -= 1
        self._known.pop(digest, None)
        self._known[digest] = status, now + (ALLOWED_SECONDS if status == OK else REFUSED_SECONDS)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return status

    async def _review(self, token: str) -> int:
        user = await self._asked(TOKEN_REVIEWS, "authentication.k8s.io/v1", "TokenReview", {"token": token})
        if user.get("authenticated") is not True:
            return UNAUTHORIZED
        found = user.get("user") or {}
        wanted = {"nonResourceAttributes": {"path": self.path, "verb": "get"}, "user": found.get("username") or ""}
        wanted |= {name: found[name] for name in ("groups", "uid", "extra") if found.get(name)}
        access = await self._asked(ACCESS_REVIEWS, "authorization.k8s.io/v1", "SubjectAccessReview", wanted)
        return OK if access.get("allowed") is True else FORBIDDEN

    async def _asked(self, path: str, version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
        """The status of a review."""
        body = {"apiVersion": version, "kind": kind, "spec": spec}
        answer = await self.client.create(path, path.rpartition("/")[2], body)
        return answer.get("status") or {}
