"""`HeldEpoch`: the epoch that a member holds experts of, and what it reads to hold another one."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from moeserve.runtime.control.messages import committed_epoch
from moeserve.runtime.control.stream import Message
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.rank.experts import LayerProgress
from moeserve.runtime.rank.rank import Rank
from moeserve.runtime.rank.weights.copies import Abandoned, Copier
from moeserve.runtime.rank.weights.mover import Mover

log = logging.getLogger(__name__)


class HeldEpoch:
    """Fills a rank's experts as an epoch says. `lane` is the number of the lane that this process was started
    with, None for none; `say_here` tells the head, in a generation, that one more layer was read.
    """

    def __init__(self, rank: Rank, lane: int | None, say_here: Callable[[int], None]) -> None:
        self._rank, self._lane, self._say_here = rank, lane, say_here
        self.epoch: Epoch | None = None  # that it holds, or is to hold
        self.adopted: Epoch | None = None  # the last one of a group that it had a part in
        self.lacks: tuple[int, ...] = ()  # positions of layers that are to be read once it has joined

    def prepare(self, epoch: Epoch, generation: int, *, after: bool) -> None:
        """Loads what the epoch gives this member, unless it has it. `after`: the group has served, and where
        this member holds experts, those that it lacks are read once it has joined.
        """
        self._check_lane(epoch)
        self._rank.experts.use_weights(epoch.names)
        self.lacks = ()
        if after and self._rank.loaded:
            self.lacks = self._rank.take(epoch)
        elif self.epoch is None or _loaded(self.epoch) != _loaded(epoch):
            self._load(epoch, generation)
        self.epoch = self.adopted = epoch

    def load_beforehand(self, epoch: Epoch) -> None:
        """Loads the experts of an epoch that this member is to join, in no generation yet."""
        self._check_lane(epoch)
        self._rank.experts.use_weights(epoch.names)
        self._load(epoch, 0)
        self.epoch = epoch

    def commit(self, entry: Message, mover: Mover) -> Epoch:
        """Serves, from the next step on, what the mover has staged for a change; returns the epoch then.

        Raises what the mover raises; the change's layer is then read from disk before it serves.
        """
        if self.epoch is None:
            raise RuntimeError("commit came before prepare")
        epoch, layer = committed_epoch(entry, self.epoch), int(entry["layer"])
        try:
            mover.commit(entry["change"])
        except BaseException:
            self.invalidate(self._rank.served.layers[layer])
            raise
        self._rank.adopt(epoch, layer)
        self.epoch = self.adopted = epoch
        return epoch

    def invalidate(self, layer: int) -> None:
        """Holds no epoch any more: a layer's slots are not what they have to be."""
        self._rank.experts.invalidate(layer)
        self.epoch = None

    def restore(self, position: int, copier: Copier) -> None:
        """Fills what this member lacks of one layer. Raises Abandoned where it holds no epoch."""
        if (epoch := self.epoch) is None:
            raise Abandoned
        self._rank.experts.restore(epoch, position, copier)

    def counts(self) -> Message:
        """What this member has read since its start, and the bytes that it holds."""
        experts = self._rank.experts
        return {"bytes_read": experts.bytes_read, "weight_bytes": experts.bank.nbytes}

    def _check_lane(self, epoch: Epoch) -> None:
        """Raises RuntimeError where this process was started with another lane than its seat has."""
        if (given := epoch.members.at(self._rank.index).lane) != self._lane:
            raise RuntimeError(
                f"seat {self._rank.index} has lane {given}; its process was started with {self._lane}"
            )

    def _load(self, epoch: Epoch, generation: int) -> None:
        started, bar = time.perf_counter(), progress_bar(self._rank.index)

        def told(layers: Iterable[int]) -> Iterator[int]:
            for layer in bar(layers):
                self._say_here(generation)
                yield layer

        before = self._rank.experts.bytes_read
        self._rank.load(epoch, told)
        seconds = max(1e-6, time.perf_counter() - started)
        megabytes = (self._rank.experts.bytes_read - before) / 1e6
        log.info(
            "rank %d: read %.1f MB of expert weights for %d layers in %.2f s, %.1f MB/s",
            *(self._rank.index, megabytes, len(self._rank.served.layers), seconds, megabytes / seconds),
        )


def _loaded(epoch: Epoch) -> tuple[object, ...]:
    """What a member reads experts for: a change of anything else needs no load."""
    return epoch.placement, epoch.versions, epoch.members


def progress_bar(rank: int) -> LayerProgress:
    """A bar over layers while experts are read, on the standard error of rank 0 only."""
    if rank != 0 or not os.isatty(2):
        return lambda layers: layers
    from tqdm import tqdm

    tqdm.set_lock(
        threading.RLock()
    )  # its own is a semaphore of the host, which a killed process leaves behind
    return lambda layers: tqdm(layers, desc="experts", unit="layer")
