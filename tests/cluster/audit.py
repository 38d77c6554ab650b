"""What the API server's audit log says about who asked it for what.

Only a control plane that runs on this machine shows its log: the one that cluster.sh builds keeps it beside the
kubeconfig.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

FORBID = "forbid"


@dataclass(frozen=True, slots=True)
class Permission:
    """One thing that a role allows. `resource` names the subresource too, as in pods/log."""

    group: str
    resource: str
    verb: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}.{self.group}".rstrip(".")


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `code` is 0 for a watch that has not been answered yet."""

    time: datetime
    user: str
    permission: Permission
    namespace: str
    name: str
    code: int
    decision: str


def audit_log(kubeconfig: Path) -> list[Path]:
    """The files of the audit log, oldest first; empty where there is none to read."""
    return sorted(kubeconfig.parent.glob("audit*.log"), key=lambda file: file.stat().st_mtime)


def requests(files: list[Path], user: str, since: datetime) -> Iterator[Request]:
    """All requests of one user about Kubernetes objects since a moment."""
    seen = set()  # a long answer is logged when it begins and when it ends
    for file in files:
        with file.open() as lines:
            for line in lines:
                if user not in line:
                    continue
                event = json.loads(line)
                if event["stage"] == "RequestReceived":
                    continue
                request = _parse(event)
                if request is None or request.user != user or request.time < since or event["auditID"] in seen:
                    continue
                seen.add(event["auditID"])
                yield request


def _parse(event: dict[str, Any]) -> Request | None:
    target = event.get("objectRef")
    if target is None:
        return None  # /healthz, discovery
    resource = target.get("resource", "")
    if target.get("subresource"):
        resource = f"{resource}/{target['subresource']}"
    return Request(
        time=datetime.fromisoformat(event["requestReceivedTimestamp"]),
        user=event["user"]["username"],
        permission=Permission(target.get("apiGroup", ""), resource, event["verb"]),
        namespace=target.get("namespace", ""),
        name=target.get("name", ""),
        code=(event.get("responseStatus") or {}).get("code", 0),
        decision=event.get("annotations", {}).get("authorization.k8s.io/decision", ""),
    )


def granted(roles: list[dict[str, Any]]) -> set[Permission]:
    """All that the rules of these Roles and ClusterRoles allow, one by one."""
    return {
        Permission(group, resource, verb)
        for role in roles
        for rule in role.get("rules") or ()
        for group in rule.get("apiGroups") or ()
        for resource in rule.get("resources") or ()
        for verb in rule["verbs"]
    }
