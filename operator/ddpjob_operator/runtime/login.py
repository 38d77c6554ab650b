"""Where the API server is, and who we are to it.

The official client's `kubernetes.aio` reads the configuration: kubeconfig files, exec plugins, token files, a pod's
service account. Its generated models cost 2 s and 77 MB and are never imported. Both our own client and kopf open their
sessions here, and log in again here after a 401, so a rotated token is found by both. A new authority is found where
the certificate of the API server is not trusted.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import yaml
from kubernetes.aio.client import Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config

from ddpjob_operator.home import expanded
from ddpjob_operator.runtime.decode import ShallowResponse
from ddpjob_operator.runtime.errors import NO_CONFIGURATION, ApiError, without_frames
from ddpjob_operator.runtime.kubeconfig import load
from ddpjob_operator.runtime.proxy import SCHEMES, in_words, proxy_of_environment
from ddpjob_operator.settings import VERSION

logger = logging.getLogger(__name__)

KEEPALIVE_SECONDS = 90.0
OPERATOR = "ddpjob-operator"
CLI = "ddpjob-cli"
"""Of the command, and of Python programs that use `ddpjob`."""

_PROBES = (("TCP_KEEPIDLE", 30), ("TCP_KEEPALIVE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
"""Seconds of silence before the first probe (the second name is that of macOS), seconds between probes, and how many
may stay without an answer.
"""
_NO_LOGIN = "there is no kubeconfig (name one in KUBECONFIG, or create ~/.kube/config) and no service account of a pod"
_NAMESPACE_OF_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(eq=False, slots=True)
class Authorities:
    """The file that says who signs the API server's certificate. Where a cluster gets a new authority, the kubelet
    replaces it in each pod."""

    file: Path
    tls: ssl.SSLContext
    """That trusts them."""
    read: bytes
    """What of the file it trusts."""

    def read_again(self) -> None:
        """Trust those, too, that the file has by now. The earlier ones stay until the next login, as they did where
        nothing was read again: while a cluster changes its authority some of its API servers have a certificate of the
        old one."""
        try:
            found = self.file.read_bytes()
            if found == self.read:
                return
            self.read = found  # also where it cannot be used: half a file is read again once it is whole
            self.tls.load_verify_locations(self.file)
        except OSError as error:
            logger.warning("the API server's certificate is not trusted, and %s cannot be used: %s", self.file, error)
        else:
            logger.info("the API server's certificate was not trusted; %s has changed and was read again", self.file)


@dataclass(frozen=True, slots=True)
class Login:
    """Where the API server is and how to talk to it, as read from the configuration at one moment."""

    server: str
    tls: ssl.SSLContext | None
    headers: Mapping[str, str]
    proxy: str | None
    server_name: str | None
    namespace: str = "default"
    """The namespace of the kubeconfig's context, or of the pod."""
    authorities: Authorities | None = None
    """None: those of the system."""


async def log_in(context: str | None = None, agent: str = OPERATOR) -> Login:
    """Read the configuration anew: $KUBECONFIG or ~/.kube/config where one exists, else the pod's service account.

    Args:
        context: of the kubeconfig; its current one if None.
        agent: who asks, for the audit log of the API server.

    Raises:
        ApiError: neither is there, or it cannot be used.
    """
    configuration, namespace = await _read_configuration(context)
    proxy: str | None = configuration.proxy or None
    if proxy is not None and urlsplit(proxy).scheme not in SCHEMES:
        what = f"cannot use the proxy-url {in_words(proxy)} of the kubeconfig: only HTTP proxies can be used"
        fix = "name one, or forward a port to the API server (ssh -L), with server and tls-server-name to match"
        raise ApiError(0, NO_CONFIGURATION, f"{what}; {fix}")
    try:
        is_https = configuration.host.startswith("https")
        file = Path(configuration.ssl_ca_cert) if is_https and configuration.ssl_ca_cert else None
        read = file.read_bytes() if file is not None else b""  # first: what changes meanwhile is read again in time
        tls = _tls(configuration) if is_https else None
    except OSError as error:
        what = f"cannot use the certificates for {configuration.host}: {error}"
        raise ApiError(0, NO_CONFIGURATION, what) from error
    headers = {"User-Agent": f"{agent}/{VERSION}", "Accept": "application/json"}
    if agent == OPERATOR:
        # within a cluster, sending a list takes less time than compressing it (client-go: DisableCompression)
        headers["Accept-Encoding"] = "identity"
    if token := await configuration.get_api_key_with_prefix("BearerToken"):
        headers["Authorization"] = token
    return Login(
        server=configuration.host.rstrip("/"),
        tls=tls,
        headers=headers,
        proxy=proxy,
        server_name=configuration.tls_server_name or None,
        namespace=namespace,
        authorities=Authorities(file, tls, read) if file is not None and tls is not None else None,
    )


