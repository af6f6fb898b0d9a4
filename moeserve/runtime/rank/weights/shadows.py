"""`Shadows`: copies in host memory of the experts that a member takes over when another owner is lost.

They are prepared as a slot holds them, so that taking over is one copy within the host, or from the host to
its GPU. Which experts they are follows from the epoch alone.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from moeserve.device.huge_pages import empty_in_huge_pages
from moeserve.experts.bank import Bank
from moeserve.experts.checksum import Slot, slot_checksum
from moeserve.experts.cover.breather import Breather
from moeserve.proto.texts import clipped
from moeserve.runtime.control.shadowed import Shadowed
from moeserve.runtime.control.stream import StreamClosed
from moeserve.runtime.epoch import Epoch, shadows_of
from moeserve.runtime.rank.weights.copies import Abandoned, Copier
from moeserve.runtime.rank.weights.peers import HeldExpert, PeerRefused, Peers

log = logging.getLogger(__name__)

ALIGNED = 64  # bytes that a tensor begins at a multiple of
NICENESS = 10  # of the thread that fills them: steps come first
TRIES = 3  # copies of one expert from its owner whose checksum may be wrong, before the disk is read
ROUNDS = 3  # in which owners are asked for what they did not give; then the disk is read
NEWS_SECONDS = 1.0  # between these, for word of another epoch
SETTLED_SECONDS = 0.5  # without a change, before shadows are filled: callers wait for what comes after a loss
CHANGING_SECONDS = 5.0  # for which changes that follow one another put that off

PeerAddresses = Mapping[int, str]
"""By owner: the address at which its process gives its experts."""


class HeldExperts(Protocol):
    """What a member holds, as `RankExperts` has it."""

    bank: Bank

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder indices by position."""
        ...

    def missing(self, epoch: Epoch) -> tuple[int, ...]:
        """Positions of the layers that lack experts."""
        ...

    def read(self, layer: int, expert: int, version: int) -> Slot:
        """One expert from its checkpoint, prepared."""
        ...


