"""Addresses of a service, as clients are given them."""

from __future__ import annotations

import asyncio

import pytest

from moeserve import AsyncMoeClient, MoeClient
from moeserve.proto.channel import check_address


@pytest.mark.parametrize(
    "text",
    [
        *("", "127.0.0.1", "localhost", "localhost:", ":1", "host:http", "host:70000", "::1", "::1:50051"),
        *(
            "a\nb:1",
            "a b:1",
            " :1",
            "[::1 ]:1",
            "::50051",
            "[::1:50051",
            "fe80::1%lo:50051",
            "http://127.0.0.1:50051",
            "https://host",
        ),
    ],
)
def test_an_address_without_a_port_is_refused_at_once(text: str) -> None:
    """gRPC would go to port 443, and say that nobody answers."""
    with pytest.raises(ValueError, match="must be HOST:PORT, such as 127"):
        MoeClient(text)

    async def call() -> None:
        await AsyncMoeClient(text).status()

    with pytest.raises(ValueError, match="must be HOST:PORT"):
        asyncio.run(call())


@pytest.mark.parametrize(
    "text",
    [
        *("127.0.0.1:1", "host.local:65535", "[::1]:50051", "[fe80::1%lo]:1", "ipv4:1.1.1.1:1"),
        *("ipv6:[::1]:1", "unix:/tmp/a", "unix-abstract:a", "dns:///moeserve", "dns:host:1"),
    ],
)
def test_other_addresses_are_taken(text: str) -> None:
    check_address(text)
