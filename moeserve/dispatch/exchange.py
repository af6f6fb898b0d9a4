"""What dispatchers over torch.distributed share: gloo on the CPU, NCCL or RCCL on a GPU.

A step is between its participants: every owner, and the lanes that bring rows. Where they are the whole
group, which they always are when every member is an owner, pieces travel by one collective. Otherwise they
travel as messages between participants, so that an absent lane launches nothing and nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moeserve.dispatch.dispatcher import DispatchSpec

_SM = (70, 75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121)
TORCH_ARCHS = frozenset(("cpu", "gfx90a", "gfx942", "gfx950", *(f"sm{version}" for version in _SM)))
"""Where plain torch operations run."""

PARTIAL_SUMS = "float32 sums of a rank travel in the hidden dtype and are added in float32, in rank order"


class PeersGone(RuntimeError):
    """Pieces of a step did not come from, or did not reach, all its participants: one is late or gone."""


class _Met:
    """Around what travels of a step. Raises PeersGone where the others are not met in time."""

    def __init__(self, here: int, members: int) -> None:
        self._text = f"member {here} of {members} did not exchange a step's rows with all others"

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        own = torch.OutOfMemoryError, torch.AcceleratorError  # of this member's device, not of the others
        if isinstance(raised, RuntimeError) and not isinstance(raised, own):
            raise PeersGone(f"{self._text}: {raised}") from raised


def check_group(spec: DispatchSpec, group: ProcessGroup | None) -> ProcessGroup:
    """The group that a dispatcher of `spec` is built over. Raises ValueError unless it is of its members."""
    if group is None:
        raise ValueError(f"no process group was given, and {spec.ranks} members need one (form_group)")
    if (group.rank(), group.size()) != (spec.rank, spec.ranks):
        raise ValueError(
            f"the process group makes this member {group.rank()} of {group.size()}; "
            f"the dispatcher is built for member {spec.rank} of {spec.ranks}"
        )
    return group


class Exchange:
    """Carries pieces of a step between its participants. What it takes and gives is in order of positions.

    Building it is collective: NCCL's first call must be one of all members, and here that is a sum of one
    number. Raises ValueError as `check_group` does.
    """

    def __init__(self, spec: DispatchSpec, group: ProcessGroup | None) -> None:
        self._group = check_group(spec, group)
        self._spec, self._here = spec, spec.rank
        self._met = _Met(spec.rank, spec.ranks)
        present = spec.members.present
        self._lane_at = tuple(member.lane for member in present)
        self._owner_at = tuple(member.owner for member in present)
        self._lane_positions = _in_order(self._lane_at)
        self.owner_positions = _in_order(self._owner_at)
        self.owns = spec.member.owner is not None
        if None in self._owner_at:  # some steps are not of the whole group
            dist.all_reduce(torch.zeros(1, device=spec.device), group=self._group)

    def begun(self, lane_rows: tuple[int, ...]) -> tuple[int, ...]:
        """A step's rows by lane, without those that a recording gives to lanes that no member has yet.

        Raises RuntimeError where a CUDA graph is recorded of a step that some lane may be absent from when it
        is replayed: collectives cannot leave it out.
        """
        if None in self._owner_at and self._spec.device != "cpu" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a step over torch.distributed that lanes may be absent from is not recorded")
        seats = self._spec.members.seat_of_lane
        if None not in seats:
            return lane_rows
        return tuple(0 if seat is None else rows for seat, rows in zip(seats, lane_rows, strict=True))

    def idle(self, lane_rows: tuple[int, ...]) -> bool:
        """Whether this member has no part in a step, or no lane has a row in it: then it launches nothing."""
        return not self._spec.takes_part(lane_rows)

    def whole(self, lane_rows: tuple[int, ...]) -> bool:
        """Whether the step's participants are the whole group."""
        return None not in self._owner_at or all(
            owner is not None or (lane is not None and lane_rows[lane] > 0)
            for owner, lane in zip(self._owner_at, self._lane_at, strict=True)
        )

    def lanes(self, lane_rows: tuple[int, ...]) -> list[int]:
        """Rows that each position brings to a step."""
        return [0 if lane is None else lane_rows[lane] for lane in self._lane_at]

    def owners(self, rows: int) -> list[int]:
        """`rows` for each position that is an owner, 0 for the others."""
        return [0 if owner is None else rows for owner in self._owner_at]

    @property
    def other_owners(self) -> int:
        """How many other members are owners."""
        return len(self.owner_positions) - self.owns

    def by_lane(self, rows: Tensor, lane_rows: tuple[int, ...]) -> Tensor:
        """Rows of all lanes, which stand in order of positions, in order of lanes."""
        return self.runs_by_lane(rows, self.lanes(lane_rows))

    def by_position(self, rows: Tensor, lane_rows: tuple[int, ...]) -> Tensor:
        """Rows of all lanes, which stand in order of lanes, in order of positions."""
        return self.runs_by_position(rows, self.lanes(lane_rows))

    def runs_by_lane(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Runs of `sizes[p]` rows of each position p, which stand in that order, in order of lanes."""
        return _reordered(rows, sizes, self._lane_positions)

    def runs_by_position(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Runs of `sizes[p]` rows of each position p, which stand in order of lanes, in that of positions."""
        positions = self._lane_positions
        order = sorted(range(len(positions)), key=lambda at: positions[at])
        return _reordered(rows, [sizes[position] for position in positions], order)

    def carry(
        self,
        received: Tensor,
        sent: Tensor,
        rows: tuple[Sequence[int], Sequence[int]],
        lane_rows: tuple[int, ...],
    ) -> None:
        """Sends the next rows of `sent` to each position, and fills `received` with what each sends here.

        `rows` are (received from, sent to) each position; any counts, zero too. Tensors are contiguous.
        Collective over the participants of the step.
        """
        come, go = rows
        with self._met:
            if self.whole(lane_rows):
                dist.all_to_all_single(received, sent, list(come), list(go), group=self._group)
            else:
                self._messages(received.split_with_sizes(list(come)), sent.split_with_sizes(list(go)))

    def spread(self, arrived: Tensor, mine: Tensor, lane_rows: tuple[int, ...]) -> None:
        """Sends `mine`, this lane's rows, to every owner; `arrived` gets what all lanes have for this one.

        On gloo an all-to-all of copies is the fastest way below 1 MiB a lane, where decoding lives; an
        all-gather takes twice as long, and messages between pairs wait for one another's threads.
        """
        come = self.lanes(lane_rows) if self.owns else [0] * len(self._lane_at)
        go = self.owners(mine.shape[0])
        pieces = [mine if owner is not None else mine[:0] for owner in self._owner_at]
        with self._met:
            if not self.whole(lane_rows):
                self._messages(arrived.split_with_sizes(come), pieces)
            elif mine.is_cpu:
                copies = mine.repeat(len(self.owner_positions), 1)
                dist.all_to_all_single(arrived, copies, come, go, group=self._group)
            else:
                dist.all_to_all(list(arrived.split_with_sizes(come)), pieces, group=self._group)

    def broadcast(self, pieces: Sequence[Tensor]) -> None:
        """Fills `pieces[p]` on all members with that of each position p. Collective over the whole group."""
        with self._met:
            for position, piece in enumerate(pieces):
                if piece.numel():
                    dist.broadcast(piece, group_src=position, group=self._group)

    def counts(self, sent: Tensor, lane_rows: tuple[int, ...]) -> Tensor:
        """`sent[p]`, int64 `[positions]`, of every participant that may send rows here; 0 of others."""
        received = torch.zeros_like(sent)
        if self.whole(lane_rows):
            with self._met:
                dist.all_to_all_single(received, sent, group=self._group)
            return received
        bring = self.lanes(lane_rows)
        come = [received[at : at + (1 if self.owns and rows else 0)] for at, rows in enumerate(bring)]
        go = [sent[at : at + count] for at, count in enumerate(self.owners(1 if bring[self._here] else 0))]
        with self._met:
            self._messages(come, go)
        return received

    def _messages(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """Pieces to and from each position as messages; an empty one is none."""
        received[self._here].copy_(sent[self._here])
        pairs = [
            dist.P2POp(way, piece, group=self._group, group_peer=position)
            for way, pieces in ((dist.isend, sent), (dist.irecv, received))
            for position, piece in enumerate(pieces)
            if position != self._here and piece.numel()
        ]
        for under_way in dist.batch_isend_irecv(pairs) if pairs else ():
            under_way.wait()


def _in_order(numbers: Sequence[int | None]) -> tuple[int, ...]:
    """Positions in the order of the numbers that they have; those without one are left out."""
    placed = sorted((number, position) for position, number in enumerate(numbers) if number is not None)
    return tuple(position for _, position in placed)


def _reordered(rows: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    """Rows that stand in runs of `sizes`, with the runs in another order; `rows` itself if it is theirs."""
    taken = [at for at in order if sizes[at]]
    if taken == sorted(taken) or not rows.shape[0]:
        return rows
    runs = rows.split_with_sizes(list(sizes))
    return torch.cat([runs[at] for at in taken])


def sum_partials(partials: Sequence[Tensor]) -> Tensor:
    """Sum of one partial `[T, H]` an owner, in float32 and in owner order, so that its bits repeat."""
    total = partials[0].float()
    for partial in partials[1:]:
        total = total + partial
    return total
