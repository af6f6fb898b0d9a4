"""`InProcess`: the model server's own processes are the ranks; no hop, and no service.

Ranks that are data-parallel have rows of their own, as many as they happen to have. Before each layer they
tell each other which layer they are at and how many rows they bring, over a group of gloo's that belongs to
this way; a rank that has run its pass, or has none, follows the others until all have (`follow`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from moeserve.dispatch.exchange import PeersGone
from moeserve.experts.balance import Policy, balancer_named
from moeserve.experts.load import Load
from moeserve.runtime.config import Config
from moeserve.runtime.launch.torchrun import HostedRank, join_torchrun, leave_torchrun
from moeserve.runtime.rank.all2all import PeersLate
from moeserve.runtime.rank.graphs import padded_rows
from moeserve.runtime.sections import BalanceConfig
from moeserve.runtime.step import LaneInput, LaneLogits, LaneRows, empty_input
from moeserve.torch.meeting import FOLLOWS, Agreed, meeting_of
from moeserve.torch.moves import Moves
from moeserve.torch.ways import CLOSED, MOST_ALIKE, Rounds, Rows, Sizes, Submitted, WrongRows, not_under_way

UNLIMITED = 1 << 60
"""Moves of a plan: as many as its policy wants."""


class Recorded:
    """The steps of a CUDA graph that the caller has recorded."""

    def __init__(self, way: InProcess, rows: int) -> None:
        self.rows = rows  # of every lane, padded
        self.steps: list[tuple[int, int]] = []  # layer, and rows of every lane
        self._way = way

    def expect(self) -> None:
        """To be called right before each replay, on the stream of the replay. All ranks replay alike."""
        self._way.expect(self.steps)


class InProcess:
    """Experts of this process and of the others of its group.

    `rank` is this process's, joined; each rank has a lane. Calls are collective: all ranks make the same ones
    in one order, each with its own rows, or follow.
    """

    def __init__(self, rank: HostedRank, balance: BalanceConfig | None = None) -> None:
        self.order = torch.zeros(1, dtype=torch.int64, device=rank.device)
        self._rank: HostedRank | None = rank
        checkpoint = rank.served.checkpoint
        self._sizes = Sizes(checkpoint.hidden, checkpoint.num_experts, checkpoint.top_k)
        self._meeting = meeting_of(rank)
        self._counted: tuple[int, ...] | None = None  # rows of each lane, where the caller knows them
        self._submitted = Submitted("moeserve-steps")
        self._side = None if rank.device == "cpu" else _stream(rank.device)  # of submitted steps
        self._under_way: dict[int, tuple[Tensor, torch.cuda.Event, int]] = {}  # by number, on a GPU
        self._rounds = Rounds(MOST_ALIKE)
        self._moves = Moves(rank, balance or BalanceConfig())
        self._recording: Recorded | None = None
        self._side_used = False  # since the last wait for it
        self._unasked: dict[int, None] = {}  # layers whose late members were not asked for yet, on a GPU
        self._count = 0

    @classmethod
    def of_file(cls, path: str) -> InProcess:
        """Joins the ranks of torchrun's world, or of the process's default group. Collective."""
        config = Config.load(path).checked()
        return cls(join_torchrun(config), config.balance)

    @contextmanager
    def rows(self, lane_rows: Sequence[int]) -> Iterator[None]:
        """A context in which every lane's rows are known to all ranks, so that they tell each other nothing.

        Each rank names the same numbers, by rank, and brings just its own in each call.
        """
        ranks = self._joined().served.mesh.ranks
        if len(lane_rows) != ranks:
            raise ValueError(f"{len(lane_rows)} numbers of rows for {ranks} ranks: one for each")
        before, self._counted = self._counted, tuple(int(count) for count in lane_rows)
        try:
            yield
        finally:
            self._counted = before

    @contextmanager
    def recording(self, most_rows: int) -> Iterator[Recorded]:
        """A context around the recording of a CUDA graph, in which calls become parts of that graph.

        Every rank records the same layers in one order, with up to `most_rows` rows, the same number on all.
        Steps of such sizes have run before, or their kernels would be loaded while a graph is recorded.
        """
        rank = self._joined()
        if self._side is None:
            raise RuntimeError(f"device {rank.device!r} has no CUDA graphs; call `recording` on a GPU only")
        if self._moves.left:
            raise RuntimeError(
                f"{self._moves.left} changes of experts are under way, whose copies would spoil a recording; "
                "end them first, by passes that `follow`"
            )
        self._wait_for_side()
        recorded = self._recording = Recorded(self, padded_rows(most_rows))
        try:
            yield recorded
        finally:
            self._recording, self._side_used = None, False

    def expect(self, steps: Sequence[tuple[int, int]]) -> None:
        """What `Recorded.expect` does."""
        rank = self._joined()
        self._wait_for_side()
        rank.expect(steps)
        self._unasked |= dict.fromkeys(layer for layer, _ in steps)

    def mixed(self, layer: int, rows: Rows) -> Tensor:
        """As `Way.mixed`; collective. Raises WrongRows before others are met, OutOfStep, and PeersLate."""
        self._check(layer, rows)
        counted = self._counted
        if self._side is None:
            return self._submitted.run(lambda: self._step(layer, rows, counted))
        self._wait_for_side()
        return self._step(layer, rows, counted)

    def submit(self, layer: int, rows: Rows) -> int:
        """As `Way.submit`; collective. On a GPU the step runs on a stream of its own."""
        self._check(layer, rows)
        counted = self._counted  # now: its turn may come after the context of `rows`, or in another one
        if self._side is None:
            return self._submitted.put(layer, lambda: self._step(layer, rows, counted))
        self._side_used = True
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        with torch.cuda.stream(self._side):
            answer = self._step(layer, rows, counted)
            ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ended.record()
        for given in rows:
            if given is not None:
                given.record_stream(self._side)
        self._count, now = self._count + 1, self._rounds.at(layer)
        self._under_way = {n: one for n, one in self._under_way.items() if one[2] >= now - 1}
        self._under_way[self._count] = answer, ended, now
        return self._count

    def wait(self, number: int) -> Tensor:
        """As `Way.wait`. On a GPU only the current stream waits."""
        if self._side is None:
            return self._submitted.take(number)
        if number not in self._under_way:
            raise not_under_way(number)
        answer, ended, _ = self._under_way.pop(number)
        stream = torch.cuda.current_stream(self._side.device)
        stream.wait_event(ended)
        answer.record_stream(stream)
        return answer

    def follow(self) -> None:
        """Ends this rank's forward pass: takes part in the others' steps, without rows, until all have ended
        theirs. Collective: every rank calls it once a pass, also one that had no rows and ran nothing.
        """
        if self._counted is not None:
            raise RuntimeError("inside `rows` every rank runs every layer by itself: call follow outside")
        self._wait_for_side()
        while (agreed := self._submitted.run(self._followed)).layer != FOLLOWS:
            pass
        self.check()
        self._submitted.run(lambda: self._moves.settle(agreed.votes))

    def rebalance(self, policy: str = "eplb") -> int:
        """Begins to move experts by the load since the start; how many changes of one layer it takes.

        Collective, between two passes. Experts are copied beside the passes that follow, and each `follow`
        commits what all ranks have staged by then. What an earlier call began is given up. Raises ValueError
        for an unknown policy, and where ranks hold slices of every expert, which cannot move; PeersLate where
        the others are not met in time.
        """
        if self._joined().served.mesh.sliced:
            raise ValueError("ranks hold slices of every expert, which cannot move")
        chosen = balancer_named(policy)
        self._wait_for_side()
        return self._submitted.run(lambda: self._planned(chosen))

    @property
    def moving(self) -> int:
        """Changes that are still to be committed."""
        return self._moves.left

    @property
    def refused(self) -> str:
        """Why the last plan to move experts was given up on this rank; empty where it was not."""
        return self._moves.refused

    def _planned(self, policy: Policy) -> int:
        rank = self._joined()
        tokens = rank.load_reading().load().tokens
        placement = rank.epoch.placement
        target = policy(placement, Load(self._meeting.sum(tokens)), UNLIMITED)
        return self._moves.plan(placement.with_slots(self._meeting.first(target.slots)))

    def check(self) -> None:
        """Waits for the steps that were launched. Raises PeersLate where one went without a member's rows.

        On the CPU each call has done so already. On a GPU no call does: it would have to wait for the device.
        """
        rank, asked = self._joined(), self._unasked
        self._unasked = {}
        if asked:
            torch.cuda.synchronize(rank.device)
        for layer in asked:
            rank.late(layer)

    def close(self) -> None:
        """Leaves the group; no rank may be in a step. Other groups of the process stay. Not collective."""
        self._submitted.close()
        rank, self._rank = self._rank, None
        if rank is not None:
            self._moves.close()
            self._meeting.close()
            leave_torchrun(rank)

    def _joined(self) -> HostedRank:
        if self._rank is None:
            raise RuntimeError(CLOSED)
        return self._rank

    def _check(self, layer: int, rows: Rows) -> None:
        """Raises before the other ranks are met, as far as this rank can know what is wrong."""
        rank = self._joined()
        if layer not in rank.served.layers:
            raise WrongRows(f"layer {layer} has no experts here; layers {sorted(rank.served.layers)} have")
        self._sizes.check(layer, rows)
        own, most = rows.hidden.shape[0], rank.plans[layer].problem.lane_rows
        if own > most:
            raise WrongRows(f"layer {layer}: {own} rows, and step.lane_rows is {most}")
        if rows.weights is None:
            rank.experts.gate(layer).check(rows.route)
        if self._recording is None and rank.device != "cpu" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph is recorded outside of `recording`, which says how many rows each rank brings: "
                "write `with way.recording(rows) as recorded, torch.cuda.graph(graph):`"
            )

    def _followed(self) -> Agreed:
        """One step of the others, without rows of this rank; none where all have ended their pass."""
        rank = self._joined()
        agreed = self._meeting.agree(FOLLOWS, 0, self._moves.vote)
        if agreed.layer != FOLLOWS:
            none = empty_input(self._sizes.hidden, self._sizes.top_k, rank.served.dtype)
            self._run(agreed, none.to(rank.device))
        return agreed

    def _step(self, layer: int, rows: Rows, counted: tuple[int, ...] | None) -> Tensor:
        """counted: rows of each lane, where the caller knew them as it made the call."""
        if self._recording is not None and torch.cuda.is_current_stream_capturing():
            return self._record(self._recording, layer, rows)
        rank, own = self._joined(), rows.hidden.shape[0]
        if counted is None:
            agreed = self._meeting.agree(layer, own)
        elif counted[rank.index] == own:
            agreed = Agreed(layer, counted)
        else:
            told = counted[rank.index]
            raise WrongRows(f"layer {layer}: {own} rows, and `rows` was told {told} of rank {rank.index}")
        return self._run(agreed, self._lane_rows(rows)).to(rows.hidden.dtype)

    def _record(self, recorded: Recorded, layer: int, rows: Rows) -> Tensor:
        """One step as a part of the graph that is recorded; rows that pad it are not valid."""
        rank, own, padded = self._joined(), rows.hidden.shape[0], recorded.rows
        if own > padded:
            raise WrongRows(f"layer {layer}: {own} rows, and `recording` was told of {padded} at most")
        given = self._lane_rows(rows).each(lambda column: _padded(column, padded))
        answer = rank.record(layer, given, (padded,) * rank.served.mesh.ranks)
        recorded.steps.append((layer, padded))
        return answer[:own].to(rows.hidden.dtype, copy=True)

    def _lane_rows(self, rows: Rows) -> LaneRows:
        """The same rows as a rank takes them, all of them real."""
        hidden = rows.hidden.detach().to(self._joined().served.dtype)
        valid = torch.ones(hidden.shape[0], dtype=torch.bool, device=hidden.device)
        if rows.weights is None:
            return LaneLogits(hidden, rows.route.detach(), valid)
        ids = rows.ids(self._sizes.experts)
        return LaneInput(hidden, ids, rows.weights.detach().float(), valid)

    def _run(self, agreed: Agreed, rows: LaneRows) -> Tensor:
        """Raises PeersLate where rows did not travel between all ranks, or some were not waited for."""
        rank = self._joined()
        try:
            answer, _ = rank.step(agreed.layer, rows, agreed.lane_rows)
        except PeersGone as gone:
            raise PeersLate(
                f"rank {rank.index}, in a step of layer {agreed.layer}, did not meet all other ranks within "
                f"step.timeout_seconds: one is late or gone; all close their ways and connect again: {gone}"
            ) from gone
        if self._side is None:
            rank.late(agreed.layer)
        else:
            self._unasked[agreed.layer] = None
        return answer

    def _wait_for_side(self) -> None:
        """Steps follow one another on the device, also from one stream to the other."""
        if self._side is not None and self._side_used:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)
            self._side_used = False


def _padded(column: Tensor, rows: int) -> Tensor:
    """`column` with rows of zeros behind it."""
    whole = column.new_zeros((rows, *column.shape[1:]))
    whole[: column.shape[0]] = column
    return whole


def _stream(device: str) -> torch.cuda.Stream:
    made: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return made
