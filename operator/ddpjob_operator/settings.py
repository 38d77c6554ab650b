"""The operator's own configuration: environment variables, read once, into a frozen value.

Every variable starts with `DDPJOB_OPERATOR_`. A value that cannot be right stops the operator before it touches the
cluster, with one line that names the variable, because a default in its place would surface as a puzzle hours later.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_network
from pathlib import Path
from urllib.parse import urlsplit

PREFIX = "DDPJOB_OPERATOR_"
MOST_SHARDS = 32
EXIT_BAD_SETTING = 64
"""Exit code of a configuration that cannot be used (EX_USAGE of sysexits.h, as in docs/contracts.md section 3)."""

try:
    VERSION = version("ddpjob")
except PackageNotFoundError:  # run from a source tree
    VERSION = "0.0.0"

NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_LEASE = re.compile(r"(?=.{1,244}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
"""A name of at most 253 characters, also with the number of a shard after it."""
_LABEL_NAME = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_LABEL_KEY = re.compile(rf"([a-z0-9]([-a-z0-9.]{{0,251}}[a-z0-9])?/)?{_LABEL_NAME}")
_LABEL_VALUE = re.compile(rf"({_LABEL_NAME})?")
_IN_CLUSTER_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class BadSetting(ValueError):
    """An environment variable has a value that cannot be used; the message names it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All that an administrator may choose; times are in seconds."""

    namespaces: tuple[str, ...] = ()
    """NAMESPACES: namespaces to serve, separated by commas. Empty: all of them."""

    trainer_image: str = "localhost/ddpjob-trainer:0.1.0-cpu"
    """TRAINER_IMAGE: image of jobs that name none."""

    config: str = ""
    """CONFIG: a file with defaults and bounds for jobs, by namespace (`tenancy`). Empty: there are none."""

    log_level: str = "INFO"
    """LOG_LEVEL: DEBUG, INFO, WARNING or ERROR."""

    log_format: str = "json"
    """LOG_FORMAT: json (one object a line) or plain."""

    port: int = 8080
    """PORT: where /metrics is served. 0 takes any free one."""

    probe_port: int = 8081
    """PROBE_PORT: where /healthz and /readyz are served. 0 takes any free one."""

    metrics_authentication: bool = False
    """METRICS_AUTHENTICATION: serve /metrics only to bearer tokens whose user may get it, by TokenReview and
    SubjectAccessReview."""

    metrics_certificate: str = ""
    """METRICS_CERTIFICATE: folder with tls.crt and tls.key: serve /metrics with TLS. Empty: plain HTTP."""

    workers: int = 16
    """WORKERS: jobs that are looked at side by side."""

    requests: int = 32
    """REQUESTS: calls to the API server that may be in flight at once."""

    resync_seconds: float = 300.0
    """RESYNC_SECONDS: how often everything is listed again, to find what a lost watch did not announce."""

    progress_seconds: float = 10.0
    """PROGRESS_SECONDS: least time between two writes of a status in which only progress has changed."""

    poll_seconds: float = 2.0
    """POLL_SECONDS: how often a running job's trainer is asked for its progress."""

    network_policy: str = "off"
    """NETWORK_POLICY: ingress (a job's pods let in each other and the scrapers of their metrics), isolated (and reach
    nothing but each other and the resolvers themselves, initializers the sources as well) or off."""

    resolvers: tuple[str, ...] = ("kube-system/k8s-app=kube-dns",)
    """RESOLVERS: the cluster's DNS servers, which isolated pods may reach: NAMESPACE/LABEL=VALUE of pods, or a network
    in CIDR notation such as 169.254.20.10/32 (node-local DNS), separated by commas."""

    sources: tuple[str, ...] = ()
    """SOURCES: networks (CIDR) that initializers of isolated jobs may reach, separated by commas. Empty: none, so that
    a job with a source other than pvc:// is refused."""

    scrapers: Mapping[str, str] = field(default_factory=dict)
    """SCRAPERS: labels of the namespaces that may read metrics of pods under such a policy, such as
    kubernetes.io/metadata.name=monitoring, separated by commas. Empty: the operator alone may."""

    readers: tuple[str, ...] = ()
    """READERS: networks (CIDR) that may read the status and metrics of pods under such a policy, separated by commas:
    those that the API server connects from, which asks the ranks for `ddpjob watch`, `why` and `dashboard`."""

    notify_url: str = field(default="", repr=False)
    """NOTIFY_URL: http(s) URL to which the end of each job is posted as a CloudEvent. Empty: nowhere."""

    notify_token: str = field(default="", repr=False)
    """NOTIFY_TOKEN: bearer token of these requests. Empty: none."""

    leader_election: bool = True
    """LEADER_ELECTION: hold a Lease while acting, so that of several replicas only one acts."""

    shards: int = 1
    """SHARDS: how many operators divide the namespaces among them, each with its SHARD and with replicas of its own.
    All of them need the same number here, and wait until no operator with another number holds the Lease."""

    shard: int = 0
    """SHARD: which of them this is, from 0."""

    lease_name: str = "ddpjob-operator"
    """LEASE_NAME: name of that Lease. Each shard has another one, named after it and its number."""

    lease_namespace: str = "default"
    """LEASE_NAMESPACE: its namespace. Default: the operator's own."""

    identity: str = ""
    """IDENTITY: what this replica calls itself in the Lease, unlike any other. Default: host name and process id,
    which a container that is restarted in its pod keeps, so that it need not wait for its own Lease."""


