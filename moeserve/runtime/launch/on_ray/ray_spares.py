"""`Spares`: Ray actors that have imported all that a rank needs, without weights: one takes a lost seat."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from moeserve.runtime.launch.on_ray.ray_rank import Placed

log = logging.getLogger(__name__)


class SpareTerms(NamedTuple):
    """How many spares there are to be, and when they are made."""

    wanted: int
    bundles: int  # of the ranks, over which they are spread
    begin_seconds: float  # for one to be warm
    rest_seconds: float
    """After one has taken a seat, in which none is made unless all members serve: the one that comes back
    loads and joins, and imports would take the cores that it and the others need.
    """


@dataclass(eq=False)
class Spare:
    """One actor: where it is, and whether it has imported what a rank needs."""

    handle: Any
    placed: Any  # its process and node, once Ray has started it
    warm: Any  # its imports
    since: float  # when it was created
    place: Placed | None = None


class Spares:
    """As many as are wanted, one after another, spread over the bundles of the ranks. Not thread-safe.

    A spare reserves nothing: it takes the seat of a rank whose bundle's resources that one's end has freed,
    and its GPU, so it has to be on that rank's node. create: makes an actor on the node of a bundle. kill:
    ends an actor's process there, by the node's watch.
    """

    def __init__(
        self, terms: SpareTerms, create: Callable[[int], Any], kill: Callable[[Any, Placed | None], None]
    ) -> None:
        self._terms = terms
        self._create, self._kill = create, kill
        self._spares: list[Spare] = []
        self._made = 0
        self._taken_at = -math.inf

    def pids(self, node: str = "") -> list[int]:
        """The processes of those that are warm, of one node or of all."""
        places = [spare.place for spare in self._spares if spare.place is not None]
        return [place.pid for place in places if not node or place.node == node]

    def keep(self, *, whole: bool) -> None:
        """Notes which have become warm, ends those that do not, and creates the next one that is missing.

        One at a time: their imports take the cores that ranks serve with. whole: whether all members serve.
        """
        for spare in list(self._spares):
            if spare.place is None and (why := self._why_not(spare)):
                log.warning("a spare is ended: %s", why)
                self._drop(spare)
        rests = not whole and time.monotonic() - self._taken_at < self._terms.rest_seconds
        warming = any(spare.place is None for spare in self._spares)
        if len(self._spares) < self._terms.wanted and not warming and not rests:
            handle = self._create(self._made % self._terms.bundles)
            self._made += 1
            now = time.monotonic()
            self._spares.append(Spare(handle, handle.place.remote(), handle.warm.remote(), now))

    def take(self, node: str) -> Spare | None:
        """A warm spare of that node, for good; None where there is none."""
        for spare in self._spares:
            if spare.place is not None and spare.place.node == node:
                self._spares.remove(spare)
                self._taken_at = time.monotonic()
                return spare
        return None

    def seen(self, looks: Mapping[int, tuple[float, str] | None], stopped_seconds: float) -> None:
        """What a node's watch has seen of the spares there: those that have ended, or are stopped, go."""
        for spare in [one for one in self._spares if one.place is not None and one.place.pid in looks]:
            look = looks[spare.place.pid] if spare.place is not None else None
            if look is None or 0 < stopped_seconds <= look[0]:
                log.warning("a spare %s", "has ended" if look is None else f"is ended: {look[1]}")
                self._drop(spare)

    def lose_node(self, node: str) -> None:
        """Forgets the spares of a node that is dead."""
        self._spares = [one for one in self._spares if one.place is None or one.place.node != node]

    def stop(self) -> None:
        """Ends all of them."""
        for spare in list(self._spares):
            self._drop(spare)

    def _why_not(self, spare: Spare) -> str:
        """Why a spare will not be warm; empty where it is, or may still be."""
        done, _ = ray.wait([spare.placed, spare.warm], num_returns=2, timeout=0)
        if len(done) < 2:
            late = time.monotonic() - spare.since > self._terms.begin_seconds
            return (
                f"it is not warm within cluster.begin_seconds = {self._terms.begin_seconds:g}" if late else ""
            )
        try:
            ray.get(spare.warm)
            spare.place = Placed(*ray.get(spare.placed))
        except RayError as error:
            return str(error).strip().splitlines()[-1]
        log.info("a spare is warm: pid %d of node %s", spare.place.pid, spare.place.node)
        return ""

    def _drop(self, spare: Spare) -> None:
        self._spares.remove(spare)
        self._kill(spare.handle, spare.place)
