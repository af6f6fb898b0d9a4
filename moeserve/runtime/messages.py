"""What travels on the coordinator's streams, as JSON objects: step headers, epochs, announcements."""

from __future__ import annotations

import math
import time

import numpy as np

from moeserve.experts.placement import Placement
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.mesh import Mesh
from moeserve.runtime.step import Announcement, Header
from moeserve.runtime.stream import Message


def header_message(header: Header, generation: int) -> Message:
    """A step for one rank."""
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
    """The step in a message."""
    jobs = tuple((job, rows) for job, rows in message["jobs"])
    return Header(message["number"], message["epoch"], message["layer"], tuple(message["sizes"]), jobs)


def announcement_message(job: Announcement, generation: int) -> Message:
    """A job for the sequencer. Time left travels and not a date, since hosts' clocks differ."""
    left = None if math.isinf(job.deadline) else job.deadline - time.time()
    return {
        "kind": "announce",
        "generation": generation,
        "job": job.job,
        "layer": job.layer,
        "rows": job.rows,
        "left": left,
    }


def announcement_from(message: Message, rank: int, now: float) -> Announcement:
    """The job in a message from `rank`, its deadline on the clock that reads `now`."""
    deadline = math.inf if message["left"] is None else now + float(message["left"])
    return Announcement(rank, int(message["job"]), int(message["layer"]), int(message["rows"]), deadline)


def epoch_message(epoch: Epoch) -> Message:
    """An epoch, whole."""
    mesh, placement = epoch.mesh, epoch.placement
    return {
        "kind": "epoch",
        "number": epoch.number,
        "mesh": [mesh.dp, mesh.tp, mesh.ep, mesh.pcp],
        "weights_version": epoch.weights_version,
        "slots": placement.slots.tolist(),
        "owners": placement.ranks,
        "experts": placement.experts,
    }


def epoch_from(message: Message) -> Epoch:
    """The epoch in a message."""
    slots = np.array(message["slots"], dtype=np.int32)
    placement = Placement(slots, message["owners"], message["experts"])
    return Epoch(message["number"], Mesh(*message["mesh"]), placement, message["weights_version"])
