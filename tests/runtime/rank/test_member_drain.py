"""A member's lane takes no further call, and takes calls again, in the order in which it was told so."""

from __future__ import annotations

import threading
from typing import Any, cast

from moeserve.runtime.rank.lanes.lane import Lane
from moeserve.runtime.rank.member.draining import MemberDrain

PATIENCE = 5.0


def word(reason: str) -> dict[str, Any]:
    return {"kind": "drain", "generation": 1, "reason": reason, "seconds": PATIENCE}


class Slow:
    """A lane that is told to take calls again at the very moment at which it is drained."""

    in_flight = 0

    def __init__(self) -> None:
        self.said = list[str]()
        self.meanwhile = threading.Thread(target=lambda: None)

    def drain(self, reason: str) -> None:
        if reason:
            self.meanwhile.start()
            self.meanwhile.join(0.2)
        self.said.append(reason)


def test_a_lane_that_is_drained_late_takes_calls_again_all_the_same() -> None:
    lane, told = Slow(), threading.Event()
    drain = MemberDrain(cast(Lane, lane), lambda message: told.set())
    lane.meanwhile = threading.Thread(target=drain.told, args=(word(""),))
    drain.told(word("the service is stopping"))
    assert told.wait(PATIENCE)
    lane.meanwhile.join(PATIENCE)
    assert lane.said == ["the service is stopping", ""]
