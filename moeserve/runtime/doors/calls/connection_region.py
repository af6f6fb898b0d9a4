"""`ConnectionRegion`: the region of a rank in which the rows of one data connection lie, and their answer."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress

from moeserve.proto import moe_pb2
from moeserve.proto.transports.frames import fresh_room
from moeserve.proto.transports.shared_memory import aligned, region_size
from moeserve.runtime.doors.payloads.errors import RegionLimit, UnknownRegion
from moeserve.runtime.doors.payloads.region import Hold
from moeserve.runtime.doors.payloads.regions import Regions

log = logging.getLogger(__name__)


class ConnectionRegion:
    """One connection's; made when rows come, and as large as its largest call needs."""

    def __init__(self, regions: Regions, rooms: threading.BoundedSemaphore) -> None:
        """rooms: of which each region takes one. Half of the bytes that regions may have stay others'."""
        self._regions, self._rooms = regions, rooms
        self._name = ""
        self._hold: Hold | None = None
        self._used_at = 0.0
        self.doubted = False  # a call ended without an answer, whose step may still touch it

    @property
    def held(self) -> bool:
        """Whether there is one."""
        return self._hold is not None

    def rows(self, nbytes: int) -> memoryview:
        """Memory for so many bytes of rows. No call is under way."""
        needed, self._used_at = 2 * aligned(nbytes), time.monotonic()
        touched = self.doubted and self._regions.holds(self._name) > 1  # besides by this connection
        self.doubted = False
        if touched or self._hold is None or self._hold.memory.nbytes < needed:
            self.close()
            if not self._make(region_size(needed)):
                return fresh_room(nbytes)
        assert self._hold is not None
        return self._hold.memory[:nbytes]

    def _make(self, size: int) -> bool:
        """Whether there is room for one of so many bytes; it is made then."""
        regions, rooms = self._regions, self._rooms
        if 2 * (regions.bytes + size) > regions.limits.max_bytes or not rooms.acquire(blocking=False):
            return False
        try:
            self._name, size = regions.create(size, own=True)
            self._hold = regions.hold(self._name, 0, size)
        except (RegionLimit, UnknownRegion) as full:  # others have taken the rest meanwhile, or it closes
            rooms.release()
            log.debug("rows of a data connection lie in no region: %s", full)
            return False
        return True

    def place(self, request: moe_pb2.ForwardRequest, rows: memoryview) -> None:
        """Says in a request where its rows are, and where their answer is to be."""
        if self._hold is None:
            request.hidden.data = bytes(rows)
            return
        for place, offset in ((request.hidden.region, 0), (request.output, aligned(rows.nbytes))):
            place.name, place.offset, place.size = self._name, offset, rows.nbytes

    def answer(self, reply: moe_pb2.ForwardReply) -> memoryview | None:
        """The answer of a reply that lies here; it is in the reply no more."""
        if self._hold is None or reply.hidden.WhichOneof("payload") != "region":
            return None
        at, nbytes = reply.hidden.region.offset, reply.hidden.region.size
        reply.hidden.ClearField("region")
        return self._hold.memory[at : at + nbytes]

    def rest(self, seconds: float) -> None:
        """Gives the region back where no rows came to it for so long. No call is under way."""
        if self._hold is not None and time.monotonic() - self._used_at > seconds:
            self.close()

    def close(self) -> None:
        """Gives the region back; a call that is still under way holds it until it has ended."""
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.close()
            self._rooms.release()
            with suppress(UnknownRegion):  # the rank's regions are closed
                self._regions.release(self._name)
