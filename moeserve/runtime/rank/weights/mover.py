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
from moeserve.runtime.control.orders import ExpertCopy, StagedCopy, StageOrder, Vote
from moeserve.runtime.control.stream import StreamClosed, StreamSilent
from moeserve.runtime.rank.host_threads import as_here
from moeserve.runtime.rank.weights.copies import Abandoned, Copier
from moeserve.runtime.rank.weights.peers import PeerRefused, Peers

log = logging.getLogger(__name__)

RELEASE_SECONDS = 10.0
FROM_PEER = ("cuda_ipc", "stream")  # paths that a peer's process has to run for
TRIES = 3  # copies of one expert by one path whose checksum may be wrong, before the next path is tried


CopyInto = tuple[ExpertCopy, Slot]
"""What is copied, and the staging storage it goes to."""
Fetch = Callable[[list[CopyInto]], list[str]]
"""Fills the storage of each, and returns the owner's checksum of each."""


class Corrupted(RuntimeError):
    """No path gave an expert whose checksum is its owner's."""


class Mover:
    """One thread. Orders and abandonments come from the coordinator's stream; `commit` from the step thread.

    An expert is copied from a peer's GPU of this host, else over a peer's stream, else read from disk; a peer
    that gives nothing for too long is left for the disk. A copy
    whose checksum is not its owner's is fetched again; it is never voted for.
    """

    def __init__(
        self,
        sources: CopySources,
        copier: Copier,
        send_vote: Callable[[Vote], None],
        report_corruption: Callable[[StageOrder, str], None],
    ) -> None:
        self._sources, self._copier = sources, copier
        self._send_vote, self._report_corruption = send_vote, report_corruption
        # told of a layer's slots right before they are written
        self.before_commit: Callable[[int, Sequence[int]], None] = lambda layer, slots: None
        self._orders: queue.SimpleQueue[StageOrder | Vote | threading.Event | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # around what is wanted and what is staged: commit against abandon
        self._wanted: StageOrder | None = None
        self._ready: Vote | None = None
        self._thread = threading.Thread(target=as_here(self._run), name="mover", daemon=True)
        self._thread.start()

    def stage(self, order: StageOrder) -> None:
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
            self._sources.bank.abandon()  # storage a copy may still run into is kept until the next order

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
            self.before_commit(vote.order.layer, [one.slot for one in vote.staged])
            self._sources.bank.commit()
            self._sources.bank.allow(self._sources.staging_slots)
        self._orders.put(vote)

    def close(self) -> None:
        """Ends the thread and the links."""
        self.abandon()
        self._orders.put(None)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            if isinstance(order, threading.Event):
                self._sources.peers.close()
                order.set()
                continue
            try:
                if isinstance(order, Vote):
                    self._verify(order)
                else:
                    self._vote_on(order)
            except StreamClosed:
                break  # the coordinator is gone
        self._sources.peers.close()

    def _vote_on(self, order: StageOrder) -> None:
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
        self._send_vote(vote)

    def _begin(self, order: StageOrder) -> None:
        with self._lock:
            if self._wanted is not order:
                raise Abandoned
            self._copier.abandoned.clear()
            self._sources.bank.abandon()
            self._sources.bank.allow(max(len(order.copies), self._sources.staging_slots))
        self._sources.use_weights(order.weights)

    def _verify(self, vote: Vote) -> None:
        """Says which slots do not hold what was staged; slots that cannot be read count as wrong."""
        try:
            wrong = self._differing(vote)
        except Exception as error:  # the thread must live: who else would prepare the next epoch
            log.exception("what was committed cannot be read")
            wrong = f"layer {vote.order.layer} cannot be read after its commit: {error}"
        if wrong:
            log.error("%s", wrong)
            self._report_corruption(vote.order, wrong)

    def _differing(self, vote: Vote) -> str:
        bank, order = self._sources.bank, vote.order
        self._copier.after_commit(bank)
        with self._copier.stream():
            found = bank.checksums(order.layer, [one.slot for one in vote.staged])
        return "; ".join(
            f"slot {one.slot} of layer {order.layer}, expert {one.expert}: checksum {checksum} after the "
            f"commit, {one.checksum} was staged"
            for one, checksum in zip(vote.staged, found, strict=True)
            if checksum != one.checksum
        )

    def _copied(self, order: StageOrder) -> Iterator[StagedCopy]:
        """Stages every copy, those of one owner together."""
        rooms = {copy.slot: self._sources.bank.room(order.layer, copy.slot) for copy in order.copies}
        self._copier.after_commit(self._sources.bank)
        for owner in sorted({copy.source[0] for copy in order.copies}):
            copies = [copy for copy in order.copies if copy.source[0] == owner]
            yield from self._copied_from(order, owner, [(copy, rooms[copy.slot]) for copy in copies])

    def _copied_from(self, order: StageOrder, owner: int, left: list[CopyInto]) -> Iterator[StagedCopy]:
        """Stages experts of `owner` by the first path that gives each right."""
        problems: list[str] = []
        corrupted = {copy.slot: 0 for copy, _ in left}
        silent = False
        for path, fetch in self._sources.paths(order, owner, self._copier):
            if silent and path in FROM_PEER:
                continue  # it would be waited for as long again
            for _ in range(TRIES):
                started = time.perf_counter()
                try:
                    owners = fetch(left)
                except (StreamClosed, PeerRefused, OSError) as error:
                    problems.append(f"{path}: {error}")
                    silent = isinstance(error, StreamSilent)
                    log.warning(
                        "layer %d: owner %d gives no copy, the next path is tried: %s",
                        order.layer,
                        owner,
                        problems[-1],
                    )
                    break
                with self._copier.stream():
                    found = slot_checksums([room for _, room in left])
                seconds, wrong = (time.perf_counter() - started) / len(left), []
                for (copy, room), checksum, given in zip(left, found, owners, strict=True):
                    if checksum == given:
                        size = sum(tensor.nbytes for tensor in room.values())
                        times = corrupted[copy.slot]
                        yield StagedCopy(copy.slot, copy.expert, checksum, path, size, seconds, times)
                        continue
                    wrong.append((copy, room))
                    corrupted[copy.slot] += 1
                    problems.append(
                        f"{path}: checksum of expert {copy.expert} {checksum}, the owner's {given}"
                    )
                    log.error("layer %d, a copy came corrupted, %s", order.layer, problems[-1])
                left = wrong
                if not left:
                    return
        experts = [copy.expert for copy, _ in left]
        raise Corrupted(f"experts {experts} of layer {order.layer} cannot be staged: {'; '.join(problems)}")


@dataclass(frozen=True, eq=False)
class CopySources:
    """The sources of one member's copies (itself, its peers, the disk), and the bank they go to."""

    host_id: str
    device: str
    bank: Bank
    staging_slots: int
    peers: Peers
    use_weights: Callable[[Sequence[str]], None]
    read: Callable[[int, int, int], Slot]  # (decoder layer, expert, version) -> prepared, from disk

    def paths(self, order: StageOrder, owner: int, copier: Copier) -> Iterator[tuple[str, Fetch]]:
        """How to get experts that `owner` holds: the name and the copy of each path, the fastest first."""
        if owner == order.owner:
            yield "own", lambda wanted: self._own(order.layer, wanted, copier)
        elif owner != EMPTY:
            address, host = order.peers[owner]
            if host == self.host_id and self.device != "cpu":
                yield "cuda_ipc", lambda wanted: self.peers.map(address, *_asked(order, wanted), copier)
            yield "stream", lambda wanted: self.peers.fetch(address, *_asked(order, wanted), copier)
        yield "disk", lambda wanted: self._disk(order, wanted, copier)

    def _own(self, layer: int, wanted: list[CopyInto], copier: Copier) -> list[str]:
        copier.copy([(self.bank.slot(layer, copy.source[1]), room) for copy, room in wanted])
        with copier.stream():
            return self.bank.checksums(layer, [copy.source[1] for copy, _ in wanted])

    def _disk(self, order: StageOrder, wanted: list[CopyInto], copier: Copier) -> list[str]:
        found = []
        for copy, room in wanted:
            with copier.stream():
                read = self.read(order.layer, copy.expert, order.version)
                found.append(slot_checksum(read))
            copier.copy([(read, room)])
        return found


def _asked(order: StageOrder, wanted: list[CopyInto]) -> tuple[int, list[int], list[Slot]]:
    """Decoder layer, slots of the owner, and the rooms they go to."""
    return order.layer, [copy.source[1] for copy, _ in wanted], [room for _, room in wanted]
