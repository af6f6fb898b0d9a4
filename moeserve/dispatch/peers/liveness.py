"""`PeerLiveness`: which peers are waited for, and who was late.

A rank waits for its peers for a bounded time. One that does not come is given up: from then on it is neither
waited for nor stored to, the host can read its name in host flags that needs no word with the device, and the
given-up rank finds a farewell in its own memory, so that it gives up in turn and waits for nobody who has
gone on. So two ranks that parted never read what the other writes. They meet again in a new dispatcher.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

GIVEN_UP_BYTES = 256
"""The first bytes of every rank's peer memory: int32 word r is set once rank r has given this rank up."""

MOST_RANKS = GIVEN_UP_BYTES // 4


class PeerLiveness:
    """One rank's view of the others: int32 `live [ranks + 1]` on the device, `host_flags [ranks + 1]` on the
    host.

    `live` is 0 for a rank that is neither waited for nor stored to; its last word is the kernels' own.
    `host_flags` holds the sequence number in which a rank was given up, 0 for none, and a last word that says
    that all is over; it is pinned, the kernels write the former and now and then read the latter while they
    wait.
    """

    def __init__(self, ranks: int, device: str) -> None:
        if ranks > MOST_RANKS:
            raise ValueError(f"peer memory joins at most {MOST_RANKS} ranks, not {ranks}")
        self.live = torch.ones(ranks + 1, dtype=torch.int32, device=device)
        self.host_flags = torch.zeros(ranks + 1, dtype=torch.int32, pin_memory=self.live.is_cuda)
        self._told: set[int] = set()

    def exclude(self, ranks: Iterable[int]) -> None:
        """Gives `ranks` up before the next phase: their tokens count as none. Waits for nothing."""
        for rank in ranks:
            self.live[rank].zero_()

    def interrupt(self) -> None:
        """Nobody is waited for any more, by what is under way neither, and nobody is named late for it.

        From any thread, and without a word to the device: a copy to it was seen to wait for the kernel that
        it should have ended. Whoever waits reads the host_flags.
        """
        self.host_flags[-1] = 1
        if not self.live.is_cuda:
            self.live.zero_()

    def late(self) -> tuple[int, ...]:
        """Ranks given up since this was last asked, as far as the device has come. Waits for nothing."""
        given_up = {rank for rank, sequence in enumerate(self.host_flags[:-1].tolist()) if sequence}
        fresh = tuple(sorted(given_up - self._told))
        self._told |= given_up
        return fresh

    def words(self) -> tuple[Tensor, Tensor]:
        """`live` and `host_flags`, as kernels take them."""
        return self.live, self.host_flags
