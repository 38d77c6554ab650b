"""Which network interface gloo has to be given, where it would choose one that no other node reaches.

gloo offers the address that the host's name leads to. In a network of its own a pod has its address under that name. In
the node's (`hostNetwork`) it has the file /etc/hosts of the node, where Debian and Ubuntu put the name at 127.0.1.1:
each rank would ask the others to connect to themselves.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

_IPV6 = Path("/proc/net/if_inet6")
"""Address in hexadecimal digits, index, prefix, scope, flags and name, a line for each address of IPv6."""
_SIOCGIFADDR = 0x8915
_NAME_BYTES = 16


def gloo_interface(pod_ip: str) -> str | None:
    """The interface with the address of this pod; None where gloo finds that address itself, or nobody has it."""
    return interface_to_name(pod_ip, _own_addresses(), _interfaces())


def interface_to_name(pod_ip: str, own: Iterable[str], interfaces: Iterable[tuple[str, str]]) -> str | None:
    """Of `interfaces`, names with their addresses, the one with `pod_ip`, if the host's name leads to the addresses
    `own`, of which gloo takes the first, and that is of the loopback interface.
    """
    if is_loopback(pod_ip):
        return None
    first = next(iter(own), None)
    if first is not None and not is_loopback(first):
        return None
    return next((name for name, address in interfaces if address == pod_ip), None)


def is_loopback(address: str) -> bool:
    """Whether only this machine has it."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _own_addresses() -> Iterator[str]:
    """Those that the host's name leads to and a socket can be bound to. Without any, gloo takes 127.0.0.1."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as bound:
                bound.bind(address)
        except OSError:
            continue
        yield str(address[0])


def _interfaces() -> Iterator[tuple[str, str]]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_NAME_BYTES}s24x", name.encode()[: _NAME_BYTES - 1])
            try:
                answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no address of IPv4
            yield name, socket.inet_ntoa(answer[20:24])
    if _IPV6.exists():
        for line in _IPV6.read_text().splitlines():
            fields = line.split()
            yield fields[-1], str(ipaddress.IPv6Address(bytes.fromhex(fields[0])))
