"""`MemberChanges`: a member's part in changes of the epoch: it prepares them, votes, and commits."""

from __future__ import annotations

from collections.abc import Callable

from moeserve.runtime.control.messages import order_from, vote_message
from moeserve.runtime.control.orders import StageOrder, Vote
from moeserve.runtime.control.stream import Message
from moeserve.runtime.rank.member.held_epoch import HeldEpoch
from moeserve.runtime.rank.weights.mover import Mover


class MemberChanges:
    """The receiving thread has changes prepared, while steps run; the executing one commits them between two
    steps. drain: waits until the steps before have left. tell: says something to the head.
    """

    def __init__(self, held: HeldEpoch, drain: Callable[[], None], tell: Callable[[Message], None]) -> None:
        self._held, self._drain, self._tell = held, drain, tell
        self.mover: Mover | None = None  # who prepares the next epoch; without one, every change is refused
        self.on_epoch: Callable[[int, int], None] = lambda generation, epoch: None  # between two steps

    def prepare(self, message: Message) -> None:
        """Has the mover prepare the next epoch, or abandon it; steps go on."""
        if self.mover is None:
            if message["kind"] == "stage":
                vote = {"kind": "voted", "generation": message["generation"], "change": message["change"]}
                self._tell(vote | {"staged": [], "refused": "this rank was started without a mover"})
        elif message["kind"] == "stage":
            self.mover.stage(order_from(message))
        else:
            self.mover.abandon()

    def abandon(self) -> None:
        """The generation has ended, and what was prepared in it with it."""
        if self.mover is not None:
            self.mover.abandon()

    def release(self) -> None:
        """Has the mover give up its links to peers and their memory; while no step and no copy runs."""
        if self.mover is not None:
            self.mover.release()

    def send_vote(self, vote: Vote) -> None:
        """Sends the mover's vote to the coordinator."""
        self._tell(vote_message(vote))

    def report_corruption(self, order: StageOrder, what: str) -> None:
        """Reports a slot that does not hold what was staged; its layer is read from disk before it serves."""
        self._held.invalidate(order.layer)
        self._tell({"kind": "failed", "generation": order.generation, "reason": what})

    def commit(self, entry: Message) -> None:
        """Commits what every member had voted for: it is served from the next step on."""
        if self.mover is None:
            raise RuntimeError("commit came before prepare")
        self._drain()
        epoch = self._held.commit(entry, self.mover)
        self.on_epoch(entry["generation"], epoch.number)
        adopted = {"kind": "adopted", "generation": entry["generation"], "change": entry["change"]}
        self._tell(adopted)
