"""`Election`: changes of the epoch, one at a time; ranks prepare one while steps run, and vote on it."""

from __future__ import annotations

import logging
import time

from moeserve.runtime.ballot import Ballot, Outcome, Stage
from moeserve.runtime.changes import Change
from moeserve.runtime.group import Group
from moeserve.runtime.messages import change_message, stage_message, staged_from
from moeserve.runtime.stream import Message

log = logging.getLogger(__name__)


class Election:
    """Sends a change to every rank, counts the votes and tells the result. Called with the group's lock held.

    `layers` are the decoder indices of the placement's layers.
    """

    def __init__(self, group: Group, layers: tuple[int, ...]) -> None:
        self._group, self._layers = group, layers
        self._ballot: Ballot | None = None  # the change under way
        self._ballots = 0

    def hold(self, change: Change, timeout: float) -> Outcome:
        """Has `change` prepared and voted on; blocks until it has ended, and holds no lock meanwhile."""
        started, group = time.monotonic(), self._group
        if refused := self._refused(change):
            return Outcome(refused)
        self._ballots += 1
        ballot = self._ballot = Ballot(self._ballots, change, group.ranks)
        peers = {rank: [seat.weights, seat.host_id] for rank, seat in group.seats.items()}
        layer = self._layers[change.layer]
        for rank, seat in list(group.seats.items()):
            order = stage_message(ballot, layer, rank, group.generation)
            group.send(seat, order | {"peers": peers})
        group.lock.wait_for(lambda: ballot.stage is not Stage.PREPARING, timeout)
        if ballot.stage is Stage.PREPARING:
            self.abandon(f"ranks {ballot.missing} did not prepare it within {timeout:g} s")
        group.lock.wait_for(lambda: ballot.ended)
        self._ballot = None
        return Outcome(ballot.reason, time.monotonic() - started, ballot.staged)

    def abandon(self, reason: str) -> None:
        """The change under way is dropped, unless it is decided; ranks keep serving the epoch they have."""
        if self._ballot is None or self._ballot.ended:
            return
        self._ballot.abandon(reason)
        self._tell()

    def hear(self, rank: int, message: Message) -> None:
        """A rank's word on the change under way: it has staged it, it cannot, or it serves it."""
        if self._ballot is None or int(message["ballot"]) != self._ballot.number:
            return
        if message["kind"] == "adopted":
            self._ballot.adopt(rank)
            self._group.lock.notify_all()
        elif self._ballot.stage is Stage.PREPARING:
            self._ballot.vote(rank, staged_from(message), str(message["refused"]))
            self._tell()

    def _refused(self, change: Change) -> str:
        """Why `change` cannot be put to the vote, or nothing."""
        served = self._group.epoch.number
        if self._ballot is not None:
            return f"epoch {self._ballot.change.epoch.number} is still under way"
        if change.epoch.number != served + 1:
            return f"epoch {change.epoch.number} was planned, and epoch {served} is served now"
        return ""

    def _tell(self) -> None:
        """Tells the ranks what has become of the change."""
        if self._ballot is None:
            return
        group = self._group
        match self._ballot.stage:
            case Stage.DECIDED:
                group.epoch = self._ballot.change.epoch
                group.broadcast(change_message(self._ballot, group.generation))
            case Stage.ABANDONED:
                number = self._ballot.change.epoch.number
                log.warning("epoch %d is abandoned: %s", number, self._ballot.reason)
                group.broadcast({"kind": "abandon", "generation": group.generation})
        group.lock.notify_all()
