"""`LoneMember`: what the head knows of a member that is alone in its group, and orders its own steps."""

from __future__ import annotations

from collections.abc import Callable, Collection

from moeserve.dispatch.members import Members
from moeserve.runtime.control.own_steps import own_steps_from, steady_message
from moeserve.runtime.control.stream import Message
from moeserve.runtime.head.group import Group


class LoneMember:
    """A member without others needs nobody to order its steps: a job would travel to the head and its step
    back. It says a few times a second what it did, and before the first step after a rest: of a member that
    says nothing while steps may run, none goes on. The caller of any method holds the group's lock.
    """

    def __init__(self, group: Group, layers: Collection[int]) -> None:
        self._group, self._layers = group, layers
        self.steps = self.jobs = 0  # since the service began
        self.observe: Callable[[int, float], None] = lambda layer, seconds: None  # a step that has ended
        self.end()

    def end(self) -> None:
        """The generation has ended, and with it all that was under way."""
        self._alone = False  # whether a member orders its steps in this generation
        self.queued, self._running, self._number, self._turn = 0, 0, 0, 0
        self._active = self._held = False
        self._went_on = 0.0  # on the member's clock
        self._since = 0.0  # on this one's: when that was last heard of as new
        self._steady = True  # as the member was told

    def joins(self, members: Members, number: int) -> int:
        """The number of the first step, where the group's only member is to order its steps from now on; 0
        where the head does. number: of the next step.
        """
        self.end()
        self._alone = len(members) == 1 and members.present[0].lane is not None
        return number if self._alone else 0

    def told(self, message: Message, now: float) -> None:
        """Takes note of what a member says. Counts of a generation that has ended count. Raises KeyError,
        TypeError or ValueError where the message is malformed.
        """
        said = own_steps_from(message, self._layers)
        self.steps += said.steps
        self.jobs += said.jobs
        for layer, seconds in said.ended:
            self.observe(layer, seconds)
        if not self._alone or message["generation"] != self._group.generation or said.turn <= self._turn:
            return
        went_on = said.went_on != self._went_on or not said.running
        if went_on or said.number != self._number or said.active != self._active:
            self._since = now
        self._turn, self.queued, self._running, self._number = said[0], said.queued, said.running, said.number
        self._went_on, self._active, self._held = said.went_on, said.active, said.held
        self._group.lock.notify_all()

    @property
    def running(self) -> int:
        """Steps under way, as was last heard."""
        return self._running

    @property
    def under_way(self) -> int:
        """Steps that may be under way now: 1 at least, until the member has said that it begins none."""
        begins_none = self._held and not self._steady
        return max(self._running, int(self._alone and not begins_none))

    @property
    def standing(self) -> tuple[int, float] | None:
        """The oldest step that may be under way, and since when none has gone on; None where none is."""
        return (self._number, self._since) if self._active or self._running else None

    def keep_steady(self, *, steady: bool) -> None:
        """Has the member begin steps, or none while others are about to join it; where that has changed."""
        if self._alone and steady != self._steady:
            self._steady, self._held = steady, False
            self._group.broadcast(steady_message(self._group.generation, steady=steady))
