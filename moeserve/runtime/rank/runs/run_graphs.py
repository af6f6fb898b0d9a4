"""`RunGraphs`: the recorded runs of one rank, so many steps of them; and rows of all lanes in a run."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from moeserve.device.streams import MAIN
from moeserve.dispatch.members import Members
from moeserve.runtime.rank.graphs import Capture, CudaCapture, Replay, absent_lanes
from moeserve.runtime.sections import PassesConfig

log = logging.getLogger(__name__)

MOST_STEPS = PassesConfig.graph_steps
"""Of all recorded runs of one rank; those that were launched longest ago are dropped for others."""


class RunLanes(NamedTuple):
    """Rows of each lane in the steps of a run that one lane alone brings rows to."""

    recorded: tuple[int, ...]
    launched: tuple[int, ...]  # where a step is launched and not replayed: absent lanes bring none
    absent: tuple[int, ...]  # lanes of the recording that launch nothing

    @classmethod
    def of(cls, members: Members, lane: int, rows: int) -> RunLanes:
        """As the graph of a step has them, so that answers have its bits: padded rows of every lane."""
        alone = tuple(rows if at == lane else 0 for at in range(members.max_lanes))
        absent = absent_lanes(members, alone)
        launched = tuple(0 if at in absent else rows for at in range(members.max_lanes))
        return cls((rows,) * members.max_lanes, launched, absent)


class RunGraphs:
    """Graphs by what they hold, the one that was used last behind all others. One thread uses it, but for
    `seen` and `recorded`.
    """

    def __init__(self, most_steps: int = MOST_STEPS, capture: Capture | None = None) -> None:
        """most_steps: of all recorded runs together; longer runs are not recorded. capture: of all tracks;
        None: each has one of its own, since its graphs run beside others'.
        """
        self.most_steps, self._given = most_steps, capture
        self._cuda = dict[int, CudaCapture]()  # by track
        self._graphs: OrderedDict[Hashable, tuple[Replay, int]] = OrderedDict()  # with its steps
        self._seen = set[Hashable]()  # single steps that were launched
        self._refused = set[Hashable]()  # that could not be recorded

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def steps(self) -> int:
        """Of all recorded runs."""
        return sum(known for _, known in self._graphs.values())

    @property
    def pools(self) -> tuple[Any, ...]:
        """The ids of the memory pools that the graphs of each track share."""
        return tuple(one.pool for one in list(self._cuda.values()) if one.pool is not None)

    def _capture_of(self, track: int) -> Capture:
        return self._given or self._cuda.setdefault(track, CudaCapture())

    def drop(self) -> None:
        """Drops all graphs: what they recorded is about to change."""
        self._graphs.clear()
        self._refused.clear()
        self._seen.clear()
        self._cuda.clear()

    def recorded(self, key: Hashable) -> bool:
        """Whether this has a graph."""
        return key in self._graphs

    def seen(self, key: Hashable) -> bool:
        """Whether this was recorded, or is a single step that was launched."""
        return key in self._graphs or key in self._seen

    def replay_of(
        self, key: Hashable, steps: int, work: Callable[[], None], track: int = MAIN
    ) -> Replay | None:
        """What replays `work`, which has so many steps; it is recorded now where it was not before. None for
        a single step that comes for the first time, and may not come again, and for what cannot be recorded.
        track: on which it is launched, alike for each key.
        """
        if (found := self._graphs.get(key)) is not None:
            self._graphs.move_to_end(key)
            return found[0]
        if steps == 1 and key not in self._seen:
            self._seen.add(key)
            return None
        if key in self._refused or steps > self.most_steps:
            return None
        try:
            replay = self._capture_of(track)(work)
        except RuntimeError as error:
            log.warning("%d steps of a pass: no CUDA graph: %s", steps, error)
            self._refused.add(key)
            return None
        self._keep(key, replay, steps)
        return replay

    def _keep(self, key: Hashable, replay: Replay, steps: int) -> None:
        held = self.steps
        while self._graphs and held + steps > self.most_steps:
            _, (_, known) = self._graphs.popitem(last=False)
            held -= known
        self._graphs[key] = replay, steps

    def forget(self, gone: Callable[[Hashable], bool]) -> None:
        """Drops what is gone, by its key."""
        self._seen = {key for key in self._seen if not gone(key)}
        self._refused = {key for key in self._refused if not gone(key)}
        for key in [key for key in self._graphs if gone(key)]:
            del self._graphs[key]
