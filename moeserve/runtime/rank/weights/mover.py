"""`Mover`: prepares an epoch's copies beside running steps, proves them, and votes."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from moeserve.experts.bank import Bank
from moeserve.experts.checksum import Slot, slot_checksum, slot_checksums
from moeserve.experts.placement import EMPTY
from moeserve.runtime.control.orders import Copy, Order, Staged, Vote
from moeserve.runtime.control.stream import StreamClosed
from moeserve.runtime.rank.weights.copies import Abandoned, Copier
from moeserve.runtime.rank.weights.peers import PeerRefused, Peers

log = logging.getLogger(__name__)

RELEASE_SECONDS = 10.0
TRIES = 3  # copies of one expert from one place whose checksum may be wrong, before the next place is asked


Wanted = tuple[Copy, Slot]
"""What is copied, and the staging storage it goes to."""
Fetch = Callable[[list[Wanted]], list[str]]
"""Fills the storage of each, and returns the owner's checksum of each."""


class Corrupted(RuntimeError):
    """No place gave an expert whose checksum is its owner's."""


class Mover:
    """One thread. Orders and abandonments come from the coordinator's stream; `commit` from the step thread.

    An expert is copied from a peer's GPU of this host, else over a peer's stream, else read from disk. A copy
    whose checksum is not its owner's is fetched again; it is never voted for.
    """

    def __init__(
        self,
        place: Place,
        copier: Copier,
        vote: Callable[[Vote], None],
        wrong: Callable[[Order, str], None],
    ) -> None:
        self._place, self._copier, self._vote, self._wrong = place, copier, vote, wrong
        self._orders: queue.SimpleQueue[Order | Vote | threading.Event | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # around what is wanted and what is staged: commit against abandon
        self._wanted: Order | None = None
        self._ready: Vote | None = None
        self._thread = threading.Thread(target=self._run, name="mover", daemon=True)
        self._thread.start()

    def stage(self, order: Order) -> None:
        """Begins to prepare `order`; one that was under way is dropped."""
        with self._lock:
            self._wanted = order
            self._copier.abandoned.set()
        self._orders.put(order)

    def abandon(self) -> None:
        """Drops what was prepared, or is being prepared; nothing was served of it."""
        with self._lock:
            self._wanted = self._ready = None
            self._copier.abandoned.set()
            self._place.bank.abandon()  # storage a copy may still run into is kept until the next order

    def release(self) -> None:
        """Gives up links to peers and what was mapped of their memory; while no step and no copy runs.

        A dead peer's memory stays taken as long as it is mapped somewhere. It must not be given up while a
        collective waits for that peer: closing waits for the device.
        """
        released = threading.Event()
        self._orders.put(released)
        if not released.wait(RELEASE_SECONDS):
            log.warning("peers' memory is still mapped: a copy under way does not end")

    def commit(self, change: int) -> None:
        """Writes what was staged for `change` into its slots; by the step thread, between two steps.

        The slots are read again afterwards, beside the steps. Raises RuntimeError when something else is
        staged: this rank cannot go on in this generation.
        """
        with self._lock:
            vote, self._wanted, self._ready = self._ready, None, None
            if vote is None or vote.order.change != change:
                staged = "nothing" if vote is None else f"change {vote.order.change}"
                raise RuntimeError(f"change {change} is committed, and {staged} is staged")
            self._place.bank.commit()
            self._place.bank.allow(self._place.staging_slots)
        self._orders.put(vote)

    def close(self) -> None:
        """Ends the thread and the links."""
        self.abandon()
        self._orders.put(None)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            if isinstance(order, threading.Event):
                self._place.peers.close()
                order.set()
                continue
            try:
                if isinstance(order, Vote):
                    self._prove(order)
                else:
                    self._vote_on(order)
            except StreamClosed:
                break  # the coordinator is gone
        self._place.peers.close()

    def _vote_on(self, order: Order) -> None:
        """Prepares an order and votes, unless it is abandoned meanwhile."""
        try:
            self._begin(order)
            vote = Vote(order, tuple(self._copied(order)))
            with self._lock:
                if self._wanted is not order:
                    raise Abandoned
                self._ready = vote
        except Abandoned:
            log.info("epoch %d was abandoned while it was prepared", order.epoch)
            return
        except Exception as error:  # said to the coordinator, which abandons the epoch
            log.warning("epoch %d cannot be prepared", order.epoch, exc_info=error)
            vote = Vote(order, (), f"{type(error).__name__}: {error}")
        self._vote(vote)

    def _begin(self, order: Order) -> None:
        with self._lock:
            if self._wanted is not order:
                raise Abandoned
            self._copier.abandoned.clear()
            self._place.bank.abandon()
            self._place.bank.allow(max(len(order.copies), self._place.staging_slots))
        self._place.use_weights(order.weights)

    def _prove(self, vote: Vote) -> None:
        """Says which slots do not hold what was staged; slots that cannot be read count as wrong."""
        try:
            wrong = self._differing(vote)
        except Exception as error:  # the thread must live: who else would prepare the next epoch
            log.exception("what was committed cannot be read")
            wrong = f"layer {vote.order.layer} cannot be read after its commit: {error}"
        if wrong:
            log.error("%s", wrong)
            self._wrong(vote.order, wrong)

    def _differing(self, vote: Vote) -> str:
        bank, order = self._place.bank, vote.order
        self._copier.after_commit(bank)
        with self._copier.stream():
            found = bank.checksums(order.layer, [one.slot for one in vote.staged])
        return "; ".join(
            f"slot {one.slot} of layer {order.layer}, expert {one.expert}: checksum {checksum} after the "
            f"commit, {one.checksum} was staged"
            for one, checksum in zip(vote.staged, found, strict=True)
            if checksum != one.checksum
        )

    def _copied(self, order: Order) -> Iterator[Staged]:
        """Stages every copy, those of one rank together."""
        rooms = {copy.slot: self._place.bank.room(order.layer, copy.slot) for copy in order.copies}
        self._copier.after_commit(self._place.bank)
        for rank in sorted({copy.source[0] for copy in order.copies}):
            copies = [copy for copy in order.copies if copy.source[0] == rank]
            yield from self._copied_from(order, rank, [(copy, rooms[copy.slot]) for copy in copies])

    def _copied_from(self, order: Order, rank: int, left: list[Wanted]) -> Iterator[Staged]:
        """Stages experts of `rank` by the first way that gives each right."""
        problems: list[str] = []
        corrupted = {copy.slot: 0 for copy, _ in left}
        for path, fetch in self._place.ways(order, rank, self._copier):
            for _ in range(TRIES):
                started = time.perf_counter()
                try:
                    owners = fetch(left)
                except (StreamClosed, PeerRefused, OSError) as error:
                    problems.append(f"{path}: {error}")
                    break
                with self._copier.stream():
                    found = slot_checksums([room for _, room in left])
                seconds, wrong = (time.perf_counter() - started) / len(left), []
                for (copy, room), checksum, owner in zip(left, found, owners, strict=True):
                    if checksum == owner:
                        size = sum(tensor.nbytes for tensor in room.values())
                        times = corrupted[copy.slot]
                        yield Staged(copy.slot, copy.expert, checksum, path, size, seconds, times)
                        continue
                    wrong.append((copy, room))
                    corrupted[copy.slot] += 1
                    problems.append(
                        f"{path}: checksum of expert {copy.expert} {checksum}, the owner's {owner}"
                    )
                    log.error("layer %d, a copy came corrupted, %s", order.layer, problems[-1])
                left = wrong
                if not left:
                    return
        experts = [copy.expert for copy, _ in left]
        raise Corrupted(f"experts {experts} of layer {order.layer} cannot be staged: {'; '.join(problems)}")


@dataclass(frozen=True, eq=False)
class Place:
    """Where one rank's copies come from and go to."""

    rank: int
    host_id: str
    device: str
    bank: Bank
    staging_slots: int
    peers: Peers
    use_weights: Callable[[Sequence[str]], None]
    read: Callable[[int, int, int], Slot]  # (decoder layer, expert, version) -> prepared, from disk

    def ways(self, order: Order, rank: int, copier: Copier) -> Iterator[tuple[str, Fetch]]:
        """The ways to get experts that `rank` holds, the fastest first."""
        if rank == self.rank:
            yield "own", lambda wanted: self._own(order.layer, wanted, copier)
        elif rank != EMPTY:
            address, host = order.peers[rank]
            if host == self.host_id and self.device != "cpu":
                yield "cuda_ipc", lambda wanted: self.peers.map(address, *_asked(order, wanted), copier)
            yield "stream", lambda wanted: self.peers.fetch(address, *_asked(order, wanted), copier)
        yield "disk", lambda wanted: self._disk(order, wanted, copier)

    def _own(self, layer: int, wanted: list[Wanted], copier: Copier) -> list[str]:
        copier.copy([(self.bank.slot(layer, copy.source[1]), room) for copy, room in wanted])
        with copier.stream():
            return self.bank.checksums(layer, [copy.source[1] for copy, _ in wanted])

    def _disk(self, order: Order, wanted: list[Wanted], copier: Copier) -> list[str]:
        found = []
        for copy, room in wanted:
            with copier.stream():
                read = self.read(order.layer, copy.expert, order.version)
                found.append(slot_checksum(read))
            copier.copy([(read, room)])
        return found


def _asked(order: Order, wanted: list[Wanted]) -> tuple[int, list[int], list[Slot]]:
    """Decoder layer, slots of the owner, and the rooms they go to."""
    return order.layer, [copy.source[1] for copy, _ in wanted], [room for _, room in wanted]