def open_session(
    current: Login,
    trace: aiohttp.TraceConfig | None = None,
    response: type[aiohttp.ClientResponse] = ShallowResponse,
) -> aiohttp.ClientSession:
    """An HTTP session with these credentials, which the caller closes."""
    return aiohttp.ClientSession(
        connector=_Connector(current.authorities, current.tls),
        response_class=response,
        headers=current.headers,
        proxy=current.proxy,
        trace_configs=[trace] if trace is not None else None,
    )


class _Connector(aiohttp.TCPConnector):
    """Reads the authorities again where the API server's certificate is not trusted; the caller's next try may be.

    And it leaves no cycle behind where a connection fails, as aiohttp does: its error has the frame that keeps the
    error. kopf waits for its next try with the error in hand, for half a minute. What lives so long the garbage
    collector does not look at any more (`runtime.garbage`), so each try left its TLS handshake behind: an operator of
    150 namespaces grew by 2 MB a second for as long as it did not trust the API server.
    """

    def __init__(self, authorities: Authorities | None, tls: ssl.SSLContext | None) -> None:
        # a TLS handshake costs more than a call, and jobs come in bursts with minutes between them
        super().__init__(
            limit=0,
            keepalive_timeout=KEEPALIVE_SECONDS,
            ssl=tls if tls is not None else True,
            socket_factory=_probing_socket,
        )
        self._authorities = authorities

    async def connect(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Any],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp names it so
    ) -> Any:
        try:
            return await super().connect(req, traces, timeout)
        except (aiohttp.ClientError, OSError) as error:
            if self._authorities is not None and isinstance(error, aiohttp.ClientConnectorCertificateError):
                self._authorities.read_again()
            without_frames(error)
            raise


def _probing_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Whose kernel asks a silent server whether it is still there (TCP keepalive), and breaks the connection if not.

    A log that is followed has no deadline: it may be silent for hours, and its connection may be lost without a word,
    as where a laptop sleeps, a VPN changes, or a load balancer forgets an idle one, which the probes prevent.
    """
    family, kind, protocol, *_ = address
    probing = socket.socket(family, kind, protocol)
    with suppress(OSError):  # of a system without one of them: it probes after hours, or not at all
        probing.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PROBES:
            if (option := getattr(socket, name, None)) is not None:
                probing.setsockopt(socket.IPPROTO_TCP, option, value)
    return probing


async def _read_configuration(context: str | None) -> tuple[Configuration, str]:
    """The configuration of the client, and the namespace that goes with it."""
    configuration = Configuration()
    files = _kubeconfig()
    if not files and context:  # that of a pod may be another cluster than the one that is asked for
        what = f"there is no kubeconfig, and so no context {context}; name one in KUBECONFIG, or create ~/.kube/config"
        raise ApiError(0, NO_CONFIGURATION, what)
    try:
        if files:
            _refuse_if_missing(files)
            namespace = await load(files, context, configuration)
            configuration.proxy = configuration.proxy or proxy_of_environment(configuration.host, os.environ)
            return configuration, namespace
        load_incluster_config(configuration)  # type: ignore[no-untyped-call]
        return configuration, _namespace_of_pod()
    except (ConfigException, OSError, ValueError, TypeError, AttributeError, KeyError, yaml.YAMLError) as error:
        # the loader trips over an empty or half-written file in all these ways
        said = " ".join(str(error).split())
        what = f"cannot use the kubeconfig {files}: {said}" if files else f"{_NO_LOGIN}: {said}"
        raise ApiError(0, NO_CONFIGURATION, what) from error


def _namespace_of_pod() -> str:
    return _NAMESPACE_OF_POD.read_text().strip() if _NAMESPACE_OF_POD.is_file() else "default"


def _kubeconfig() -> str:
    """The kubeconfig to use, which may be a list of paths as in $PATH; empty if there is none."""
    default = expanded(Path("~/.kube/config"))
    return os.environ.get("KUBECONFIG") or (str(default) if default.is_file() else "")


def _refuse_if_missing(files: str) -> None:
    """The loader only warns, and then misses the content. Where there are several paths, one file is enough."""
    if not any(expanded(Path(file)).exists() for file in files.split(os.pathsep) if file):
        raise FileNotFoundError("there is no such file")


def _tls(configuration: Configuration) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, keyfile=configuration.key_file)
    # a cluster's own authority often lacks extensions that Python 3.13 began to insist on, and Go's clients do not
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
