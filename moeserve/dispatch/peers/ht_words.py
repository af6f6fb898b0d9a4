"""One rank's memory as the high-throughput carrier's twin sees it, and waiting for words in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.dispatch.peers.ht_layout import DONE, Layout
from moeserve.dispatch.peers.late import Attendance

POLL_SECONDS = 5e-5

Words = npt.NDArray[np.uint64]


class Sections:
    """One rank's memory, section by section."""

    def __init__(self, layout: Layout, memory: Tensor) -> None:
        ranks, channels = layout.ranks, layout.channels
        flat = memory.numpy()

        def section(name: str, dtype: type, shape: tuple[int, ...]) -> npt.NDArray[np.generic]:
            start = layout.starts[name]
            return flat[start : start + layout.sizes[name]].view(dtype).reshape(shape)

        def words(name: str, *shape: int) -> Words:
            return section(name, np.uint64, (ranks, *shape))  # type: ignore[return-value]

        self.farewell = flat[: 4 * ranks].view(np.uint32)
        self.counted, self.counted_credit = words("COUNTED"), words("COUNTED_CREDIT")
        self.counts = section("COUNTS", np.int32, (ranks, layout.slots))
        self.positioned = words("POSITIONED", layout.blocks)
        self.progress, self.credit = words("PROGRESS", channels), words("CREDIT", channels)
        self.back_progress, self.back_credit = (
            words("BACK_PROGRESS", channels),
            words("BACK_CREDIT", channels),
        )
        rows = (ranks, channels, layout.channel_rows)
        self.rows = torch.from_numpy(section("ROWS", np.uint8, (*rows, layout.row_stride)))
        self.back = torch.from_numpy(section("BACK", np.uint8, (*rows, layout.answer_bytes)))


class Wait:
    """Waiting in one phase of one epoch, at most until its deadline."""

    def __init__(
        self, mine: Sections, all_: list[Sections], peers: Attendance, rank: int, until: tuple[int, float]
    ) -> None:
        self._mine, self._all, self._peers, self._rank = mine, all_, peers, rank
        self.epoch, self._deadline = until

    def present(self) -> Iterator[tuple[int, Sections]]:
        """The live ranks and their memory."""
        return ((peer, there) for peer, there in enumerate(self._all) if int(self._peers.live[peer]))

    def until(self, peer: int, here: Callable[[], bool]) -> bool:
        """Waits until `here()`; False when `peer` is given up, now or before."""
        while int(self._peers.live[peer]):
            if here():
                return True
            if time.monotonic() > self._deadline or self._mine.farewell[peer]:
                self._peers.live[peer] = 0
                self._peers.board[peer] = self.epoch
                self._all[peer].farewell[self._rank] = self.epoch
            time.sleep(POLL_SECONDS)
        return False

    def number(self, peer: int, words: Words, channel: int) -> int | None:
        """The last number of `peer`'s channel, waited for; None when it does not come."""

        def last() -> bool:
            word = int(words[peer, channel])
            return epoch_of(word) == self.epoch and bool(word & DONE)

        return int(words[peer, channel]) & (DONE - 1) if self.until(peer, last) else None


def word_of(epoch: int, number: int) -> int:
    """A word: an epoch above, a number below."""
    return epoch << 32 | number


def epoch_of(word: int) -> int:
    """The epoch of a word."""
    return word >> 32


def holds(words: Words, at: int | tuple[int, int], epoch: int) -> bool:
    """Whether the word `at` is of `epoch`."""
    return epoch_of(int(words[at])) == epoch
