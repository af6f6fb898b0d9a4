"""`check_address`: whether a text says where a service is."""

from __future__ import annotations

import ipaddress
import re

OTHER_NAMES = re.compile(r"(unix|unix-abstract|vsock):|[a-z][a-z0-9+.-]*://")
"""What gRPC knows beside HOST:PORT: sockets of the host, and names with a resolver."""


def check_address(text: str) -> None:
    """Raises ValueError where the text is not `HOST:PORT`, with an IPv6 address in brackets, nor another name
    of gRPC's. Without a port, or brackets, gRPC takes all of it for the host, and goes to port 443.
    """
    if OTHER_NAMES.match(text):
        return
    host, colon, port = text.rpartition(":")
    bare = ":" in host and any(map(_is_ip, (host, text)))
    if not colon or not host or bare or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} must be HOST:PORT, such as 127.0.0.1:50051 or [::1]:50051")


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
