"""`ReadyPlans`: for each owner that may be lost, the epoch without it, made before it is needed."""

from __future__ import annotations

from collections.abc import Collection

from moeserve.runtime.epoch import Epoch


class ReadyPlans:
    """The epochs that follow when members are lost. Any thread may ask."""

    def without(self, epoch: Epoch, seats: Collection[int]) -> Epoch:
        """`epoch` when the members of `seats` are lost. Raises ValueError, with the reason, where the others
        cannot serve without them.
        """
        return epoch.without(seats)