def usage() -> str:
    """What `--help` prints."""
    names = "\n".join(f"  {PREFIX}{name}" for name in sorted(_READERS))
    return (
        "usage: python -m ddpjob_operator.main\n\n"
        "Run the operator in the cluster of the pod's service account or of the kubeconfig. It takes no arguments;\n"
        f"docs/settings.md describes its environment variables:\n{names}"
    )


def load(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings.

    Raises:
        BadSetting: a variable's value cannot be used, or a variable with our prefix is not known: a misspelt one
            would otherwise be ignored.
    """
    given = {key.removeprefix(PREFIX): value.strip() for key, value in environ.items() if key.startswith(PREFIX)}
    given = {name: value for name, value in given.items() if not _is_service_link(name, value)}
    if unknown := sorted(given.keys() - _READERS.keys()):
        raise BadSetting(f"{PREFIX}{unknown[0]} is not a setting; known are {', '.join(sorted(_READERS))}")
    values: dict[str, object] = {
        "lease_namespace": own_namespace(),
        "identity": f"{socket.gethostname()}_{os.getpid()}",
    }
    for name, text in given.items():
        if not text and name != "NAMESPACES":
            continue  # a chart renders an unset value as an empty string
        try:
            values[name.lower()] = _READERS[name](text)
        except ValueError as error:
            is_not = "has a value that cannot be used: it" if name in _SECRET else f"is {text!r}, but"
            raise BadSetting(f"{PREFIX}{name} {is_not} must be {error}") from None
    return _refuse_shards(Settings(**values))  # type: ignore[arg-type]


def _refuse_shards(settings: Settings) -> Settings:
    if settings.shard >= settings.shards:
        most = f"0 to {settings.shards - 1}" if settings.shards > 1 else f"0, or set {PREFIX}SHARDS"
        raise BadSetting(f"{PREFIX}SHARD is {settings.shard}, but must be {most}")
    if settings.shards > 1 and not settings.leader_election:
        raise BadSetting(f"{PREFIX}SHARDS is {settings.shards}: leave {PREFIX}LEADER_ELECTION on, its Leases keep "
                         "operators apart that divide the namespaces in different ways")  # fmt: skip
    return settings


def _is_service_link(name: str, value: str) -> bool:
    """Whether kubelet made this variable for a Service named ddpjob-operator (docker link variables): PORT would be
    its URL."""
    return bool(re.fullmatch(r"SERVICE_HOST|SERVICE_PORT(_.*)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_.*)?", name)) or (
        name == "PORT" and "://" in value
    )


def in_cluster_namespace(file: Path = _IN_CLUSTER_NAMESPACE) -> str | None:
    """The namespace of the pod that this runs in; None outside a cluster."""
    try:
        return file.read_text().strip() or None
    except OSError:
        return None


def own_namespace(file: Path = _IN_CLUSTER_NAMESPACE) -> str:
    """The namespace of the pod that this runs in, or `default` outside a cluster."""
    return in_cluster_namespace(file) or "default"


def _namespaces(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not all(NAMESPACE.fullmatch(name) for name in names):
        raise ValueError("names of namespaces separated by commas, or empty for all of them")
    return names


def _namespace(text: str) -> str:
    if not NAMESPACE.fullmatch(text):
        raise ValueError("the name of a namespace")
    return text


def _lease(text: str) -> str:
    if not _LEASE.fullmatch(text):
        raise ValueError("a name of lower-case letters, digits, - and .")
    return text


def _labels(text: str) -> Mapping[str, str]:
    pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    if not all(_LABEL_KEY.fullmatch(key) and equals and _LABEL_VALUE.fullmatch(value) for key, equals, value in pairs):
        raise ValueError("labels such as kubernetes.io/metadata.name=monitoring, separated by commas")
    return {key: value for key, _, value in pairs}


def _networks(text: str) -> tuple[str, ...]:
    try:
        return tuple(str(ip_network(part.strip())) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError("networks such as 10.0.0.0/8, separated by commas") from None


def _resolvers(text: str) -> tuple[str, ...]:
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        namespace, slash, label = part.partition("/")
        if "=" in label and NAMESPACE.fullmatch(namespace) and slash:
            found.append(f"{namespace}/{'='.join(next(iter(_labels(label).items())))}")
        else:
            found += _networks(part)
    return tuple(found)


def _url(text: str) -> str:
    """Of a receiver. The error does not quote it: its path or query may be the secret."""
    try:
        parts = urlsplit(text)
        whole = bool(parts.hostname) and parts.port != 0
    except ValueError:
        whole = False
    if not whole or parts.scheme not in ("http", "https") or "@" in parts.netloc or not re.fullmatch(r"[!-~]+", text):
        raise ValueError("an http:// or https:// URL without a user name")
    return text


def _token(text: str) -> str:
    if not re.fullmatch(r"[!-~]{1,8192}", text):
        raise ValueError("a token of visible ASCII characters")
    return text


def _text(text: str) -> str:
    return text


def _choice(*allowed: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        for value in allowed:
            if value.lower() == text.lower():
                return value
        raise ValueError(f"one of {', '.join(allowed)}")

    return read


def _flag(text: str) -> bool:
    return _choice("true", "false")(text) == "true"


def _whole(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text) or not low <= int(text) <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return int(text)

    return read


def _seconds(low: float, high: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", text) or not low <= float(text) <= high:
            raise ValueError(f"a number of seconds from {low:g} to {high:g}")
        return float(text)

    return read


_READERS: dict[str, Callable[[str], object]] = {
    "NAMESPACES": _namespaces,
    "TRAINER_IMAGE": _text,
    "CONFIG": _text,
    "LOG_LEVEL": _choice("DEBUG", "INFO", "WARNING", "ERROR"),
    "LOG_FORMAT": _choice("json", "plain"),
    "PORT": _whole(0, 65535),
    "PROBE_PORT": _whole(0, 65535),
    "METRICS_AUTHENTICATION": _flag,
    "METRICS_CERTIFICATE": _text,
    "WORKERS": _whole(1, 1024),
    "REQUESTS": _whole(1, 4096),
    "RESYNC_SECONDS": _seconds(1, 86400),
    "PROGRESS_SECONDS": _seconds(0, 3600),
    "POLL_SECONDS": _seconds(0.1, 3600),
    "NETWORK_POLICY": _choice("off", "ingress", "isolated"),
    "SCRAPERS": _labels,
    "READERS": _networks,
    "RESOLVERS": _resolvers,
    "SOURCES": _networks,
    "NOTIFY_URL": _url,
    "NOTIFY_TOKEN": _token,
    "LEADER_ELECTION": _flag,
    "SHARDS": _whole(1, MOST_SHARDS),
    "SHARD": _whole(0, MOST_SHARDS - 1),
    "LEASE_NAME": _lease,
    "LEASE_NAMESPACE": _namespace,
    "IDENTITY": _text,
}

_SECRET = ("NOTIFY_URL", "NOTIFY_TOKEN")
"""Variables whose value is not shown."""
