"""Events as the API server sends them, in either of their two forms: core/v1 with a count, or with a series."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from ddpjob_operator.wire.objects import Object, parse_time


@dataclass(frozen=True, slots=True)
class EventView:
    """One Event: what happened, to which object, how often, and when last."""

    uid: str
    name: str
    time: datetime
    type: str
    """Normal or Warning."""
    reason: str
    message: str
    count: int
    kind: str
    """Kind of the object, such as Pod."""
    about: str
    """Name of the object, such as digits-0-1."""
    about_uid: str

    @property
    def is_warning(self) -> bool:
        return self.type == "Warning"


def parse_event(obj: Object) -> EventView | None:
    """An Event; None if it has no time."""
    metadata, about, series = obj["metadata"], obj.get("involvedObject") or {}, obj.get("series") or {}
    time = parse_time(
        obj.get("lastTimestamp")
        or series.get("lastObservedTime")
        or obj.get("eventTime")
        or obj.get("firstTimestamp")
        or metadata.get("creationTimestamp")
    )
    if time is None:
        return None
    return EventView(
        uid=metadata["uid"],
        name=metadata["name"],
        time=time,
        type=obj.get("type") or "",
        reason=obj.get("reason") or "",
        message=(obj.get("message") or "").strip(),
        count=obj.get("count") or series.get("count") or 1,
        kind=about.get("kind") or "",
        about=about.get("name") or "",
        about_uid=about.get("uid") or "",
    )
