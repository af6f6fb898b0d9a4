"""`FlashInferRanks`: a process group as FlashInfer's communication backend.

The library's own `TorchDistBackend` asks torch's default group for its rank, whatever group it is given, and
splits the default group. Its interface is structural, so this one stands in its place.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup


class FlashInferRanks:
    """Rank, size and exchange of objects over one group, under the names that FlashInfer calls."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def Get_rank(self) -> int:  # the library's name
        """This member's rank in the group."""
        return self._group.rank()

    def Get_size(self) -> int:  # the library's name
        """How many ranks the group has."""
        return self._group.size()

    def allgather(self, data: Any) -> tuple[Any, ...]:
        """`data` of every rank, by rank, pickled. Collective."""
        found: list[Any] = [None] * self._group.size()
        dist.all_gather_object(found, data, group=self._group)
        return tuple(found)

    def bcast(self, data: Any, root: int) -> Any:
        """`data` of the rank `root`, on every rank, pickled. Collective."""
        box = [data]
        dist.broadcast_object_list(box, group=self._group, group_src=root)
        return box[0]

    def barrier(self) -> None:
        """Waits until every rank is here. Collective."""
        dist.barrier(group=self._group)

    def Split(self, color: int, key: int) -> FlashInferRanks:  # the library's name
        """The ranks of one `color` in the order of `key`: here always all of them, in their own order.

        Raises ValueError for any other split. Collective.
        """
        everyone = self.allgather((color, key))
        colors, keys = zip(*everyone, strict=True)
        if len(set(colors)) > 1 or list(keys) != sorted(keys):
            raise ValueError(f"FlashInfer asks for a part of the group, and all of it was meant: {everyone}")
        return self
