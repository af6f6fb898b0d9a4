"""What travels on the coordinator's streams, as maps: steps, epochs, changes, votes, jobs."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeserve.dispatch.members import Member, Members
from moeserve.experts.placement import EMPTY, Placement
from moeserve.proto.texts import quoted
from moeserve.runtime.control.orders import ExpertCopy, StagedCopy, StageOrder, Vote
from moeserve.runtime.control.reached import Phase, Reached
from moeserve.runtime.control.stream import Message
from moeserve.runtime.epoch import Change, Epoch
from moeserve.runtime.mesh import Mesh
from moeserve.runtime.planning.plan import Plan
from moeserve.runtime.step import Announcement, Header

MOST_GENERATIONS = 1 << 48  # far from what a frame's numbers end at


def header_message(header: Header, generation: int) -> Message:
    """The message that tells one member of a step."""
    return {
        "kind": "step",
        "generation": generation,
        "number": header.number,
        "epoch": header.epoch,
        "layer": header.layer,
        "sizes": header.lane_rows,
        "jobs": header.jobs,
    }


def header_from(message: Message) -> Header:
    """The step that a message tells of."""
    jobs = tuple((job, rows) for job, rows in message["jobs"])
    return Header(message["number"], message["epoch"], message["layer"], tuple(message["sizes"]), jobs)


def announcement_message(job: Announcement, *more: Announcement) -> Message:
    """The message that tells the sequencer of jobs of one generation.

    The time left travels and not a date, since hosts' clocks differ.
    """
    message: Message = {
        "kind": "announce",
        "generation": job.generation,
        "job": job.job,
        "layer": job.layer,
        "rows": job.rows,
        "left": _left(job),
    }
    if job.gathered and not more:
        message["gathered"] = True
    if more:
        message["more"] = [(other.job, other.layer, other.rows, _left(other)) for other in more]
    return message


def _left(job: Announcement) -> float | None:
    return None if math.isinf(job.deadline) else job.deadline - time.monotonic()


def announcements_from(message: Message, lane: int, now: float) -> list[Announcement]:
    """The jobs in a message from the member of `lane`, deadlines on the clock that reads `now`. Raises
    KeyError, TypeError or ValueError.
    """
    jobs = [(message["job"], message["layer"], message["rows"], message["left"]), *message.get("more", ())]
    gathered = message.get("gathered") is True
    return [
        Announcement(
            lane,
            int(job),
            int(layer),
            int(rows),
            math.inf if left is None else now + float(left),
            gathered=gathered,
        )
        for job, layer, rows, left in jobs
    ]


def epoch_message(epoch: Epoch) -> Message:
    """The message that holds a whole epoch."""
    mesh, placement, members = epoch.mesh, epoch.placement, epoch.members
    return {
        "kind": "epoch",
        "number": epoch.number,
        "mesh": [mesh.dp, mesh.tp, mesh.ep],
        "versions": epoch.versions,
        "weights": epoch.names,
        "slots": placement.slots.tolist(),
        "owners": placement.owners,
        "experts": placement.experts,
        "room": placement.room,
        "members": [[member.seat, member.lane, member.owner] for member in members.present],
        "max_lanes": members.max_lanes,
        "max_owners": members.max_owners,
    }


def epoch_from(message: Message) -> Epoch:
    """The epoch that a message holds."""
    slots = np.array(message["slots"], dtype=np.int32)
    placement = Placement(slots, message["owners"], message["experts"], tuple(message["room"]))
    present = tuple(Member(seat, lane, owner) for seat, lane, owner in message["members"])
    members = Members(present, message["max_lanes"], message["max_owners"])
    mesh, versions = Mesh(*message["mesh"]), tuple(message["versions"])
    return Epoch(message["number"], mesh, placement, members, versions).with_names(message["weights"])


def held_message(generation: int, epoch: Epoch | None, *, drained: bool = False) -> Message:
    """What a member holds that comes back to a head: its epoch, None before any, and the newest generation
    that it has heard of. drained: its lane takes no call any more, as the head before had it.
    """
    return {
        "kind": "held",
        "generation": generation,
        "epoch": None if epoch is None else epoch_message(epoch),
        "drained": drained,
    }


def held_from(message: Message) -> tuple[int, Epoch | None]:
    """What the member says that it holds: generation and epoch. Raises KeyError, TypeError or ValueError."""
    epoch, generation = message["epoch"], int(message["generation"])
    if not 0 <= generation < MOST_GENERATIONS:
        raise ValueError(f"generation {quoted(generation)} is not one of a service")
    found = None if epoch is None else epoch_from(epoch)
    if found is not None and not 0 < found.number < MOST_GENERATIONS:
        raise ValueError(f"epoch {quoted(found.number)} is not one of a service")
    return generation, found


def stage_message(number: int, change: Change, decoder_layer: int, owner: int | None) -> Message:
    """What the member in the place of `owner` has to stage for a change: nothing where it holds no experts.

    `generation` and `peers` are added by the sender, who knows them.
    """
    placement = change.epoch.placement
    width = placement.slots_per_owner
    place = 0 if owner is not None and change.epoch.mesh.sliced else owner  # slices share one place
    copies = [
        [move.slot % width, move.expert, *_source(move.source, width)]
        for move in change.moves
        if move.slot // width == place
    ]
    return {
        "kind": "stage",
        "change": number,
        "epoch": change.epoch.number,
        "layer": decoder_layer,
        "version": change.epoch.version(change.layer),
        "weights": change.epoch.names,
        "owner": place,
        "copies": copies,
    }


def order_from(message: Message) -> StageOrder:
    """The order that a message holds."""
    return StageOrder(
        message["generation"],
        message["change"],
        message["epoch"],
        message["layer"],
        message["version"],
        tuple(message["weights"]),
        tuple(ExpertCopy(slot, expert, (owner, at)) for slot, expert, owner, at in message["copies"]),
        {int(owner): (address, host) for owner, (address, host) in message["peers"].items()},
        message["owner"],
    )


def _source(slot: int, width: int) -> tuple[int, int]:
    return (EMPTY, EMPTY) if slot == EMPTY else divmod(slot, width)


def report_message(generation: int, counts: tuple[int, int], tokens: NDArray[np.int64]) -> Message:
    """What a member has counted since its start: steps and rows of its experts, and `tokens` `[P, L, E]`.

    The tokens travel packed: as numbers they would hold the interpreter for a millisecond, at both ends.
    """
    packed = zlib.compress(np.ascontiguousarray(tokens, dtype="<i8").tobytes(), 1)
    steps, expert_rows = counts
    return {
        "kind": "report",
        "generation": generation,
        "steps": steps,
        "expert_rows": expert_rows,
        "load": packed,
    }


def load_from(message: Message, shape: tuple[int, int, int]) -> NDArray[np.float64]:
    """The tokens `[P, L, E]` of a report. Raises ValueError where it holds those of another shape."""
    size = 8 * math.prod(shape)
    unpacking = zlib.decompressobj()
    try:
        data = unpacking.decompress(message["load"], size + 1)
    except (TypeError, zlib.error) as error:
        raise ValueError(f"the load of a report cannot be unpacked: {error}") from error
    if len(data) != size:
        raise ValueError(f"the load of a report is not of {size} bytes, as one of shape {list(shape)} is")
    return np.frombuffer(data, dtype="<i8").reshape(shape).astype(np.float64)


def here_message(generation: int, reached: Reached) -> Message:
    """The message that tells that a member's process runs, and how far it is."""
    return {"kind": "here", "generation": generation, "reached": list(reached)}


