"""Sockets on which processes of this host listen, as the kernel lists them."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

LISTENING = "0A"  # a socket's state in /proc/net/tcp


def listeners(pid: int) -> set[tuple[str, int]]:
    """Address and port of each TCP socket on which a process listens."""
    found = set[tuple[str, int]]()
    inodes = _sockets(pid)
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in inodes:
                address, port = fields[1].split(":")
                found.add((_address(family, address), int(port, 16)))
    return found


def beyond_loopback(found: set[tuple[str, int]]) -> set[tuple[str, int]]:
    """Those that other hosts could reach."""
    near = ("127.", "::ffff:127.")
    return {(where, port) for where, port in found if not where.startswith(near) and where != "::1"}


def _sockets(pid: int) -> set[str]:
    """Inodes of a process's sockets."""
    found = set[str]()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            target = str(descriptor.readlink())
            if target.startswith("socket:["):
                found.add(target[len("socket:[") : -1])
    return found


def _address(family: socket.AddressFamily, text: str) -> str:
    """An address of the table: words of four bytes, each in the host's order."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return socket.inet_ntop(family, b"".join(words))
