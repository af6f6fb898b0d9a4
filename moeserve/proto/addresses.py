"""`check_address`: whether a text says where a service is."""

from __future__ import annotations

import re

OTHER_NAMES = re.compile(r"(unix|unix-abstract|vsock):|(dns|ipv4|ipv6|xds|google-c2p)://")
"""What gRPC knows beside HOST:PORT: sockets of the host, and names with a resolver."""

HOST = re.compile(r"[^:/]+|\[[^\[\]]+\]|(dns|ipv4|ipv6):.+")
"""A name or an IPv4 address, an IPv6 one, or what says which of them it is."""


def check_address(text: str) -> None:
    """Raises ValueError where the text is not `HOST:PORT`, with an IPv6 address in brackets, nor another name
    of gRPC's. Without a port, or brackets, gRPC takes all of it for the host, and goes to port 443.
    """
    if OTHER_NAMES.match(text):
        return
    host, _, port = text.rpartition(":")
    if not HOST.fullmatch(host) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} must be HOST:PORT, such as 127.0.0.1:50051 or [::1]:50051")
