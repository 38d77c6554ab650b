"""The termination message: the contract's JSON object in at most 4,096 bytes (docs/contracts.md section 5)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from ddp_trainer.contract.environment import PodEnvironment
from ddp_trainer.contract.exit_codes import EXIT_FENCED, EXIT_OK, EXIT_PREEMPTED, EXIT_USER
from ddp_trainer.contract.heartbeat import phase_seconds
from ddp_trainer.launch.exit.root_cause import ExitCause, ExitEvidence
from ddp_trainer.launch.status.pod_state import progress

MESSAGE_BYTES: Final = 4096
"""The kubelet cuts what is longer (Kubernetes, "Customizing the termination message").

All containers of a pod share 12 KiB in equal parts, also those that are done and those that a webhook adds: with four
or more of them it cuts each message further, and the beginning stays.
"""

METRICS_BYTES: Final = 1024
"""Of a message that is too long, so much of the metrics stays: the rest is for what says why the pod ended."""

_OUTCOMES: Final = {
    EXIT_OK: "Succeeded",
    EXIT_PREEMPTED: "Preempted",
    EXIT_USER: "UserError",
    EXIT_FENCED: "Fenced",
}
_SECRET_NAME: Final = re.compile(r"SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY", re.IGNORECASE)
_TOKEN_NAME: Final = re.compile(r"TOKEN(?!IZER)", re.IGNORECASE)
_COUNT_NAME: Final = re.compile(r"TOKENS|(^|_)(MAX|MIN|NUM|COUNT|LENGTH|PER)(_|$)", re.IGNORECASE)
_COUNT: Final = re.compile(r"[0-9]{1,12}")
"""Of tokens of text, as of MAX_TOKENS."""
_SHORTEST_SECRET: Final = 6


def message_of(cause: ExitCause, pod: PodEnvironment | None, evidence: ExitEvidence) -> dict[str, Any]:
    """The JSON object of the contract; `pod` is None where the environment was too broken to be read.

    What the operator decides by comes first, and what may be long last: the kubelet may cut the end.
    """
    fields = asdict(cause)
    known = progress(evidence.heartbeats) | _step_of(cause.rank, evidence)
    metrics = known.pop("metrics")
    return {
        "version": 1,
        "outcome": _OUTCOMES.get(cause.exit_code, "Failed"),
        "exitCode": fields["exit_code"],
        "reason": fields["reason"],
        "nodeRank": pod.node_rank if pod else None,
        "rank": fields["rank"],
        "localRank": fields["local_rank"],
        "attempt": pod.attempt if pod else None,
        "signal": fields["signal"],
        "time": evidence.wall if cause.time is None else cause.time,
        **known,
        "seconds": phase_seconds(evidence.heartbeats[0] if evidence.heartbeats else None, math.inf),
        "message": fields["message"],
        "metrics": metrics,
        "exception": fields["exception"],
        "cut": fields["cut"],
        "traceback": fields["traceback"],
    }


def _step_of(rank: int | None, evidence: ExitEvidence) -> dict[str, Any]:
    """The step of the rank that failed, which others may be ahead of or behind: the same error repeats at its step."""
    steps = {heartbeat["rank"]: heartbeat["step"] for heartbeat in evidence.heartbeats}
    return {"step": steps[rank]} if rank in steps else {}


def redacted(message: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """The message without the values of variables whose names say that they are secret."""
    values = ((name, value.strip()) for name, value in environ.items())  # of a file, it ends with a line break
    secrets = sorted({value for name, value in values if _is_secret(name, value)}, key=len, reverse=True)

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            for secret in secrets:
                value = value.replace(secret, "***")
        return value

    return {name: clean(value) for name, value in message.items()}


def _is_secret(name: str, value: str) -> bool:
    if len(value) < _SHORTEST_SECRET:
        return False
    is_count = _COUNT_NAME.search(name) and _COUNT.fullmatch(value)
    return bool(_SECRET_NAME.search(name) or (_TOKEN_NAME.search(name) and not is_count))


def encode(message: Mapping[str, Any], limit: int = MESSAGE_BYTES) -> bytes:
    """The message in at most `limit` bytes of UTF-8, cut in the contract's order.

    Of a traceback the end is kept, where the error is; of the others the beginning.
    """
    cut = dict(message)
    if (excess := len(_json(cut)) - limit) > 0:
        cut["metrics"] = _first_of(cut["metrics"], max(METRICS_BYTES, len(_json_text(cut["metrics"])) - excess))
    for name in ("traceback", "exception", "cut", "message"):
        excess = len(_json(cut)) - limit
        text = cut[name]
        if excess <= 0:
            return _json(cut)
        if text:
            cut[name] = _shortened(text, len(_json_text(text)) - excess, keep_end=name == "traceback")
    return _json(cut)


def write(path: Path, encoded: bytes) -> None:
    """Write in place: /dev/termination-log is a mount of its own, which no rename can replace (EBUSY)."""
    path.write_bytes(encoded)


def _first_of(values: Mapping[str, float], size: int) -> dict[str, float]:
    """The first of `values`, as many as `size` bytes of JSON hold."""
    # the two braces of one value are as long as the separator between two
    ends = accumulate(len(_json_text({name: value})) for name, value in values.items())
    return {name: value for (name, value), end in zip(values.items(), ends, strict=True) if end <= size}


def _shortened(text: str, size: int, *, keep_end: bool) -> str | None:
    """As much of `text` as `size` bytes of JSON hold, with an ellipsis where it was cut; None if that is too little."""
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        if len(_json_text(_cut(text, middle, keep_end))) <= size:
            low = middle
        else:
            high = middle - 1
    return _cut(text, low, keep_end) if low > 0 else None


def _cut(text: str, characters: int, keep_end: bool) -> str:
    if characters >= len(text):
        return text
    return "…" + text[len(text) - characters :] if keep_end else text[:characters] + "…"


def _json_text(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


def _json(message: Mapping[str, Any]) -> bytes:
    return _json_text(message)
