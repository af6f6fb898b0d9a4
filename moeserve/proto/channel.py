"""How both sides of the contract set up gRPC: addresses, message limits, keepalive, reconnecting.

One place for all of it.
"""

from __future__ import annotations

import re
from typing import Any

import grpc

from moeserve.proto.credentials import Credentials, KeyedChannel

MAX_MESSAGE_BYTES = 64 << 20
"""The default limit of one message: 4096 rows x 7168 in bf16, with room for ids and weights.

Clients cut larger calls. gRPC hands a message to Python with the interpreter held, for 1 ms a megabyte or
more, in which no other call of the process goes on.
"""

KEEPALIVE_MS = 20_000

CONNECT_MS = 5_000
"""Within which a connection has to stand, with its first frames, before it is tried anew."""

MOST_STREAMS = 1024
"""Calls of one connection at once; a client holds further ones back."""

Options = list[tuple[str, Any]]

OTHER_NAMES = re.compile(r"(unix|unix-abstract|vsock):|(dns|ipv4|ipv6|xds|google-c2p)://")
"""What gRPC knows beside HOST:PORT: sockets of the host, and names with a resolver."""

HOST = re.compile(r"[^:/\s]+|\[[^\[\]\s]+\]|(dns|ipv4|ipv6):\S+")
"""A name or an IPv4 address, an IPv6 one, or what says which of them it is."""


def client_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """The gRPC options of a client's channel.

    gRPC's own limit is 4 MiB. Retrying is the client library's, which knows what is safe; a rank that
    restarted should be found within a second, where gRPC waits up to two minutes; and an address inside a
    cluster is never behind an HTTP proxy.
    """
    return [
        *_limits(max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_MS // 2),
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", CONNECT_MS),  # by its name a back-off, it is the connect deadline
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
        # Without a pool of its own, a second client in the process shares the first one's connection and
        # its limits.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options(max_message_bytes: int = MAX_MESSAGE_BYTES, *, held_port: bool = False) -> Options:
    """The gRPC options of a lane's or the front door's endpoint.

    A port that is in use is an error, not shared; `held_port`: unless another process of this user, which
    does not listen there, holds it for this one; clients may ping while a step runs. A connection has at
    most MOST_STREAMS calls at once, those counted that were reset and are not yet put away: one that resets
    thousands holds nobody else up.
    """
    return [
        *_limits(max_message_bytes),
        ("grpc.max_concurrent_streams", MOST_STREAMS),
        ("grpc.so_reuseport", int(held_port)),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 4),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def connect(
    address: str, max_message_bytes: int = MAX_MESSAGE_BYTES, credentials: Credentials | None = None
) -> Any:
    """A `grpc.Channel` to `host:port`, or what shows `credentials` over one. It connects when first used.

    Raises ValueError where the address has no port, or a token would go beyond loopback as plain text,
    OSError for a file that cannot be read.
    """
    return opened(grpc, address, max_message_bytes, credentials)


def opened(library: Any, address: str, max_message_bytes: int, credentials: Credentials | None) -> Any:
    """As `connect`, by `grpc` or `grpc.aio`."""
    check_address(address)
    options = client_options(max_message_bytes)
    if credentials is None:
        return library.insecure_channel(address, options=options)
    credentials.check_address(address)
    options += credentials.options()

    def make(tls: grpc.ChannelCredentials | None) -> Any:
        if tls is None:
            return library.insecure_channel(address, options=options)
        return library.secure_channel(address, tls, options=options)

    return KeyedChannel(credentials, make)


def _limits(max_message_bytes: int) -> Options:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
    ]


def check_address(text: str) -> None:
    """Raises ValueError where the text is not `HOST:PORT`, with an IPv6 address in brackets, nor another name
    of gRPC's. Without a port, or brackets, gRPC takes all of it for the host, and goes to port 443.
    """
    if OTHER_NAMES.match(text):
        return
    host, _, port = text.rpartition(":")
    if not HOST.fullmatch(host) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} must be HOST:PORT, such as 127.0.0.1:50051 or [::1]:50051")