class Shadows:
    """One thread, which fills them; `find` may be called by any.

    `limit` bounds their bytes (0: none); layers come in their order, and what does not fit is left to the
    disk. `peers` and `copier` are this thread's alone; the copier bounds the bytes a second. A shadow is
    copied from the owner that holds its expert and proved by its checksum; the disk is read only where the
    owner gives nothing. `tell` is told what is there, once an epoch's shadows are filled.
    """

    def __init__(
        self, index: int, experts: HeldExperts, peers: Peers, copier: Copier, limit: int = 0
    ) -> None:
        self._index, self._experts, self._limit = index, experts, limit
        self._peers, self._copier = peers, copier
        self.tell: Callable[[Shadowed], None] = lambda shadowed: None
        self.bytes_from_peers = self.bytes_from_disk = 0
        self._kept: dict[HeldExpert, Slot] = {}
        self._news = threading.Condition()  # around those below
        self._epoch: Epoch | None = None
        self._changed = False  # since the thread last looked
        self._behind: float | None = None  # since when they are those of an epoch before
        self._addresses: PeerAddresses = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="shadows", daemon=True)
        self._thread.start()

    @property
    def nbytes(self) -> int:
        """Bytes of the shadows."""
        return sum(tensor.nbytes for slot in list(self._kept.values()) for tensor in slot.values())

    def find(self, layer: int, expert: int, version: int) -> Slot | None:
        """The shadow of an expert of `layer` (decoder index); None where there is none of that version."""
        return self._kept.get(HeldExpert(layer, expert, version))

    def renew(self, epoch: Epoch) -> None:
        """Has the shadows be those of `epoch`, once its slots lack nothing."""
        with self._news:
            self._epoch, self._changed = epoch, True
            self._news.notify_all()

    def meet(self, addresses: PeerAddresses) -> None:
        """Says where the owners of the group's experts are reached from now on; begins to fill."""
        with self._news:
            self._addresses, self._changed = dict(addresses), True
            self._news.notify_all()

    def close(self) -> None:
        """Ends the thread; the shadows that are there stay."""
        with self._news:
            self._closed = True
            self._copier.abandoned.set()
            self._news.notify_all()

    def _run(self) -> None:
        with suppress(AttributeError, PermissionError):  # a system without niceness of threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            while (epoch := self._next()) is not None:
                try:
                    self._refill(epoch)
                except (Abandoned, StreamClosed):
                    continue  # of the head's stream: it is gone, and so is this member soon
                except Exception:
                    log.exception("rank %d: shadows of epoch %d cannot be filled", self._index, epoch.number)
        finally:
            self._peers.close()

    @property
    def _has_work(self) -> bool:
        """Something changed, and the group has served: owners' addresses are known."""
        return self._changed and self._epoch is not None and bool(self._addresses)

    def _next(self) -> Epoch | None:
        """The epoch to fill shadows for, once it has changed and is settled; None when they are closed."""
        with self._news:
            self._news.wait_for(lambda: self._closed or self._has_work)
            self._behind = self._behind or time.monotonic()
            until = self._behind + CHANGING_SECONDS
            self._changed = False
            while self._news.wait_for(lambda: self._closed or self._changed, self._settling(until)):
                if self._closed:
                    return None
                self._changed = False
            return self._epoch

    @staticmethod
    def _settling(until: float) -> float:
        return min(SETTLED_SECONDS, max(0.0, until - time.monotonic()))

    def _refill(self, epoch: Epoch) -> None:
        """Drops the shadows that `epoch` needs no more, and fills those that it needs.

        While slots lack experts, all are kept: those of the epoch before are what fills the slots, and what
        another loss would take. This is called again when they are filled.
        """
        if self._experts.missing(epoch):
            return
        wanted = self._wanted(epoch)
        self._drop(set().union(*wanted.values()))
        left = [(at, each) for at, experts in wanted.items() for each in experts if each not in self._kept]
        silent = set[int]()  # owners that gave nothing at all
        for ask in (True,) * ROUNDS + (False,):
            left = [one for one in left if not self._fill(epoch, one, silent if ask else None)]
            if not left:
                break
            if ask:
                self._wait_for_news()
        full = [at for at, experts in wanted.items() if all(each in self._kept for each in experts)]
        self._behind = None
        self.tell(Shadowed(epoch.number, frozenset(full), self.nbytes))

    def _wanted(self, epoch: Epoch) -> dict[int, list[HeldExpert]]:
        """What shadows are to be of, by position."""
        owner = epoch.members.at(self._index).owner if self._index in epoch.members.seats else None
        found = {} if owner is None else shadows_of(epoch, owner, Breather().breathe)
        layers = self._experts.layers
        return {
            at: [HeldExpert(layers[at], expert, epoch.version(at)) for expert in experts]
            for at, experts in found.items()
        }

    def _drop(self, kept: set[HeldExpert]) -> None:
        """Forgets shadows that are not in `kept`. Nothing else is written where they lay."""
        for each in [one for one in self._kept if one not in kept]:
            del self._kept[each]

    def _fill(self, epoch: Epoch, one: tuple[int, HeldExpert], silent: set[int] | None) -> bool:
        """Makes one shadow, of a layer's position and an expert there: from an owner that is not `silent`,
        or, for None, from disk. Whether it is done with: it is there, or there is no room for it.

        Raises Abandoned where another epoch is wanted by now.
        """
        position, which = one
        with self._news:
            if self._changed or self._closed:
                raise Abandoned
        like = self._experts.bank.slot(which.layer, 0)
        size = sum(tensor.nbytes for tensor in like.values())
        if self._limit and self.nbytes + size > self._limit:
            return True
        room = _host_memory(like)
        if silent is None:
            made = self._from_disk(which, room)
        else:
            slots = epoch.placement.replicas(position, which.expert).tolist()
            owners = [divmod(slot, epoch.placement.slots_per_owner) for slot in slots]
            made = self._from_owner([each for each in owners if each[0] not in silent], which, room, silent)
        if made:
            self._kept[which] = room
        return made

    def _from_owner(
        self, owners: list[tuple[int, int]], which: HeldExpert, room: dict[str, Tensor], silent: set[int]
    ) -> bool:
        """Copies an expert from one of `owners` by the slot that holds it; whether one gave it right. Those
        that are not reached become silent.
        """
        for owner, at in owners:
            if (address := self._addresses.get(owner)) is None:
                silent.add(owner)
                continue
            try:
                for _ in range(TRIES):
                    given = self._peers.fetch_held(address, which, at, room, self._copier)
                    if slot_checksum(room) == given:
                        self.bytes_from_peers += sum(tensor.nbytes for tensor in room.values())
                        return True
                    log.error("a shadow of %s came from owner %d corrupted", which, owner)
            except PeerRefused as error:  # it may be reading that layer: it is asked again later
                log.info("owner %d gives no shadow of %s now: %s", owner, which, clipped(str(error)))
            except (StreamClosed, OSError) as error:
                log.info("owner %d gives no shadows: %s", owner, clipped(str(error)))
                silent.add(owner)
        return False

    def _wait_for_news(self) -> None:
        """Waits for a moment: an owner gives nothing when it is lost, or its slots change, and another epoch
        follows. Raises Abandoned when one has.
        """
        with self._news:
            if self._news.wait_for(lambda: self._changed or self._closed, NEWS_SECONDS):
                raise Abandoned

    def _from_disk(self, which: HeldExpert, room: dict[str, Tensor]) -> bool:
        """Reads an expert from its checkpoint; whether it could be read."""
        try:
            with self._copier.stream():
                found = self._experts.read(which.layer, which.expert, which.version)
            self._copier.copy([(found, room)])
        except (OSError, ValueError) as error:
            log.warning("a shadow of %s cannot be read: %s", which, clipped(str(error)))
            return False
        self.bytes_from_disk += sum(tensor.nbytes for tensor in room.values())
        return True


def _host_memory(like: Slot) -> dict[str, Tensor]:
    """Host memory for one expert, of the dtypes and shapes of a slot: page-locked beside a GPU, and else one
    piece in huge pages, which a killed process gives back soon.
    """
    if any(tensor.is_cuda for tensor in like.values()):
        return {name: torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for name, one in like.items()}
    sizes = [-(-one.nbytes // ALIGNED) * ALIGNED for one in like.values()]
    pieces = empty_in_huge_pages((sum(sizes),), torch.uint8).split_with_sizes(sizes)
    return {
        name: piece[: one.nbytes].view(one.dtype).view(one.shape)
        for (name, one), piece in zip(like.items(), pieces, strict=True)
    }
