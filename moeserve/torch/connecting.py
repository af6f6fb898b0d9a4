"""`connect`: opens the way to the experts that `Settings` name."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from moeserve.proto.client.patience import Patience
from moeserve.proto.credentials import Credentials
from moeserve.proto.passes.attached import ANY_WIRE, Wanted
from moeserve.proto.timeouts import bounded
from moeserve.torch.ways import Way

NEEDED = {"in_process": "config", "attached": "address", "remote": "address"}
MODES = tuple(NEEDED)
AS_THEY_ARE = "as_they_are"
"""Rows travel in their own dtype."""

_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


@dataclass(frozen=True)
class Settings:
    """Where experts are computed, and what that needs to know. Raises ValueError for what does not fit.

    in_process: this process is a rank of its own model server's group; `config` is a file as for `moeserve
    serve`, and all processes of torchrun's world connect together. attached: a service at `address`, one of
    whose ranks is on this host and shares memory with this process. remote: a service at `address`, anywhere.
    """

    mode: str = "remote"
    address: str = ""  # attached, remote: host:port of the service
    config: str = ""  # in_process: path of the configuration
    timeout: float = 60.0  # seconds of one call of a service, with all that is tried again
    model: str = ""  # attached, remote: which one, by name; empty: the only one served
    credentials: Credentials | None = field(default=None, repr=False)  # attached, remote: what is shown
    name: str = "torch"  # attached: of this caller, no other's at its rank
    rank: int | None = None  # attached: whose lane; None: one of this host's, by the name
    rows: int = 256  # attached: most rows of a call
    stages: int = 1  # attached: most calls under way at once
    dtype: str = "bf16"  # attached: of rows on their way: fp32, bf16, fp16
    device: str = "cpu"  # attached: where rows lie on their way: in host memory, or on a GPU (cuda, cuda:1)
    rows_wire: str = ANY_WIRE  # attached, from a GPU: `auto`, `as_they_are`, or rows' wire by name
    layers: tuple[int, ...] = ()  # attached, from a GPU: of a forward pass, in order; (): as served
    one_version: bool = False  # attached: all layers of one forward pass have the same weights
    spin: float | None = None  # attached, from host memory: seconds awake for an answer; None: as cores are

    def __post_init__(self) -> None:
        if self.mode not in NEEDED:
            raise ValueError(f"mode={self.mode!r} is not one of {', '.join(MODES)}")
        needed = NEEDED[self.mode]
        if not getattr(self, needed):
            raise ValueError(f"mode={self.mode!r} needs `{needed}`")
        Patience.of(self.timeout)  # which says what is wrong with it
        if not _DEVICE.fullmatch(self.device):
            raise ValueError(f"device={self.device!r} is neither cpu nor cuda, which alone may have an index")
        if self.device != "cpu" and self.mode != "attached":
            raise ValueError(f"mode={self.mode!r} takes rows of any device; leave device={self.device!r} out")
        if self.rows_wire not in (ANY_WIRE, AS_THEY_ARE) and self.device == "cpu":
            raise ValueError(
                f"rows_wire={self.rows_wire!r} is of rows from a GPU; name its device, or leave it out"
            )
        if self.layers and self.device == "cpu":
            raise ValueError(
                f"layers={self.layers} are of rows from a GPU; name its device, or leave them out"
            )
        if self.mode == "attached":
            return
        if self.one_version:
            raise ValueError(
                f"mode={self.mode!r} does not look at versions of the weights; one_version=True needs "
                "mode='attached'"
            )
        if self.rank is not None:
            raise ValueError(f"mode={self.mode!r} takes no lane by its rank; leave rank={self.rank} out")


def connect(settings: Settings) -> Way:
    """Opens the way to the experts; its owner closes it. In process it is collective, and loads experts."""
    if settings.mode == "in_process":
        from moeserve.torch.in_process import InProcess

        return InProcess.of_file(settings.config)
    if settings.mode == "attached":
        return _attached(settings) if settings.device == "cpu" else _attached_device(settings)
    from moeserve.proto.client import MoeClient
    from moeserve.torch.remote import Remote

    return Remote(
        MoeClient(
            settings.address,
            model=settings.model,
            timeout=settings.timeout,
            credentials=settings.credentials,
        )
    )


def _attached(settings: Settings) -> Way:
    from moeserve.proto.passes.attached import AttachedLane
    from moeserve.torch.attached import Attached

    wanted = wanted_of(settings)
    return Attached(
        lambda seconds: AttachedLane.attach(settings.address, wanted, seconds),
        settings.timeout,
        one_version=settings.one_version,
    )


def wanted_of(settings: Settings) -> Wanted:
    """The lane that an attached caller asks for. Raises ValueError for what it cannot be."""
    return Wanted(
        settings.name,
        settings.rows,
        settings.stages,
        settings.dtype,
        model=settings.model,
        rank=settings.rank,
        timeout=settings.timeout,
        spin=settings.spin,
        credentials=settings.credentials,
    )


def _attached_device(settings: Settings) -> Way:
    import torch

    from moeserve.dispatch.mail.layout import MailLayout
    from moeserve.proto.client import MoeClient
    from moeserve.proto.passes.attached import AttachedLane
    from moeserve.torch.attached_device import AttachedDevice

    device = torch.device(settings.device)
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    shown = settings.credentials
    with MoeClient(
        settings.address, model=settings.model, timeout=settings.timeout, credentials=shown
    ) as client:
        layer = client.model().layers[0]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[settings.dtype]
    sizes = (settings.rows, settings.stages, layer.hidden, layer.experts, layer.top_k)
    wanted = wanted_of(settings)
    return AttachedDevice(
        lambda said: AttachedLane.attach(
            settings.address,
            replace(wanted, device=said.device, answers_handle=said.answers, rows_wire=said.rows_wire),
        ),
        MailLayout(*sizes, dtype),
        device,
        bounded(settings.timeout),
        settings.layers,
        one_version=settings.one_version,
        rows_wire="" if settings.rows_wire == AS_THEY_ARE else settings.rows_wire,
    )