def reached_from(message: Message) -> Reached:
    """How far the member is that has sent `here`. Raises KeyError, TypeError or ValueError."""
    step, phase = message["reached"]
    return Reached(int(step), Phase(phase))


ANY_GENERATION = 0
"""Among generations whose members have yet to end: nobody knows in which one somebody was."""


def plans_message(plans: Mapping[int, Plan]) -> list[list[Any]]:
    """`[layer, kernels, dispatchers, wires]` of every layer, for those who ask what is served."""
    return [
        [layer, plan.kernel_names, plan.dispatcher_names, plan.wire_names] for layer, plan in plans.items()
    ]


def plans_from(message: Message) -> dict[int, tuple[str, str, str]]:
    """Kernel, dispatchers and wires by layer, as a rank's message has them under `plans`."""
    return {
        int(layer): (kernel, dispatchers, wires)
        for layer, kernel, dispatchers, wires in message.get("plans", [])
    }


def positions_from(message: Message, layers: int) -> tuple[int, ...]:
    """Positions of layers that the member which has sent `prepared` has yet to read. Raises KeyError,
    TypeError or ValueError.
    """
    found = tuple(int(at) for at in message["lacks"])
    if found and not (min(found) >= 0 and max(found) < layers):
        raise ValueError(f"lacks layers {min(found)} to {max(found)} in order, of {layers}")
    return found


def vote_message(vote: Vote) -> Message:
    """The message that holds a rank's vote."""
    return {
        "kind": "voted",
        "generation": vote.order.generation,
        "change": vote.order.change,
        "staged": [list(vars(one).values()) for one in vote.staged],
        "refused": vote.refused,
    }


def staged_from(message: Message) -> tuple[StagedCopy, ...]:
    """What a vote says was staged."""
    return tuple(StagedCopy(*one) for one in message["staged"])


def commit_message(number: int, change: Change, generation: int) -> Message:
    """The message that tells every rank of a change's commit."""
    return {
        "kind": "commit",
        "generation": generation,
        "change": number,
        "number": change.epoch.number,
        "layer": change.layer,
        "slots": change.epoch.placement.slots[change.layer].tolist(),
        "versions": change.epoch.versions,
        "weights": change.epoch.names,
    }


def committed_epoch(message: Message, before: Epoch) -> Epoch:
    """The epoch that a commit makes of the one before."""
    epoch = before.moved(message["layer"], np.array(message["slots"], dtype=np.int32))
    if epoch.number != message["number"]:
        raise ValueError(f"epoch {quoted(message['number'])} is committed after epoch {before.number}")
    return replace(epoch, versions=tuple(message["versions"])).with_names(message["weights"])
