"""One log line an event: JSON for machines, plain for people. Everything goes to standard error."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime


class JsonLines(logging.Formatter):
    """One JSON object a line, with the keys that log collectors look for."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure(level: str, form: str) -> None:
    """Set up logging for the process."""
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if form == "json" else plain)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # kopf tells the story of each object at INFO and of each request's retries at ERROR; of the first we have our own
    logging.getLogger("kopf.objects").setLevel(max(logging.WARNING, logging.getLevelName(level)))
    logging.getLogger("asyncio").setLevel(logging.WARNING)
