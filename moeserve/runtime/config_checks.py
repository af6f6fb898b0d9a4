"""What values of the configuration have to be, each alone and with others.

Every check raises ConfigError with the key and the value.
"""

from __future__ import annotations

import functools
import ipaddress
import math
from dataclasses import fields
from typing import Any

from moeserve.checkpoints.load_as import scheme_to_load_as
from moeserve.proto.timeouts import LONGEST_SECONDS
from moeserve.proto.transports.awake import MOST_AWAKE
from moeserve.quant.formats import BF16
from moeserve.runtime.mesh import Mesh
from moeserve.runtime.sections import (
    BalanceConfig,
    ClusterConfig,
    ConfigError,
    KeysConfig,
    MembersConfig,
    PassesConfig,
    ServerConfig,
)

LAST_PORT = 65535

MOST_NUMBER = (1 << 63) - 1
MOST = dict.fromkeys(("server.max_message_bytes", "step.lane_rows"), (1 << 31) - 1) | {
    "cluster.threads_per_rank": 4096,
    "cluster.cpus_per_rank": 4096,
    "cluster.ring_bytes": 1 << 30,
    "members.max_lanes": 4096,
    "members.max_owners": 4096,
    "balance.redundant_experts": 1 << 20,
}
"""Most of keys that gRPC, or a message of the contract, holds in 32 bits; and of those with which no rank
would start: more threads than any host has cores, memory than a ring can be made of, and seats and slots
than any group has, of which tables are made.
"""
LEAST_RATE = 1 << 16
LEAST = {
    "server.max_message_bytes": 1 << 20,
    "balance.move_bytes_per_second": LEAST_RATE,
    "balance.shadow_bytes_per_second": LEAST_RATE,
}
"""Least of keys with which a service would start and answer nothing: its replies have to fit, and rows. And
of rates, where 0 is none: a copier pauses after each 4 MiB, for a minute at this one.
"""
LEAST_SECONDS = 1e-3
"""Least of times that must be positive: process groups and polls count milliseconds, and less is none."""

CHECKED_APART = ("server.port", "server.metrics_port", "server.health_port")

POSITIVE = frozenset(
    {
        "step.lane_rows",
        "step.max_step_tokens",
        "step.timeout_seconds",
        "step.finish_seconds",
        "step.blocks_seconds",
        "plan.measure_timeout_seconds",
        "balance.interval_seconds",
        "balance.staging_slots",
        "balance.prepare_timeout_seconds",
        "balance.copy_seconds",
        "server.max_concurrent_calls",
        "server.max_streams",
        "server.max_held_bytes",
        "server.region_seconds",
        "server.request_seconds",
        "server.unread_seconds",
        "server.connection_hello_seconds",
        "server.connection_rest_seconds",
        "server.max_message_bytes",
        "server.max_held_rows",
        "server.queue_seconds",
        "server.stalled_seconds",
        "cluster.start_timeout_seconds",
        "cluster.connect_seconds",
        "cluster.hello_seconds",
        "cluster.answer_seconds",
        "cluster.prepare_seconds",
        "cluster.join_seconds",
        "cluster.adopt_seconds",
        "cluster.send_seconds",
        "keys.handshake_seconds",
        "cluster.begin_seconds",
        "cluster.stop_seconds",
        "cluster.watch_seconds",
        "cluster.recover_seconds",
        "passes.lane_bytes",
        "passes.patience_seconds",
    }
)
"""Keys whose numbers must be more than 0; no other number but a port may be under 0."""


def check_numbers(table: str, values: Any) -> None:
    """Raises ConfigError for a number of `table` that is infinite, not a number, negative, 0 where a positive
    one is needed, or less or more than what it is handed to takes. Ports are checked apart.
    """
    for name in (each.name for each in fields(values)):
        key, value = f"{table}.{name}", getattr(values, name)
        if not isinstance(value, int | float) or key in CHECKED_APART:
            continue
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key} = {value} must be a finite number")
        if name.endswith("_seconds") and value > LONGEST_SECONDS:
            raise ConfigError(f"{key} = {value:g} must be {LONGEST_SECONDS:g} (about 23 days) or less")
        if value > (most := MOST.get(key, MOST_NUMBER if isinstance(value, int) else math.inf)):
            raise ConfigError(f"{key} = {value} must be {most} or less")
        if 0 < value < LEAST.get(key, 0):
            none = "" if key in POSITIVE else ", or 0"
            raise ConfigError(f"{key} = {value} must be {LEAST[key]} or more{none}")
        if key in POSITIVE and key.endswith("_seconds") and 0 < value < LEAST_SECONDS:
            raise ConfigError(f"{key} = {value} must be {LEAST_SECONDS} (a millisecond) or more")
        if key in POSITIVE and value <= 0:
            raise ConfigError(f"{key} = {value} must be positive")
        if value < 0:
            raise ConfigError(f"{key} = {value} must not be negative")


def one_of(key: str, value: str, known: tuple[str, ...]) -> None:
    """Raises ConfigError for a value that is none of the known ones."""
    if value not in known:
        raise ConfigError(f"{key} = {value!r}; known: {', '.join(known)}")


def check_spin(passes: PassesConfig) -> None:
    """A thread that looks again and again takes a core."""
    if passes.spin_seconds > MOST_AWAKE:
        raise ConfigError(f"passes.spin_seconds = {passes.spin_seconds:g} is more than {MOST_AWAKE:g}")


