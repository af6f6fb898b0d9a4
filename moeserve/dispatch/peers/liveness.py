"""`PeerLiveness`: which peers are waited for, and who was late.

A rank waits for its peers for a bounded time. One that does not come is given up: from then on it is neither
waited for nor stored to. The host reads which ranks were given up in host flags, without a word to the
device. The rank that was given up finds that in its own memory, and gives up in turn those who have gone on.
So of two ranks that gave each other up, neither reads what the other writes; only a new dispatcher joins
them again.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

GIVEN_UP_BYTES = 256
"""The first bytes of every rank's peer memory: int32 word r is set once rank r has given this rank up."""

MOST_RANKS = GIVEN_UP_BYTES // 4


class PeerLiveness:
    """What one rank knows of the others: int32 `live [ranks + 1]` on the device, `host_flags [ranks + 1]` on
    the host.

    `live` is 0 for a rank that is neither waited for nor stored to; its last word is the kernels' own.
    `host_flags` holds the sequence number in which each rank was given up, 0 for none; kernels write it. Its
    last word says that all waiting is over; kernels that wait read it now and then. The tensor is pinned.
    """

    def __init__(self, ranks: int, device: str) -> None:
        if ranks > MOST_RANKS:
            raise ValueError(f"peer memory joins at most {MOST_RANKS} ranks, not {ranks}")
        self.live = torch.ones(ranks + 1, dtype=torch.int32, device=device)
        self.host_flags = torch.zeros(ranks + 1, dtype=torch.int32, pin_memory=self.live.is_cuda)
        self._named: set[int] = set()

    def exclude(self, ranks: Iterable[int]) -> None:
        """Gives `ranks` up before the next phase: their tokens count as none. Waits for nothing."""
        for rank in ranks:
            self.live[rank].zero_()

    def interrupt(self) -> None:
        """Ends all waiting, also of phases under way, and names nobody late for it.

        Any thread may call it. It sets a host flag and copies nothing to the device, since a copy was seen to
        wait for the very kernel that it should have ended.
        """
        self.host_flags[-1] = 1
        if not self.live.is_cuda:
            self.live.zero_()

    def late(self) -> tuple[int, ...]:
        """The ranks given up since the last call, as far as the device has come. Waits for nothing."""
        given_up = {rank for rank, sequence in enumerate(self.host_flags[:-1].tolist()) if sequence}
        fresh = tuple(sorted(given_up - self._named))
        self._named |= given_up
        return fresh

    def words(self) -> tuple[Tensor, Tensor]:
        """`live` and `host_flags`, as kernels take them."""
        return self.live, self.host_flags
