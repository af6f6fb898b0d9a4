"""Steps whose every byte is known: rows of small integers, weights and experts that multiply by small
integers, so that sums are exact in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.dispatch.members import Member, Members
from moeserve.dispatch.routing import Routing
from moeserve.experts.batch import ExpertBatch
from moeserve.experts.placement import EMPTY

LARGEST = 4

FEWER = 3
"""Slots that every second owner of an unequal group has less than the others."""

ROLES = ("both", "lane", "owner")


def members_named(text: str, world: int, room: str = "") -> Members:
    """Members by a name: "" for ranks, "1x2" for lanes and owners apart, or roles as "both,lane,owner".

    `room`, as "12x6", reserves lanes and owners' places beyond them. Raises ValueError where they are not
    `world` members, or a role is none of ROLES.
    """
    if not text:
        found = Members.of_ranks(world)
    elif "x" in text:
        found = Members.split(*_two(text))
    else:
        found = _of_roles(text.split(","))
    if len(found) != world:
        raise ValueError(f"members {text!r} are {len(found)}; this launch has {world} processes")
    if not room:
        return found
    lanes, owners = _two(room)
    return Members(found.present, max(lanes, found.max_lanes), max(owners, found.max_owners))


def _two(text: str) -> tuple[int, int]:
    one, other = text.split("x")
    return int(one), int(other)


def _of_roles(roles: list[str]) -> Members:
    if wrong := sorted(set(roles) - set(ROLES)):
        raise ValueError(f"roles {wrong} must be of {', '.join(ROLES)}")
    present, lanes, owners = [], 0, 0
    for seat, role in enumerate(roles):
        lane, owner = role != "owner", role != "lane"
        present.append(Member(seat, lanes if lane else None, owners if owner else None))
        lanes, owners = lanes + lane, owners + owner
    return Members(tuple(present), lanes, owners)


def held_by(members: Members, owner: int, slots: int) -> int:
    """How many of the `slots` numbers of an owner's place are slots: of unequal groups' not all."""
    return slots if members.equal or owner % 2 == 0 else slots - FEWER


def slots_of(spec: DispatchSpec) -> Tensor:
    """The numbers of all owners' slots, ascending."""
    owners = (member.owner for member in spec.members.present if member.owner is not None)
    numbers = [
        owner * spec.slots + at
        for owner in sorted(owners)
        for at in range(held_by(spec.members, owner, spec.slots))
    ]
    return torch.tensor(numbers, device=spec.device)


def lane_rows(spec: DispatchSpec, seed: int, rows: tuple[int, ...], number: int) -> tuple[Tensor, Routing]:
    """This member's rows of step `seed`, none without a lane: integers within +-4, slots and weights."""
    random = torch.Generator(spec.device).manual_seed(seed * 64 + spec.seat)
    own, device = spec.own_rows(rows), spec.device
    hidden = torch.randint(-LARGEST, LARGEST + 1, (own, spec.hidden), generator=random, device=device)
    slots = slots_of(spec)
    order = torch.rand((own, len(slots)), generator=random, device=device).argsort(dim=1)[:, : spec.top_k]
    if seed % 7 == 3:
        order = order[:1].expand(own, -1)  # one set of experts for all rows
    none = torch.rand(order.shape, generator=random, device=device) < (0.3 if seed % 3 else 0.0)
    weights = torch.randint(1, 4, order.shape, generator=random, device=device).float()
    chosen = torch.where(none, EMPTY, slots[order].int())
    return hidden.to(spec.dtype), Routing(chosen, weights, rows, number)


def factors(slots: Tensor) -> Tensor:
    """What each slot multiplies by: 1, 2 or 3."""
    return 1 + slots % 3


def compute(spec: DispatchSpec, batch: ExpertBatch) -> Tensor:
    """This member's experts, without a look at the counts."""
    rows = batch.tokens.dequantize()
    if not spec.slots_here:
        return rows.to(spec.dtype)
    first = spec.first_slot
    mine = factors(torch.arange(first, first + spec.slots_here, device=rows.device)).float()
    if rows.dim() == 3:
        return (rows * mine[:, None, None]).to(spec.dtype)
    places = torch.arange(len(rows), device=rows.device)
    slot = torch.searchsorted(batch.offsets[1:].contiguous(), places, right=True)
    return (rows * mine[slot.clamp(max=spec.slots_here - 1)][:, None]).to(spec.dtype)


def wrong_rows(spec: DispatchSpec, hidden: Tensor, routing: Routing, answer: Tensor) -> Tensor:
    """How many rows of `answer` are not what they must be: a scalar on the device."""
    weighted = torch.where(routing.slots >= 0, routing.weights * factors(routing.slots), 0.0)
    partials = torch.zeros_like(hidden, dtype=torch.float32)
    for owner in range(spec.members.max_owners):  # each owner's sum travels in the hidden dtype
        here = routing.slots // spec.slots == owner
        share = torch.where(here, weighted, 0.0).sum(dim=1, keepdim=True)
        partials += (hidden.float() * share).to(spec.dtype)
    return (answer.float() != partials.to(spec.dtype).float()).any(dim=1).sum()