def check_host(host: str) -> None:
    """An address or a name, without a port."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        if ":" in host:
            raise ConfigError(
                f"server.host = {host!r} is no address; give the port as server.port (--port)"
            ) from None


def check_keys(keys: KeysConfig, host: str) -> None:
    """What is beyond loopback is encrypted unless the operator says otherwise; tokens always are."""
    if bool(keys.certificate) != bool(keys.private_key):
        raise ConfigError("keys.certificate and keys.private_key need each other: give both, or neither")
    if keys.client_ca and not keys.certificate:
        raise ConfigError("keys.client_ca asks callers for certificates, which needs keys.certificate")
    if keys.certificate and not keys.ca:
        raise ConfigError("keys.ca is not set: processes of the service know each other's certificates by it")
    if keys.certificate and not keys.grants:
        raise ConfigError(
            "keys.grants is not set: with keys.certificate nobody may do anything that it does not grant "
            "(a line `call,observe,operate anyone` grants all to everyone)"
        )
    if keys.certificate or is_loopback(host):
        return
    if keys.grants:
        raise ConfigError(
            f"server.host = {host!r} is not loopback: tokens of keys.grants would travel as plain text; "
            "set keys.certificate and keys.private_key"
        )
    if not keys.allow_plaintext:
        raise ConfigError(
            f"server.host = {host!r} is not loopback, and nothing is encrypted; set keys.certificate and "
            "keys.private_key, or say keys.allow_plaintext = true (--allow-plaintext)"
        )


def check_members(members: MembersConfig, mesh: Mesh) -> None:
    """Room for fewer than the ranks is refused here, room for more than a dispatcher has in its plan."""
    for name, what in (("max_lanes", "lane"), ("max_owners", "place that holds experts")):
        count = getattr(members, name)
        if 0 < count < mesh.ranks:
            raise ConfigError(
                f"members.{name} = {count} is less than the {mesh.ranks} ranks, "
                f"each of which has a {what}; give 0 (as many as ranks), or {mesh.ranks} or more"
            )
    if mesh.sliced and members.max_owners > mesh.ranks:
        raise ConfigError(
            f"members.max_owners = {members.max_owners} is more than the {mesh.ranks} ranks, "
            "which hold slices of every expert, so that no other member can hold experts; "
            "set parallel.enable_expert_parallel"
        )


def check_cover(balance: BalanceConfig, mesh: Mesh) -> None:
    """Whether an owner of this mesh can be taken over at all; slots are counted when experts are known."""
    if balance.cover_owners not in (0, 1):
        raise ConfigError(
            f"balance.cover_owners = {balance.cover_owners} must be 0 (the loss of no owner is covered) or 1 "
            "(of any one)"
        )
    asked = "balance.shadows = true" if balance.shadows else f"balance.cover_owners = {balance.cover_owners}"
    if not (balance.cover_owners or balance.shadows):
        return
    if mesh.sliced:
        raise ConfigError(
            f"{asked}: ranks hold slices of every expert, and no other rank can take over a slice; set "
            "parallel.enable_expert_parallel"
        )
    if mesh.owners < 2:
        raise ConfigError(f"{asked}: there is one rank, and no other takes over its experts; have 2 or more")


def check_spares(cluster: ClusterConfig) -> None:
    """Spares are actors of Ray's."""
    if cluster.spares and cluster.launcher != "ray":
        raise ConfigError(
            f"cluster.spares = {cluster.spares} needs cluster.launcher = 'ray'; the processes of "
            "the local launcher come with all imported as it is"
        )


def check_ports(server: ServerConfig, ranks: int, *, beside: bool) -> None:
    """gRPC takes a port over 65535 modulo 65536, and would listen at another one than was said. ranks: with
    those that there is room for. beside: all of them are on the head's host.
    """
    port, first = server.port, server.metrics_port
    if not 0 <= port <= LAST_PORT:
        raise ConfigError(f"server.port = {port} must be 0 (any free one) to {LAST_PORT}")
    if not -1 <= server.health_port <= LAST_PORT:
        raise ConfigError(
            f"server.health_port = {server.health_port} must be -1 (none) or 0 (any free one) to {LAST_PORT}"
        )
    last = first + ranks if first > 0 else first
    if not -1 <= first <= last <= LAST_PORT:
        raise ConfigError(
            f"server.metrics_port = {first} must be -1 (none), 0 (any free ones), or leave room up to "
            f"{LAST_PORT} for one port of the head and one of each of {ranks} ranks"
        )
    for name in ("port", "health_port"):
        taken = getattr(server, name)
        if 0 < first <= taken <= (last if beside else first):
            whose = "the head's" if taken == first else f"rank {taken - first - 1}'s"
            raise ConfigError(
                f"server.{name} = {taken} is {whose} port for metrics: server.metrics_port = {first} takes "
                f"{first} to {last}, one for the head and each of {ranks} ranks"
            )
    if port and port == server.health_port:
        raise ConfigError(
            f"server.health_port = {port} is server.port; give it another one, or 0 for any free"
        )


def check_load_as(load_as: str) -> None:
    """Whether the name is known; the checkpoint's own sizes are checked when it is opened."""
    if load_as:
        try:
            scheme_to_load_as(load_as, BF16)
        except ValueError as error:
            raise ConfigError(f"model.load_as: {error}") from error


@functools.lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a listener at `host`, an address or a name. Every call asks it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
