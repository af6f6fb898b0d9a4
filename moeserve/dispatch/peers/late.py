"""`Attendance`: which peers are waited for, and who was late.

A rank waits for its peers for a bounded time. One that does not come is given up: from then on it is neither
waited for nor stored to, the host can read its name on a board that needs no word with the device, and the
given-up rank finds a farewell in its own memory, so that it gives up in turn and waits for nobody who has
gone on. So two ranks that parted never read what the other writes. They meet again in a new carrier.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

FAREWELL_BYTES = 256
"""The first bytes of every rank's peer memory: int32 word r is set once rank r has given this rank up."""

MOST_RANKS = FAREWELL_BYTES // 4


class Attendance:
    """One rank's view of the others: `live [ranks]` int32 on the device, `board [ranks]` int32 on the host.

    `live` is 0 for a rank that is neither waited for nor stored to. `board` holds the epoch in which a rank
    was given up, 0 for none; it is pinned, and the kernels write it.
    """

    def __init__(self, ranks: int, device: str) -> None:
        if ranks > MOST_RANKS:
            raise ValueError(f"peer memory joins at most {MOST_RANKS} ranks, not {ranks}")
        self.live = torch.ones(ranks, dtype=torch.int32, device=device)
        self.board = torch.zeros(ranks, dtype=torch.int32, pin_memory=self.live.is_cuda)
        self._told: set[int] = set()
        self._nobody = torch.zeros(ranks, dtype=torch.int32, pin_memory=self.live.is_cuda)
        self._aside: torch.cuda.Stream | None = None
        if self.live.is_cuda:
            self._aside = torch.cuda.Stream(self.live.device)  # type: ignore[no-untyped-call]

    def exclude(self, ranks: Iterable[int]) -> None:
        """Gives `ranks` up before the next phase: their tokens count as none. Waits for nothing."""
        for rank in ranks:
            self.live[rank].zero_()

    def interrupt(self) -> None:
        """Nobody is waited for any more, by what is under way neither, and nobody is named late for it.

        From any thread. The kernels that wait hold their stream and may hold every multiprocessor, so the
        word comes by a copy from the host on a stream of its own.
        """
        if self._aside is None:
            self.live.zero_()
            return
        with torch.cuda.stream(self._aside):
            self.live.copy_(self._nobody, non_blocking=True)

    def late(self) -> tuple[int, ...]:
        """Ranks given up since this was last asked, as far as the device has come. Waits for nothing."""
        given_up = {rank for rank, epoch in enumerate(self.board.tolist()) if epoch}
        fresh = tuple(sorted(given_up - self._told))
        self._told |= given_up
        return fresh

    def words(self) -> tuple[Tensor, Tensor]:
        """`live` and `board`, as kernels take them."""
        return self.live, self.board
