"""The dispatcher contract: `Dispatcher`, what it hands over, and the `DispatchEntry` that says what it can
do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moeserve.device.machine import Machine
from moeserve.dispatch.limits import Limits
from moeserve.dispatch.members import Member, Members
from moeserve.dispatch.routing import Routing
from moeserve.experts.batch import ExpertBatch, Grouping
from moeserve.experts.kernel import Problem
from moeserve.quant.format import Format


@dataclass(frozen=True, eq=False)
class Dispatched:
    """What arrived on this rank, and the dispatcher's own ticket for the way home."""

    batch: ExpertBatch
    ticket: Any


@dataclass(frozen=True)
class Traffic:
    """Bytes this rank sent to other ranks over the dispatcher's life."""

    dispatched: int = 0
    combined: int = 0

    def plus(self, dispatched: int = 0, combined: int = 0) -> Traffic:
        """The sum of this and what one more phase sent."""
        return Traffic(self.dispatched + dispatched, self.combined + combined)

    def since(self, earlier: Traffic) -> tuple[int, int]:
        """Bytes dispatched and combined after `earlier`."""
        return self.dispatched - earlier.dispatched, self.combined - earlier.combined


class Living(NamedTuple):
    """Whom a member still waits for: `words` int32 on the device, 0 for who was given up, or all at once when
    the group ends; and the bits of the places among them that none may be 0 of while answers are right.
    """

    words: Tensor
    places: int


class Dispatcher(Protocol):
    """Carries rows to their slots' owners and weighted sums home.

    Collective over the members that take part in a step: every owner, and each lane that brings rows. They
    call both phases in one order of steps. A member that is no owner and brings no row takes no part, and
    nobody waits for it. On a GPU both phases queue their work on the current stream and return; the host does
    not wait for it. A dispatcher inherits from this class, for what it need not say itself.
    """

    def dispatch(self, hidden: Tensor, routing: Routing) -> Dispatched:
        """Quantizes `hidden [T, H]` to the wire on the sender, carries it, groups it by slot on arrival."""

    def combine(self, outputs: Tensor, ticket: Any) -> Tensor:
        """Brings `outputs`, as the kernel made them, home: [T, H] of the hidden's dtype, summed in float32.

        Partial sums over slices of an expert are added here, and nowhere else.
        """

    def combine_into(self, outputs: Tensor, ticket: Any, place: Tensor) -> Tensor:
        """Does the same, with the answer at `place`, `[T, H]` of the hidden's dtype, which it returns.

        By default it is copied there: a dispatcher that can write its sums there saves reading them again.
        """
        return place.copy_(self.combine(outputs, ticket))

    counts_on_device: bool = False
    """Whether `traffic` is counted by the device, and so also while a CUDA graph replays."""

    @property
    def traffic(self) -> Traffic:
        """Bytes that it has sent to other ranks so far."""

    def expect(self, number: int, absent: tuple[int, ...] = ()) -> None:
        """Says which step a recorded dispatch runs as when it is replayed next, and which lanes are absent.

        `number` is the step's, as in `Routing`; `absent` are lanes that the recording has rows of and the
        step does not name. What is launched and not replayed learns both from its routing. Nothing to do by
        default.
        """
        return

    @property
    def living(self) -> Living | None:
        """Words on the device that say whether all are waited for whose rows and sums a step needs; None
        where the device does not know.
        """
        return None

    def late(self) -> tuple[int, ...]:
        """Seats it stopped waiting for since this was last asked, ascending, without waiting for the device.

        None by default: over torch.distributed a peer that stays away is an error of the collective.
        """
        return ()

    def exclude(self, seats: Collection[int]) -> None:
        """Waits for no member of `seats` any more, what is under way included, and does not name them late.

        Their rows count as none. Nothing to do by default: collectives end with their process group.
        """
        return

    def interrupt(self) -> None:
        """Waits for no other rank any more, what is under way included: the group has ended. From any thread.

        What is under way ends soon, with an answer that means nothing. Nothing to do by default: collectives
        end with their process group.
        """
        return

    def part(self) -> bool:
        """Lets go of all but what members that have yet to end may still write to. Whether there is any, for
        `close` to free; where there is none, it is `close`.
        """
        self.close()
        return False

    def close(self) -> None:
        """Frees buffers; the process group stays its owner's."""


