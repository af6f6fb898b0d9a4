"""The settings of plug-ins that engines load by an entry point: environment variables, which every process of
an engine inherits. One of them, MOESERVE_EXPERTS, chooses the plug-in; without it nothing changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from moeserve.proto.credentials import Credentials

ADDRESS = "MOESERVE_EXPERTS"
"""`host:port` of the service. Unset or empty: the plug-in does nothing, and imports no engine."""

TIMEOUT = "MOESERVE_EXPERTS_TIMEOUT"
"""Seconds that one layer's call may take, over every attempt, and that a start waits for the service."""

CACHES = "MOESERVE_EXPERTS_CACHES"
"""What becomes of key-value caches that were made with weights from before a reload: `keep` or `recompute`.
"""

CREDENTIALS = "MOESERVE_EXPERTS_CREDENTIALS"
"""TOML file of what to trust and show (proto/credentials.py). Unset or empty: a plain connection."""

POLICIES = ("keep", "recompute")


@dataclass(frozen=True)
class Settings:
    """What an operator chose. ValueError: a value that none of it can be."""

    address: str
    timeout: float = 240.0  # below the 300 s after which vLLM gives a forward pass up
    caches: str = "keep"
    credentials: Credentials | None = None

    def __post_init__(self) -> None:
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"{TIMEOUT}={self.timeout} must be more than 0 seconds, and finite")
        if self.caches not in POLICIES:
            raise ValueError(f"{CACHES}={self.caches!r} is not one of {', '.join(POLICIES)}")

    @classmethod
    def chosen(cls, environment: Mapping[str, str]) -> Settings | None:
        """The settings in `environment`, or None where it does not choose the plug-in."""
        address = environment.get(ADDRESS, "").strip()
        if not address:
            return None
        given: dict[str, float | str | Credentials] = {}
        if text := environment.get(TIMEOUT, "").strip():
            try:
                given["timeout"] = float(text)
            except ValueError:
                raise ValueError(f"{TIMEOUT}={text!r} must be a number of seconds") from None
        if text := environment.get(CACHES, "").strip():
            given["caches"] = text
        if text := environment.get(CREDENTIALS, "").strip():
            try:
                given["credentials"] = Credentials.load(text)
            except ValueError as error:
                raise ValueError(f"{CREDENTIALS}: {error}") from error
        return cls(address, **given)  # type: ignore[arg-type]
