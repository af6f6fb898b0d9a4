"""What a rank stages for a change of the epoch, and its vote: values between the head and the ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertCopy:
    """One expert to be staged beside one of this rank's slots."""

    slot: int  # of this rank
    expert: int
    source: tuple[int, int]  # (owner, slot of that owner) that holds it; EMPTY: from disk


@dataclass(frozen=True)
class StageOrder:
    """What one member stages for one epoch."""

    generation: int
    change: int  # its own number: an epoch's may be tried again
    epoch: int
    layer: int  # decoder index
    version: int  # of the weights, where they come from disk
    weights: tuple[str, ...]  # `Epoch.names` by version
    copies: tuple[ExpertCopy, ...]
    peers: dict[int, tuple[str, str]]  # owner -> address of its weights, host id
    owner: int | None = None  # whose place this member fills; None: it holds no experts, and copies none


@dataclass(frozen=True)
class StagedCopy:
    """One expert in its staging slot: where it came from, and what it cost."""

    slot: int
    expert: int
    checksum: str
    path: str  # cuda_ipc, stream, own, disk
    nbytes: int
    seconds: float
    corrupted: int  # copies thrown away because their checksum was not the owner's


@dataclass(frozen=True)
class Vote:
    """This rank's word on an order: staged, or why not."""

    order: StageOrder
    staged: tuple[StagedCopy, ...]
    refused: str = ""
