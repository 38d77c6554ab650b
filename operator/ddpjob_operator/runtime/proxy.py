"""Through which proxy the API server of a kubeconfig, or a webhook, is reached, as kubectl decides it (Go's
ProxyFromEnvironment).
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final
from urllib.parse import urlsplit

SCHEMES: Final = ("http", "https")
"""Of proxies that the client can use. kubectl has SOCKS too."""
_OF_ENVIRONMENT: Final = "http"
"""The client checks the certificate of an HTTPS proxy by the authority of the cluster, which did not sign it."""
_PORTS: Final = {"http": 80, "https": 443}


def proxy_of_environment(server: str, environment: Mapping[str, str]) -> str | None:
    """HTTPS_PROXY, but neither for this machine nor for what NO_PROXY lists; None if there is none, or it is not asked
    by HTTP: then the server is tried without it.
    """
    url = urlsplit(server)
    host, port = (url.hostname or "").rstrip("."), url.port or _PORTS.get(url.scheme)
    proxy = _value(environment, f"{url.scheme}_proxy")
    if not proxy or _is_here(host):
        return None
    if any(_excludes(entry.strip().lower(), host, port) for entry in _value(environment, "no_proxy").split(",")):
        return None
    found = proxy if "://" in proxy else f"http://{proxy}"
    return found if urlsplit(found).scheme == _OF_ENVIRONMENT else None


def in_words(proxy: str) -> str:
    """Without its user and password."""
    scheme, end, rest = proxy.rpartition("://")
    return f"{scheme}{end}{rest.rpartition('@')[2]}"


def _value(environment: Mapping[str, str], name: str) -> str:
    return environment.get(name.upper()) or environment.get(name) or ""


def _is_here(host: str) -> bool:
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _excludes(entry: str, host: str, port: int | None) -> bool:
    """Whether an entry of NO_PROXY names the host: `*`, an address, a network, or a domain with or without a port."""
    if entry in ("", "*"):
        return entry == "*"
    address = _address(host)
    if "/" in entry:
        try:
            return address is not None and address in ip_network(entry, strict=False)
        except ValueError:
            return False
    name, colon, number = entry.rpartition(":")
    if colon and number.isdigit() and (":" not in name or name.endswith("]")):  # else an IPv6 address
        if int(number) != port:
            return False
        entry = name
    entry = entry.strip("[]")
    if address is not None:
        return address == _address(entry)
    if entry.startswith(("*.", ".")):
        return host.endswith(entry.removeprefix("*"))
    return host == entry or host.endswith(f".{entry}")


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None
