"""`Mesh`: how ranks split experts, flattened from data- and tensor-parallel sizes."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.dispatch.members import Members


@dataclass(frozen=True)
class Mesh:
    """Sizes of the group as it starts: `ep` is 1 or `dp * tp`.

    It is of ranks: members that are both, with a lane and a place that holds experts. Who else is there, and
    who has left since, is in an epoch's `members`.

    With `ep = dp * tp` every expert is whole on one rank. With `ep = 1` and several ranks, every rank holds
    its 1 / (dp * tp) slice of every expert. Every rank has a lane with rows of its own either way.
    """

    dp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if min(self.dp, self.tp, self.ep) < 1:
            raise ValueError(f"parallel sizes must be at least 1: {self}")
        if self.ep not in (1, self.ranks):
            raise ValueError(f"ep={self.ep} must be 1 or dp * tp = {self.ranks}")

    @classmethod
    def flatten(cls, dp: int, tp: int, *, expert_parallel: bool) -> Mesh:
        """The mesh of an engine's sizes; `expert_parallel` is ignored for one rank."""
        return cls(dp, tp, dp * tp if expert_parallel else 1)

    @property
    def ranks(self) -> int:
        """How many ranks the group has."""
        return self.dp * self.tp

    def members(self, max_lanes: int = 0, max_owners: int = 0) -> Members:
        """The ranks as members, with room for so many lanes and owners; 0: for no more than the ranks."""
        return Members.of_ranks(self.ranks, max_lanes, max_owners)

    @property
    def slices(self) -> int:
        """How many ranks share one expert."""
        return self.ranks if self.ep == 1 else 1

    @property
    def sliced(self) -> bool:
        """Whether every rank holds a slice of every expert."""
        return self.slices > 1

    @property
    def owners(self) -> int:
        """How many owners a placement has: each rank, or the group as one when experts are sliced."""
        return 1 if self.sliced else self.ranks

    def sequence_rows(self, rows: int, tp_rank: int) -> slice:
        """Which of `rows` rows, identical on all tensor-parallel ranks, `tp_rank` brings to the layer.

        Sequence-parallel input: each keeps `ceil(rows / tp)`, the last ones fewer or none, so a row is
        dispatched once and not tp times.
        """
        width = -(-rows // self.tp)
        return slice(min(rows, tp_rank * width), min(rows, (tp_rank + 1) * width))
