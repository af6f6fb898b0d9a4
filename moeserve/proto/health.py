"""Health checks as grpc.health.v1 defines them: one string out, one number back, coded by hand so that a
client needs no package for it.
"""

from __future__ import annotations

SERVICE = "moeserve.v1.FrontService"
"""The service whose health a client asks for."""

METHOD = "/grpc.health.v1.Health/Check"
STATES = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")

_STRING_FIELD_1 = 0x0A
_NUMBER_FIELD_1 = 0x08


def encode_check(service: str) -> bytes:
    """A HealthCheckRequest: `service` in field 1, left out when empty. ValueError over 127 bytes."""
    name = service.encode()
    if len(name) > 127:
        raise ValueError(f"service name {service!r} has {len(name)} bytes; at most 127 are sent")
    return bytes((_STRING_FIELD_1, len(name))) + name if name else b""


def decode_check(reply: bytes) -> str:
    """The state in a HealthCheckResponse; `UNKNOWN` when its number has no name here."""
    if len(reply) >= 2 and reply[0] == _NUMBER_FIELD_1 and reply[1] < len(STATES):
        return STATES[reply[1]]
    return STATES[0]
