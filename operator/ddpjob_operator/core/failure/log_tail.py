"""What is saved of a pod that failed before it is deleted: the last lines of its log."""

from __future__ import annotations

import re
from collections.abc import Iterator

import re2

from ddpjob_operator.core.failure.detect import Failure
from ddpjob_operator.core.values.actions import ReadLog
from ddpjob_operator.core.values.job import Job
from ddpjob_operator.core.values.observed import Observed

TAIL_CHARACTERS = 4096

_UNREADABLE = ("NodeLost", "PodDeleted")
"""After these there is no kubelet, or no pod, to ask."""

_SECRET_NAME = re.compile(r"SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY", re.IGNORECASE)
_TOKEN_NAME = re.compile(r"TOKEN(?!IZER)", re.IGNORECASE)
_COUNT_NAME = re.compile(r"TOKENS|(^|_)(MAX|MIN|NUM|COUNT|LENGTH|PER)(_|$)", re.IGNORECASE)
_COUNT = re.compile(r"[0-9]{1,12}")
"""Of tokens of text, as of MAX_TOKENS."""
_SHORTEST_SECRET = 6

_MASKS = tuple(
    (re2.compile(f"(?i){pattern}"), instead)
    for pattern, instead in (
        (r"(\b[a-z][a-z0-9+.-]*://)[^/\s@]+@", r"\1***@"),
        (r"(\b(?:Bearer|Basic)\s+)[a-z0-9._~+/=-]{6,}", r"\1***"),
        (
            r"((?:token|secret|passw\w*|credential\w*|signature|api_?key|access_?key|private_?key)\w*[\"']?\s*[=:]\s*[\"']?)"
            r"[^\s\"'&,;]{6,}",
            r"\1***",
        ),
        (r"\b(?:(?-i:hf_|gh[pousr]_|sk-|xox[abp]-|AKIA))[a-z0-9_-]{12,}", "***"),
    )
)
"""What looks like a secret wherever it comes from: a Secret's values are known to the pod alone.

RE2, since a tenant writes these logs: its time is linear in their length.
"""


def log_to_read(observed: Observed, failure: Failure) -> ReadLog | None:
    """The log that has to be read before the post-mortem of `failure` can be written; None if it was, or cannot be."""
    if failure.outside or failure.reason in _UNREADABLE:
        return None  # its log says nothing of why, and a pod that is being removed may be gone by then, and its reason
    pod = next((pod for pod in observed.pods if pod.name == failure.pod_name), None)
    return None if pod is None or pod.uid in observed.logs else ReadLog(pod.name, pod.uid)


def log_tail(job: Job, observed: Observed, failure: Failure) -> str:
    """The last lines of the failed pod's log, whole lines, without what is or looks like a secret."""
    pod = next((pod for pod in observed.pods if pod.name == failure.pod_name), None)
    text = without_secrets(job, observed.logs.get(pod.uid, "") if pod else "")
    if len(text) <= TAIL_CHARACTERS:
        return text
    return text[-TAIL_CHARACTERS:].partition("\n")[2]


def last_states(text: bytes) -> bytes:
    """The lines of a log: of a progress bar, which goes back to the beginning of its line again and again, what it has
    left there. Its other states would take the place of the lines that say why a pod ended."""
    return b"\n".join(line.rstrip(b"\r").rpartition(b"\r")[2] for line in text.split(b"\n"))


def whole_lines(text: bytes, most: int) -> bytes:
    """The last lines that `most` bytes hold: the second half of a secret would not be recognised as one. Of a line that
    is longer, its end."""
    if len(text) <= most:
        return text
    tail = text[-most:]
    whole = tail.partition(b"\n")[2]
    return whole if whole.strip() else tail


def without_secrets(job: Job, text: str) -> str:
    """`text` of a pod without what is secret among the job's variables, and what looks like a secret."""
    secrets = {value for name, value in _variables(job) if _is_secret(name, value)}
    for secret in sorted(secrets, key=len, reverse=True):  # one may be the beginning of another
        text = text.replace(secret, "***")
    return mask(text)


def _variables(job: Job) -> Iterator[tuple[str, str]]:
    """Names and values of the variables that the job gives its trainer, in `env` or by way of the podTemplate."""
    for variable in job.spec.env:
        yield variable.name, (variable.value or "").strip()
    for given in (each for template in job.spec.trainer_templates for each in template.get("env") or ()):
        yield str(given.get("name") or ""), str(given.get("value") or "").strip()


def _is_secret(name: str, value: str) -> bool:
    if len(value) < _SHORTEST_SECRET:
        return False
    is_count = _COUNT_NAME.search(name) and _COUNT.fullmatch(value)
    return bool(_SECRET_NAME.search(name) or (_TOKEN_NAME.search(name) and not is_count))


def mask(text: str) -> str:
    """`text` without what looks like a secret."""
    for pattern, instead in _MASKS:
        text = pattern.sub(instead, text)
    return text
