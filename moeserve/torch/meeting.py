"""`Meeting`: how ranks of one program tell each other what they bring to their next step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from moeserve.dispatch.group import GroupKind, end_group, group_beside
from moeserve.runtime.launch.torchrun import HostedRank
from moeserve.runtime.rank.all2all import PeersLate
from moeserve.torch.moves import NOTHING

FOLLOWS = -1
"""In place of a layer, by a rank that has none to run and follows the others."""


AS_EXPERTS_MOVE = "about to move experts"


class OutOfStep(RuntimeError):
    """Ranks of one group are not at the same layer; names who is where."""


class Agreed(NamedTuple):
    """What the ranks run next."""

    layer: int  # FOLLOWS: no rank has a layer to run
    lane_rows: tuple[int, ...]  # by lane
    votes: tuple[int, ...] = ()  # by rank, on experts that move


class Meeting(Protocol):
    """How ranks learn what the others bring."""

    def agree(self, layer: int, rows: int, vote: int = NOTHING) -> Agreed:
        """Tells what this rank brings to its next step, and returns what all of them bring."""

    def sum(self, load: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sum over all ranks."""

    def first(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """What the first rank has of it."""

    def close(self) -> None:
        """Ends it."""


class Alone:
    """The meeting of a rank without others."""

    def agree(self, layer: int, rows: int, vote: int = NOTHING) -> Agreed:
        """Returns what it was told."""
        return Agreed(layer, (rows,), (vote,))

    def sum(self, load: NDArray[np.float64]) -> NDArray[np.float64]:
        """The load itself."""
        return load

    def first(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """The slots themselves."""
        return slots

    def close(self) -> None:
        """Does nothing."""


class Exchange:
    """A meeting over a group: one small all-gather a step, on the host."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def agree(self, layer: int, rows: int, vote: int = NOTHING) -> Agreed:
        """Collective over the group. Raises OutOfStep, on all ranks alike, for ranks at different layers, and
        PeersLate where they are not all there in time, or one is gone.
        """
        mine = torch.tensor([layer, rows, vote])
        found = [torch.empty_like(mine) for _ in range(self._group.size())]
        with self._met("at the end of its pass" if layer == FOLLOWS else f"at layer {layer}"):
            dist.all_gather(found, mine, group=self._group)
        told: list[list[int]] = [one.tolist() for one in found]
        at = {rank: here for rank, (here, _, _) in enumerate(told) if here != FOLLOWS}
        if len(set(at.values())) > 1:
            places = ", ".join(f"rank {rank} at layer {here}" for rank, here in at.items())
            raise OutOfStep(f"ranks are not at one layer: {places}; all run the same layers in one order")
        layer = next(iter(at.values()), FOLLOWS)
        return Agreed(layer, tuple(rows for _, rows, _ in told), tuple(vote for *_, vote in told))

    def sum(self, load: NDArray[np.float64]) -> NDArray[np.float64]:
        """Collective; added up in the order of the ranks: all have the same bits. Raises PeersLate."""
        mine = torch.from_numpy(load.copy())
        found = [torch.empty_like(mine) for _ in range(self._group.size())]
        with self._met(AS_EXPERTS_MOVE):
            dist.all_gather(found, mine, group=self._group)
        total: NDArray[np.float64] = torch.stack(found).sum(dim=0).numpy()
        return total

    def first(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Collective. Raises PeersLate."""
        sent = torch.from_numpy(slots.copy())
        with self._met(AS_EXPERTS_MOVE):
            dist.broadcast(sent, group=self._group, group_src=0)
        received: NDArray[np.int32] = sent.numpy()
        return received

    def close(self) -> None:
        """Ends the group."""
        end_group(self._group)

    @contextmanager
    def _met(self, place: str) -> Iterator[None]:
        """Around a collective of this rank at `place`. Raises PeersLate where the others are not there."""
        try:
            yield
        except RuntimeError as failed:
            raise PeersLate(
                f"rank {self._group.rank()}, {place}, did not meet all other ranks within "
                f"step.timeout_seconds: one is late or gone; all close their ways and connect again: {failed}"
            ) from failed


def meeting_of(rank: HostedRank) -> Meeting:
    """The meeting of a rank with the others of its group. Collective over it."""
    if rank.group is None:
        return Alone()
    kind = GroupKind("gloo", rank.kind.timeout)
    return Exchange(group_beside(rank.group, kind))
