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

MODE = "MOESERVE_EXPERTS_MODE"
"""How rows get to the service: `remote`, by gRPC or shared memory; `attached`, by a device lane of a rank on
this host (proto/passes).
"""

POLICIES = ("keep", "recompute")
MODES = ("remote", "attached")


@dataclass(frozen=True)
class Settings:
    """What an operator chose. ValueError: a value that none of it can be."""

    address: str
    timeout: float = 240.0  # below the 300 s after which vLLM gives a forward pass up
    caches: str = "keep"
    credentials: Credentials | None = None
    mode: str = "remote"

    def __post_init__(self) -> None:
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"{TIMEOUT}={self.timeout} must be more than 0 seconds, and finite")
        if self.caches not in POLICIES:
            raise ValueError(f"{CACHES}={self.caches!r} is not one of {', '.join(POLICIES)}")

        if self.mode == "in_process":
            raise ValueError(
                f"{MODE}='in_process' would make an engine's processes the ranks, which is not built for "
                f"engines; moeserve.torch has it for model servers written in torch. Use one of "
                f"{', '.join(MODES)}"
            )
        if self.mode not in MODES:
            raise ValueError(f"{MODE}={self.mode!r} is not one of {', '.join(MODES)}")

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
        if text := environment.get(MODE, "").strip():
            given["mode"] = text
        if text := environment.get(CREDENTIALS, "").strip():
            try:
                given["credentials"] = Credentials.load(text)
            except ValueError as error:
                raise ValueError(f"{CREDENTIALS}: {error}") from error
        return cls(address, **given)  # type: ignore[arg-type]
