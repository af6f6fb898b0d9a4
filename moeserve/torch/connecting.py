"""`connect`: opens the way to the experts that `Settings` name."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.torch.ways import Way

MODES = ("in_process", "remote")


@dataclass(frozen=True)
class Settings:
    """Where experts are computed, and what that needs to know. Raises ValueError for what does not fit.

    in_process: this process is a rank of its own model server's group; `config` is a file as for `moeserve
    serve`, and all processes of torchrun's world connect together. remote: a service at `address`.
    """

    mode: str = "remote"
    address: str = ""  # remote: host:port of the service
    config: str = ""  # in_process: path of the configuration
    timeout: float = 60.0  # seconds of one call of a service, with all that is tried again

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r} is not one of {', '.join(MODES)}")
        needed = {"in_process": "config", "remote": "address"}[self.mode]
        if not getattr(self, needed):
            raise ValueError(f"mode={self.mode!r} needs `{needed}`")


def connect(settings: Settings) -> Way:
    """Opens the way to the experts; its owner closes it. In process it is collective, and loads experts."""
    if settings.mode == "in_process":
        from moeserve.torch.in_process import InProcess

        return InProcess.of_file(settings.config)
    from moeserve.proto.client import MoeClient
    from moeserve.torch.remote import Remote

    return Remote(MoeClient(settings.address, timeout=settings.timeout))
