"""Ports for those who take one that they are told, some time after it was found free."""

from __future__ import annotations

import contextlib
import random
import socket

FIRST, LAST = 20_000, 30_000
"""Below those that the kernel gives to whoever asks for any, and above those of Ray's workers: no other
test's socket comes to be there by chance."""


def free_ports(count: int = 1) -> int:
    """The first of `count` ports in a row, all of them free on loopback. Raises RuntimeError."""
    chance = random.SystemRandom()
    for _ in range(1000):
        first = chance.randrange(FIRST, LAST - count)
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise RuntimeError(f"no {count} free ports in a row from {FIRST} to {LAST}")
