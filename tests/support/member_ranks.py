"""What processes do in a group whose lanes and owners are not the same: they step as `Rank`s, or serve."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from houses import Alone, house_config
from parallel import group

from moeserve.device.machine import machine_named
from moeserve.dispatch.backends import DISPATCHERS
from moeserve.dispatch.members import Member, Members
from moeserve.experts.kernels import KERNELS
from moeserve.runtime.control.stream import connect
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.head.coordinator import Coordinator
from moeserve.runtime.head.placing.changes import rebalance
from moeserve.runtime.keys.keys import Keys
from moeserve.runtime.ordering.sequencer import StepPace
from moeserve.runtime.planning.plan import Plan, make_plan
from moeserve.runtime.rank.lanes.lane import Lane
from moeserve.runtime.rank.lanes.lane_call import LaneBatch
from moeserve.runtime.rank.member.member import Member as MemberProcess
from moeserve.runtime.rank.member.member_group import ProcessGroupSettings
from moeserve.runtime.rank.rank import Rank
from moeserve.runtime.rank.weights.copies import Copier
from moeserve.runtime.rank.weights.mover import CopySources, Mover
from moeserve.runtime.rank.weights.peers import Peers, WeightsServer
from moeserve.runtime.sections import BalanceConfig, KeysConfig, Wanted
from moeserve.runtime.served import Served, served_from
from moeserve.runtime.step import FIRST_NUMBER, LaneInput, StepRecord

LANE_ROWS, LAYER, TOKEN, SECONDS = 16, 1, "a token", 20.0

SHAPES = {
    "one lane, two owners": Members.split(1, 2),
    "a lane, a rank, an owner": Members(
        (Member(0, lane=2), Member(3, lane=0, owner=1), Member(4, owner=0)), 4, 3
    ),
}
"""Groups of three processes; the second has reserved two lanes and an owner's place."""

STEPS: dict[str, tuple[tuple[int, ...], ...]] = {
    "one lane, two owners": ((3,), (1,), (LANE_ROWS,), (5,)),
    "a lane, a rank, an owner": (
        *((4, 0, 2, 0), (3, 0, 0, 0), (0, 0, 7, 0), (LANE_ROWS, 0, LANE_ROWS, 0), (1, 0, 0, 0)),
        *((2, 0, 0, 0), (0, 0, 1, 0)),
    ),
}
"""Rows of every lane in each step; lanes without any are absent."""


def served_and_planned(path: Path, members: Members, backend: str) -> tuple[Served, dict[int, Plan]]:
    """What two owners serve from the checkpoint in `path`, and the plan of each layer for `members`."""
    mesh = {"parallel__data_parallel_size": 2, "parallel__enable_expert_parallel": True}
    served = served_from(house_config(path, step__lane_rows=LANE_ROWS, **mesh))
    problem = replace(
        served.problem(LAYER),
        lanes=members.max_lanes,
        owners=members.max_owners,
        reserved_lanes=members.seat_of_lane.count(None),
        reserved_owners=members.seat_of_owner.count(None),
        split=True,
    )
    wanted = Wanted(dispatcher=backend)
    plan = make_plan(problem, machine_named("cpu", ()), KERNELS, DISPATCHERS, wanted)
    return served, dict.fromkeys(served.layers, plan)


def first_epoch(served: Served, members: Members) -> Epoch:
    """The epoch with `members` and room for two replicas."""
    return Epoch.first(served.mesh, len(served.layers), served.checkpoint.num_experts, 2, members)


def stepping(rank: int, world: int, path: Path, backend: str) -> list[tuple[int, int, int]]:
    """Steps of every shape as the member at position `rank`, its answers compared with one process's.

    Returns of each shape what the member read, the bytes of its experts, and the rows that they computed.
    """
    found, alone = [], Alone(path)
    for name, members in SHAPES.items():
        served, plans = served_and_planned(path, members, backend)
        one = Rank(members.seats[rank], served, plans, "cpu")
        one.load(first_epoch(served, members))
        one.join(group())
        computed = sum(
            _compared(one, alone, lanes, FIRST_NUMBER + 3 * at * at) for at, lanes in enumerate(STEPS[name])
        )
        one.join(group())  # and counted by themselves: every member calls every step
        computed += sum(_compared(one, alone, lanes, None) for lanes in STEPS[name])
        found.append((one.experts.bytes_read, one.experts.bank.nbytes, computed))
        one.leave()
    return found


def _compared(one: Rank, alone: Alone, lane_rows: tuple[int, ...], number: int | None) -> int:
    """Takes part in a step unless it is absent from it; how many rows its experts computed."""
    member = one.member
    if number is not None and member.seat not in one.epoch.members.in_step(lane_rows):
        return 0
    rows = 0 if member.lane is None else lane_rows[member.lane]
    hidden, experts, weights = alone.batch(rows, seed=sum(lane_rows) + member.seat)
    valid = torch.ones(rows, dtype=torch.bool)
    answer, phases = one.step(LAYER, LaneInput(hidden, experts, weights, valid), lane_rows, number)
    assert (answer.shape, one.late(LAYER)) == (hidden.shape, ())
    torch.testing.assert_close(answer, alone.forward(LAYER, hidden, experts, weights), rtol=1e-4, atol=1e-4)
    return phases.expert_rows