@dataclass(frozen=True)
class DispatchSpec:
    """What a dispatcher is built for: one member of a group, and what travels.

    Slots are numbered over all owners' places: those of owner o begin at `o * slots`, or at 0 for every owner
    when experts are sliced.
    """

    members: Members
    seat: int  # of the member that it is built for
    slots: int  # numbers that each owner's place has
    hidden: int
    top_k: int
    lane_rows: int  # most rows a lane brings to a step
    dtype: torch.dtype  # of hidden states and answers
    wire: Format
    sliced: bool = False  # every rank holds a slice of every slot: rows go to all ranks
    row_align: int = 1
    device: str = "cpu"
    patience: float = 30.0  # seconds a dispatcher waits for a peer before it names it late
    on_late: str = "fail"  # "fail": the step fails naming the late; "drop": it goes on without their rows
    held: int | None = None  # slots that this member holds of its `slots` numbers; None: all of them

    @cached_property
    def member(self) -> Member:
        """The member that it is built for."""
        return self.members.at(self.seat)

    @cached_property
    def slots_here(self) -> int:
        """e: slots that this member holds; 0 for one that is no owner."""
        if self.member.owner is None:
            return 0
        return self.slots if self.held is None else self.held

    @cached_property
    def first_slot(self) -> int:
        """The number of this member's first slot."""
        return 0 if self.sliced else (self.member.owner or 0) * self.slots

    @cached_property
    def rank(self) -> int:
        """This member's position in the process group."""
        return self.members.position(self.seat)

    @property
    def ranks(self) -> int:
        """How many members the process group has."""
        return len(self.members)

    def own_rows(self, lane_rows: tuple[int, ...]) -> int:
        """How many of a step's rows this member brings; 0 without a lane."""
        lane = self.member.lane
        return 0 if lane is None else lane_rows[lane]

    def takes_part(self, lane_rows: tuple[int, ...]) -> bool:
        """Whether this member takes part in a step, as `Members.in_step` says of all."""
        return any(lane_rows) if self.member.owner is not None else self.own_rows(lane_rows) > 0


class Pace(Enum):
    """What a dispatcher is made for."""

    LOW_LATENCY = "low_latency"
    HIGH_THROUGHPUT = "high_throughput"
    ANY = "any"


@dataclass(frozen=True)
class DispatchEntry:
    """What one dispatcher can do, as data."""

    name: str
    build: Callable[[DispatchSpec, ProcessGroup | None], Dispatcher]  # over a group of the spec's members
    wires: frozenset[str]  # names of row-wise formats it carries
    grouping: Grouping
    pace: Pace
    archs: frozenset[str]
    in_flight: int = 1  # batches between dispatch and combine
    buffer_bytes: Callable[[DispatchSpec], int] | None = None  # of a rank's device; None: its library's own
    modules: frozenset[str] = frozenset()
    max_lanes: int | None = None
    max_owners: int | None = None
    sliced: bool = False  # carries rows to all ranks for sliced experts
    unequal: bool = False  # lanes and owners may be different members, and lanes be absent from a step
    partial_sums: str = "float32"  # how sums over ranks are rounded on the way home
    host_sync: bool = False  # reads counts on the host
    living: bool = False  # a GPU knows by `Dispatcher.living` whom it waits for no more
    # where its group meets by gloo, members that have yet to end can do the next group's no harm
    outlives: bool = False
    ordered: bool = True  # rows of a slot arrive in the order of lanes and of their rows
    permutes: bool = True  # groups and weighs rows by the kernels of `permute`, not by its own
    quantizes: bool = False  # the library rounds rows itself: codes may differ from the format's
    limits: Limits = field(default_factory=Limits)
    reference: bool = False  # judges the others; wins only when named
    only_named: frozenset[str] = frozenset()  # archs where it stands in for the real one: only when named
    verified: tuple[str, ...] = field(default=())

    def refuses(self, problem: Problem, machine: Machine) -> str | None:
        """Why this dispatcher cannot serve `problem` on `machine`, or None."""
        if machine.arch not in self.archs:
            return f"runs on {', '.join(sorted(self.archs))}, not on {machine.arch}"
        if missing := self.modules - machine.modules:
            return f"needs the package {', '.join(sorted(missing))}"
        if reason := self._refuses_members(problem):
            return reason
        if problem.sliced and not self.sliced:
            return "carries rows to whole experts only, and here every rank holds a slice of each"
        return self.limits.refuses(
            problem.lanes, problem.top_k, problem.shape.hidden, problem.model_format.name
        )

    def _refuses_members(self, problem: Problem) -> str | None:
        """Why it cannot serve a group of these lanes and owners, or None."""
        if not self.unequal and not problem.equal:
            if problem.reserved_lanes or problem.reserved_owners:
                found = f"{problem.reserved_lanes} lanes and {problem.reserved_owners} owners reserved"
            else:
                found = f"{problem.lanes} lanes and {problem.owners} owners"
            return f"serves groups in which every member has a lane and experts; here are {found}"
        for kind, count, most in (
            ("lanes", problem.lanes, self.max_lanes),
            ("owners", problem.owners, self.max_owners),
        ):
            if most is not None and count > most:
                return f"joins at most {most} {'ranks' if problem.equal else kind}, not {count}"
        return None
