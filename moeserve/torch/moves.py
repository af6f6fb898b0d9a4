"""`Moves`: experts that change ranks in process, a layer at a time, while passes run.

Without a head, ranks decide together: each prepares the same change beside its steps, and says at the end of
a pass whether it is staged. All learn the same words, so that all commit it between the same two passes, or
none does. It is the service's own way (`Mover`, `Epoch`), with other messengers.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Sequence

from moeserve.experts.placement import EMPTY, Move, Placement
from moeserve.proto.host import host_id
from moeserve.proto.texts import clipped
from moeserve.runtime.control.orders import ExpertCopy, StageOrder, Vote
from moeserve.runtime.epoch import Change
from moeserve.runtime.head.placing.changes import rebalance
from moeserve.runtime.keys.keys import NO_KEYS
from moeserve.runtime.rank.rank import Rank
from moeserve.runtime.rank.weights.copies import Copier
from moeserve.runtime.rank.weights.mover import CopySources, Mover
from moeserve.runtime.rank.weights.peers import Peers
from moeserve.runtime.sections import BalanceConfig

log = logging.getLogger(__name__)

NOTHING, REFUSED = 0, -1
"""What a rank says at the end of a pass, beside the number of the change that it has staged."""


class Moves:
    """One rank's part. `plan` and `settle` are called by the thread of its steps, on all ranks alike."""

    def __init__(self, rank: Rank, balance: BalanceConfig) -> None:
        self._rank, self._balance = rank, balance
        sources = CopySources(
            host_id(),
            rank.device,
            rank.experts.bank,
            balance.staging_slots,
            Peers(NO_KEYS, rank.device, balance.copy_seconds),
            rank.experts.use_weights,
            rank.experts.read,
        )
        copier = Copier(balance.move_bytes_per_second, rank.device, "moves")
        self._mover = Mover(sources, copier, self._voted, self._corrupted)
        self._changes: deque[Change] = deque()
        self._number = 0  # of the change that is prepared now; they count on from plan to plan
        self._vote = NOTHING
        self._lock = threading.Lock()  # around the number and its vote
        self._wrong = ""  # what a slot was found to hold after its commit
        self.refused = ""  # why the last plan was given up

    @property
    def left(self) -> int:
        """Changes that are not committed yet, of one layer each."""
        return len(self._changes)

    @property
    def vote(self) -> int:
        """What this rank says at the end of a pass."""
        return self._vote

    def plan(self, target: Placement) -> int:
        """Begins to bring the experts to `target`, by as many changes as it returns; others are given up."""
        self._drop()
        self.refused = ""
        self._changes = deque(rebalance(self._rank.epoch, target, self._balance.staging_slots))
        self._stage()
        return self.left

    def settle(self, votes: Sequence[int]) -> None:
        """Commits the change that all ranks have staged, or gives the plan up where one has refused.

        Between two steps, when the device has ended them. Raises RuntimeError where a slot was found not to
        hold what was committed, or the commit fails: this rank cannot go on.
        """
        if self._wrong:
            raise RuntimeError(self._wrong)
        if not self._changes:
            return
        if REFUSED in votes:
            ranks = [rank for rank, vote in enumerate(votes) if vote == REFUSED]
            self.refused = self.refused or f"ranks {ranks} could not stage it"
            log.warning("experts stay where they are: %s", self.refused)
            self._drop()
        elif all(vote == self._number for vote in votes):
            change = self._changes.popleft()
            self._mover.commit(self._number)
            self._rank.adopt(change.epoch, change.layer)
            self._stage()

    def close(self) -> None:
        """Ends the thread that copies."""
        self._mover.close()

    def _stage(self) -> None:
        """Begins to prepare the next change."""
        with self._lock:
            self._number, self._vote = self._number + 1, NOTHING
        if not self._changes:
            return
        change, rank = self._changes[0], self._rank
        layer, owner = rank.served.layers[change.layer], rank.member.owner
        copies = () if owner is None else tuple(_copies(change.moves, owner, change.epoch.placement))
        version = change.epoch.version(change.layer)
        weights = change.epoch.weights
        number = change.epoch.number
        order = StageOrder(0, self._number, number, layer, version, weights, copies, {}, owner)
        self._mover.stage(order)

    def _drop(self) -> None:
        self._mover.abandon()
        self._changes.clear()
        with self._lock:
            self._number, self._vote = self._number + 1, NOTHING

    def _voted(self, vote: Vote) -> None:
        """Takes the mover's word, from its thread."""
        with self._lock:
            if vote.order.change == self._number:  # and of none that was given up
                self.refused = clipped(vote.refused)
                self._vote = REFUSED if vote.refused else self._number

    def _corrupted(self, order: StageOrder, what: str) -> None:
        self._rank.experts.invalidate(order.layer)
        self._wrong = what


def _copies(moves: Iterable[Move], owner: int, placement: Placement) -> Iterable[ExpertCopy]:
    """What the owner at a place copies: from its own slots, and else from disk."""
    stride = placement.slots_per_owner
    for move in moves:
        if move.slot // stride != owner:
            continue
        own = move.source != EMPTY and move.source // stride == owner
        source = (owner, move.source % stride) if own else (EMPTY, EMPTY)
        yield ExpertCopy(move.slot % stride, move.expert, source)