class Process:
    """A member's process without doors: its rank, lane, mover and part in the group."""

    def __init__(
        self, seat: int, members: Members, path: Path, coordinator: str, backend: str = "all2allv"
    ) -> None:
        served, plans = served_and_planned(path, members, backend)
        self.rank = Rank(seat, served, plans, "cpu")
        lane, self.records = members.at(seat).lane, list[StepRecord]()
        self.lane = None if lane is None else Lane(lane, LANE_ROWS, 64)
        stream = connect(coordinator, SECONDS)
        settings = ProcessGroupSettings("gloo", SECONDS)
        self.member = MemberProcess(self.rank, self.lane, stream, settings, self.records.append)
        if self.lane is not None:
            self.lane.announce, self.lane.withdraw = self.member.announce, self.member.withdraw
        weights = WeightsServer("127.0.0.1", Keys(KeysConfig(), TOKEN), "cpu", self.rank.experts.bank)
        bank, use, read = self.rank.experts.bank, self.rank.experts.use_weights, self.rank.experts.read
        sources = CopySources("here", "cpu", bank, 2, Peers(Keys(KeysConfig(), TOKEN), "cpu"), use, read)
        self.member.changes.mover = Mover(
            sources, Copier(0.0, "cpu"), self.member.changes.send_vote, self.member.changes.report_corruption
        )
        self._closes: tuple[Callable[[], None], ...] = (self.member.changes.mover.close, weights.close)
        hello = {"kind": "hello", "rank": seat, "token": TOKEN, "pid": 1, "address": "", "host_id": "here"}
        stream.send(hello | {"weights": weights.address})

    def run(self) -> list[StepRecord]:
        """Follows the coordinator until it stops; the steps that it took part in."""
        try:
            self.member.run()
        finally:
            for close in self._closes:
                close()
        return self.records


def head_for(rank: int, served: Served, members: Members) -> tuple[Coordinator | None, str]:
    """The group's head, in the process of the first member alone, and its address. Collective."""
    port, head = torch.zeros(1, dtype=torch.int64), None
    if rank == 0:
        pace = StepPace(LANE_ROWS, 2 * LANE_ROWS)
        head = Coordinator(first_epoch(served, members), served.layers, pace, "127.0.0.1", TOKEN)
        head.start()
        port[0] = int(head.address.rsplit(":", 1)[1])
    dist.broadcast(port, group=group(), group_src=0)
    return head, f"127.0.0.1:{int(port)}"


def serving(rank: int, world: int, path: Path) -> tuple[list[int], int, list[int]]:
    """A group of a lane, a rank and an owner that serves, the head in the process of the first member.

    Returns the lanes' rows of the steps that this member took part in, the epoch that it ended with, and the
    experts in its slots of the layer.
    """
    members = SHAPES["a lane, a rank, an owner"]
    served, _ = served_and_planned(path, members, "all2allv")
    head, address = head_for(rank, served, members)
    one = Process(members.seats[rank], members, path, address)
    records = _led(head, one, path) if head is not None else one.run()
    epoch, held = one.rank.epoch, one.rank.member.owner
    experts = [] if held is None else epoch.placement.of_owner(LAYER, held).tolist()
    return [record.lane_rows for record in records], epoch.number, experts


def _led(head: Coordinator, one: Process, path: Path) -> list[StepRecord]:
    """Calls on the lane before, while and after experts move; then the head stops the group."""
    import threading

    thread = threading.Thread(target=one.run)
    thread.start()
    try:
        head.wait_serving(SECONDS)
        alone, seeds = Alone(path), itertools.count()
        _called(one, alone, next(seeds))
        for change in rebalance(head.epoch, _turned(head.epoch), BalanceConfig().staging_slots):
            outcome = head.change(change, SECONDS)
            assert not outcome.abandoned, outcome
            _called(one, alone, next(seeds))
    finally:
        head.stop()
        thread.join(SECONDS)
    assert not thread.is_alive()
    return one.records


def _called(one: Process, alone: Alone, seed: int) -> None:
    assert one.lane is not None
    batch = alone.batch(5, seed)
    call = one.lane.submit(LaneBatch(LAYER, *batch))
    assert call.wait(SECONDS)
    torch.testing.assert_close(call.result()[0], alone.forward(LAYER, *batch), rtol=1e-4, atol=1e-4)


def _turned(epoch: Epoch) -> np.ndarray:
    """The placement with the layer's experts one further, each owner's into the next slot in use."""
    placement = epoch.placement
    slots = placement.slots.copy()
    used = np.flatnonzero(slots[LAYER] >= 0)
    slots[LAYER, used] = np.roll(slots[LAYER, used], 1)
    return placement.with_slots(slots)
