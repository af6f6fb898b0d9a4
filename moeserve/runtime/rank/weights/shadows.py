"""`Shadows`: copies in host memory of the experts that a member takes over when another owner is lost.

They are prepared as a slot holds them, so that taking over is one copy within the host, or from the host to
its GPU. Which experts they are follows from the epoch alone.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
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
from moeserve.runtime.rank.host_threads import as_here
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
SPARE_SECONDS = 600.0  # without a change, after which page-locked memory is freed that no shadow needs
FREE_SECONDS = 1.0  # between two pieces of it

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


class Lent(dict[str, Tensor]):
    """A shadow as `find` gives it: as long as somebody has it, nothing else is written where it lies."""


class _Room:
    """Host memory for one shadow, and those who read it."""

    def __init__(self, slot: dict[str, Tensor]) -> None:
        self.slot = slot
        self.nbytes = sum(tensor.nbytes for tensor in slot.values())
        self.page_locked = page_locked(slot)
        self._readers: list[weakref.ref[Lent]] = []

    def lend(self) -> Lent:
        """What a reader is given."""
        lent = Lent(self.slot)
        self._readers = [one for one in self._readers if one() is not None]
        self._readers.append(weakref.ref(lent))
        return lent

    def fits(self, like: Slot) -> bool:
        """Whether a shadow of such a slot may be written here now."""
        if any(one() is not None for one in self._readers) or self.slot.keys() != like.keys():
            return False
        sizes = ((self.slot[name], one) for name, one in like.items())
        return all((mine.dtype, mine.shape) == (one.dtype, one.shape) for mine, one in sizes)


class Shadows:
    """One thread, which fills them; `find` may be called by any.

    `limit` bounds their bytes (0: none); layers come in their order, and what does not fit is left to the
    disk. Page-locked memory of a shadow that is needed no more is kept for those that come next, as when a
    lost owner is back: the driver takes seconds to free 10 GB of it, and launches no step meanwhile.

    `peers` and `copier` are this thread's alone; the copier bounds the bytes a second. A shadow is copied
    from the owner that holds its expert and proved by its checksum; the disk is read only where the owner
    gives nothing. `tell` is told what is there, once an epoch's shadows are filled.
    """

    def __init__(
        self, index: int, experts: HeldExperts, peers: Peers, copier: Copier, limit: int = 0
    ) -> None:
        self._index, self._experts, self._limit = index, experts, limit
        self._peers, self._copier = peers, copier
        self.tell: Callable[[Shadowed], None] = lambda shadowed: None
        self.bytes_from_peers = self.bytes_from_disk = 0
        self._kept: dict[HeldExpert, _Room] = {}
        self._spare: list[_Room] = []  # page-locked
        self._lock = threading.Lock()  # around both, where rooms come or go
        self._news = threading.Condition()  # around those below
        self._epoch: Epoch | None = None
        self._changed = False  # since the thread last looked
        self._behind: float | None = None  # since when they are those of an epoch before
        self._addresses: PeerAddresses = {}
        self._closed = False
        self._thread = threading.Thread(target=as_here(self._run), name="shadows", daemon=True)
        self._thread.start()

    @property
    def nbytes(self) -> int:
        """Bytes of the shadows."""
        with self._lock:
            return sum(room.nbytes for room in self._kept.values())

    @property
    def spare_bytes(self) -> int:
        """Bytes of memory that is kept for other shadows."""
        with self._lock:
            return sum(room.nbytes for room in self._spare)

    def find(self, layer: int, expert: int, version: int) -> Lent | None:
        """The shadow of an expert of `layer` (decoder index); None where there is none of that version."""
        with self._lock:
            room = self._kept.get(HeldExpert(layer, expert, version))
            return None if room is None else room.lend()

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
        """The epoch to fill shadows for, once it has changed and is settled; None when they are closed. Spare
        memory that nothing has needed for long is freed meanwhile, little by little.
        """
        while not self._comes(SPARE_SECONDS):
            while self._spare and not self._comes(FREE_SECONDS):
                self._free_one()
        with self._news:
            self._behind = self._behind or time.monotonic()
            until = self._behind + CHANGING_SECONDS
            self._changed = False
            while self._news.wait_for(lambda: self._closed or self._changed, self._settling(until)):
                if self._closed:
                    return None
                self._changed = False
            return self._epoch

    def _comes(self, seconds: float) -> bool:
        """Whether there is something to do within so many seconds."""
        with self._news:
            return self._news.wait_for(lambda: self._closed or self._has_work, seconds)

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
        """Forgets shadows that are not in `kept`."""
        with self._lock:
            gone = [self._kept.pop(each) for each in [one for one in self._kept if one not in kept]]
            self._spare += [room for room in gone if room.page_locked]

    def _room(self, like: Slot) -> _Room | None:
        """Memory for a shadow of such a slot; None where `limit` leaves none."""
        with self._lock:
            found = next((room for room in self._spare if room.fits(like)), None)
            if found is not None:
                self._spare.remove(found)
                return found
        size = sum(tensor.nbytes for tensor in like.values())
        if self._limit and self.nbytes + size > self._limit:
            return None
        while self._limit and self.nbytes + self.spare_bytes + size > self._limit:
            self._free_one()  # of other sizes, or still read
        return _Room(_host_memory(like))

    def _free_one(self) -> None:
        """Gives spare memory of one shadow back to the driver, in tens of milliseconds."""
        with self._lock:
            room = self._spare.pop(0) if self._spare else None
        del room  # not while others wait to find one

    def _fill(self, epoch: Epoch, one: tuple[int, HeldExpert], silent: set[int] | None) -> bool:
        """Makes one shadow, of a layer's position and an expert there: from an owner that is not `silent`,
        or, for None, from disk. Whether it is done with: it is there, or there is no room for it.

        Raises Abandoned where another epoch is wanted by now.
        """
        position, which = one
        with self._news:
            if self._changed or self._closed:
                raise Abandoned
        room = self._room(self._experts.bank.slot(which.layer, 0))
        if room is None:
            return True
        made = False
        try:
            if silent is None:
                made = self._from_disk(which, room.slot)
            else:
                slots = epoch.placement.replicas(position, which.expert).tolist()
                owners = [divmod(slot, epoch.placement.slots_per_owner) for slot in slots]
                heard = [each for each in owners if each[0] not in silent]
                made = self._from_owner(heard, which, room.slot, silent)
        finally:
            with self._lock:
                if made:
                    self._kept[which] = room
                elif room.page_locked:
                    self._spare.append(room)
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


def page_locked(slot: Slot) -> bool:
    """Whether the driver knows this memory, so that a GPU's engines copy from it."""
    return any(tensor.is_pinned() for tensor in slot.values())


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
