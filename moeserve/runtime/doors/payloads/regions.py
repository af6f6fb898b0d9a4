"""The shared-memory regions of a rank's process: who may use them, and when their memory goes back.

A region is a memfd that this process made and sealed: whoever holds its descriptor can write the bytes, and
can neither shrink it (reading a truncated mapping would kill this process with SIGBUS), nor grow it, nor
add seals.
"""

import logging
import mmap
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from moeserve.proto.tensors import TensorError
from moeserve.proto.texts import quoted
from moeserve.runtime.doors.payloads.errors import NamedRegionRefused, RegionLimit, UnknownRegion
from moeserve.runtime.doors.payloads.handover import Handover, TakeCall
from moeserve.runtime.doors.payloads.memory import named_memory, sealed_memory
from moeserve.runtime.doors.payloads.region import Held, Hold, Region, ViewsKey
from moeserve.runtime.doors.payloads.registration import Registrar

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
MOST_VIEWS = 64  # that one region's calls are given again without making them


@dataclass(frozen=True)
class RegionLimits:
    """What the regions of a process may take, and whether clients may register objects by name: unsafe.

    Whoever owns a named object can truncate it at any time, and the next access kills the rank with SIGBUS;
    and a client can name any object of the rank's user.
    """

    max_bytes: int = 4 << 30
    max_regions: int = 256
    allow_named: bool = False
    fetch_seconds: float = 10.0  # for a client to fetch a region that was made for it, or to name one


@dataclass(frozen=True)
class RegionStatus:
    """One line of the list: `name` without its secret part, bytes, calls that hold it, sort, maker."""

    name: str
    size: int
    in_use: int
    named: bool
    maker: str


class Regions:
    """Keeps all regions of this process. Every method may be called from any thread.

    A region lives until it is released, or the last lease on it ends, or nobody fetched it within
    `fetch_seconds`; its bytes count against the limit until no call holds it any more.
    """

    def __init__(
        self,
        limits: RegionLimits | None = None,
        registrar: Registrar | None = None,
        *,
        on_device: bool = False,
    ) -> None:
        """`registrar` registers the memory of regions with this process's device; None: nothing is.

        on_device: the process computes on the host, which reads and writes regions in place.
        """
        self.limits = limits or RegionLimits()
        self._registrar, self._on_device = registrar, on_device
        self._lock = threading.Lock()
        self._regions: dict[str, Region] = {}
        self._bytes = 0
        self._count = 0
        self._made = 0
        self._closed = False
        self.take_call: TakeCall | None = None  # takes calls over leases; set before the first region is made
        self.together: Callable[[], AbstractContextManager[None]] = (
            nullcontext  # around calls that came at once
        )
        self._handover = Handover(self, self.limits.fetch_seconds)

    @property
    def socket(self) -> str:
        """The Unix socket that hands out descriptors; `@` stands for the abstract namespace."""
        return self._handover.address

    @property
    def bytes(self) -> int:
        """Bytes of all regions, those that were released but are still held included."""
        return self._bytes

    def create(self, size: int, maker: str = "", *, own: bool = False) -> tuple[str, int]:
        """Makes a sealed region of at least `size` bytes: its secret name, and its size in whole pages.

        maker: the connection that asked for it, which alone sees it in its list. own: nobody fetches it.
        Raises TensorError for a size below 1 and RegionLimit when there is no room.
        """
        if size < 1:
            raise TensorError("size", f"a region of {size} bytes cannot be made; it takes at least 1")
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._reserve(size)
        try:
            descriptor, memory = sealed_memory(size)
        except BaseException:
            self._give_back(size)
            raise
        registered = None if self._registrar is None else self._registrar.register(memory)
        with self._lock:
            self._made += 1
            public = f"region-{self._made}"
            name = f"{public}-{secrets.token_hex(16)}"
            self._regions[name] = Region(
                name, public, memory, descriptor, maker, registration=registered, on_device=self._on_device
            )
            self._regions[name].claimed = own
        return name, size

    def register(self, name: str, key: str, offset: int, size: int) -> None:
        """Maps `size` bytes at `offset` of the POSIX shared-memory object `key`, never to be unlinked here.

        Raises NamedRegionRefused unless the limits allow it, TensorError for a bad name, key or range,
        UnknownRegion when there is no such object, RegionLimit when there is no room.
        """
        if not self.limits.allow_named:
            refused = "registering by name is unsafe and off; use CreateRegion, or allow it"
            raise NamedRegionRefused(f"region {quoted(name)}: {refused}")
        if not NAME.fullmatch(name):
            raise TensorError("name", f"{quoted(name)} must be 1 to 128 letters, digits, '_', '.' or '-'")
        self._reserve(size)
        try:
            memory = named_memory(key, offset, size)
            with self._lock:
                taken = {other for region in self._regions.values() for other in (region.name, region.public)}
                if name in taken:
                    raise TensorError("name", f"{name!r} is registered already; release it first")
                self._regions[name] = Region(name, name, memory, None)
        except BaseException:
            self._give_back(size)
            raise

    def hold(self, name: str, offset: int, size: int, *, field: str = "region") -> Hold:
        """Bytes [offset, offset + size) of region `name`, which stay mapped until the hold is closed.

        Raises UnknownRegion, and TensorError naming `field` when the range leaves the region.
        """
        with self._lock:
            region = self._regions.get(name)
            if region is None:
                raise UnknownRegion(f"{field}: this lane has no region {_without_secret(name)}")
            length = region.memory.nbytes
            if not 0 <= offset <= length or not 0 <= size <= length - offset:
                text = f"{size} bytes at offset {offset} leave region {region.public!r} of {length} bytes"
                raise TensorError(field, text)
            region.holds += 1
            return Hold(self, region, region.memory[offset : offset + size])

    def __contains__(self, name: str) -> bool:
        """Whether calls may use a region `name`."""
        with self._lock:
            return name in self._regions

    def holds(self, name: str) -> int:
        """How often region `name` is held; 0 where there is none."""
        with self._lock:
            region = self._regions.get(name)
            return 0 if region is None else region.holds

    def reached(self, name: str) -> bool:
        """Whether there is a region `name` whose memory the device reads and writes in place."""
        with self._lock:
            region = self._regions.get(name)
            return region is not None and region.reached

    def unhold(self, *regions: Region) -> None:
        """Ends a hold on each; what `Hold.close` calls."""
        with self._lock:
            for region in regions:
                region.holds -= 1
                self._reclaim_if_idle(region)

    def remember(self, held: tuple[Hold, Hold], key: ViewsKey, views: object) -> None:
        """Keeps the `views` that a call which holds its rows' region and its answer's was given, for the next
        with the same `key`, as long as there are both regions.
        """
        with self._lock:
            rows, answer = (hold.region for hold in held)
            if rows is None or answer is None or rows.released or answer.released:
                return
            if len(rows.views) >= MOST_VIEWS:
                _forget_views(rows)
            rows.views[key] = answer, views
            answer.viewed_with[rows.name] = rows

    def again(self, name: str, key: ViewsKey) -> tuple[object, Held] | None:
        """The views of the last call with this `key`, and a new hold on both regions; None: make them anew.

        name: of the region with the rows.
        """
        with self._lock:
            rows = self._regions.get(name)
            found = None if rows is None else rows.views.get(key)
            if rows is None or found is None:
                return None
            answer, views = found
            rows.holds += 1
            answer.holds += 1
            return views, Held(self, (rows, answer))

    def release(self, name: str) -> None:
        """Forgets the region of this whole name, which only its maker knows; calls that hold it finish.

        Raises UnknownRegion.
        """
        with self._lock:
            region = self._regions.get(name)
            if region is None:
                raise UnknownRegion(f"this lane has no region {_without_secret(name)}")
            self._forget(region)

    def list(self) -> tuple[RegionStatus, ...]:
        """Every region that calls may use, oldest first."""
        with self._lock:
            return tuple(
                RegionStatus(r.public, r.memory.nbytes, r.holds, r.descriptor is None, r.maker)
                for r in self._regions.values()
            )

    def close(self) -> None:
        """Stops handing out descriptors and forgets every region."""
        with self._lock:
            self._closed = True
            for region in [*self._regions.values()]:
                self._forget(region)
        self._handover.close()
        if self._registrar is not None:
            self._registrar.close()

    def grant(self, name: str) -> int:
        """A descriptor of `name`, the caller's to close, for one lease more.

        Raises KeyError where there is no such region, OSError where no descriptor is left.
        """
        with self._lock:
            region = self._regions[name]
            if region.descriptor is None:
                raise KeyError(name)
            descriptor = os.dup(region.descriptor)
            region.claimed = True
            region.leases += 1
            return descriptor

    def lease_ended(self, name: str) -> None:
        """One lease on `name` ended; with the last one the region goes."""
        acts: list[Callable[[], object]] = []
        with self._lock:
            region = self._regions.get(name)
            if region is not None:
                region.leases -= 1
                if region.leases == 0:
                    acts = list(region.when_left.values())
                    self._forget(region)
        for act in acts:
            act()

    def when_left(self, name: str, act: Callable[[], object]) -> Callable[[], None]:
        """Has `act` called when the last lease on region `name` ends, from another thread; never where there
        is no such region any more. Returns what takes that back, from any thread.
        """
        with self._lock:
            region, entry = self._regions.get(name), object()
            if region is not None:
                acts = region.when_left
                acts[entry] = act
        return _nothing if region is None else lambda: _take_back(acts, entry)

    def sweep(self) -> None:
        """Forgets regions that were made but not fetched in time."""
        seconds = self.limits.fetch_seconds
        latest = time.monotonic() - seconds
        with self._lock:
            for region in [*self._regions.values()]:
                if region.descriptor is not None and not region.claimed and region.made < latest:
                    log.info("%s is given back: not fetched in %g s", region.public, seconds)
                    self._forget(region)

    def _reserve(self, size: int) -> None:
        limits = self.limits
        with self._lock:
            if self._closed:
                raise RegionLimit("this lane makes no more regions: it is shutting down")
            if self._count >= limits.max_regions:
                raise RegionLimit(f"{self._count} regions exist, as many as allowed; release some")
            if self._bytes + size > limits.max_bytes:
                taken = f"{self._bytes} of {limits.max_bytes} bytes are taken by regions"
                raise RegionLimit(f"{size} bytes do not fit: {taken} (server.region_bytes)")
            self._count += 1
            self._bytes += size

    def _give_back(self, size: int) -> None:
        with self._lock:
            self._count -= 1
            self._bytes -= size

    def _forget(self, region: Region) -> None:
        del self._regions[region.name]
        region.released = True
        _forget_views(region)  # they would keep it mapped, as would those of calls with their answers here
        for rows in region.viewed_with.values():
            rows.views = {key: kept for key, kept in rows.views.items() if kept[0] is not region}
        region.viewed_with.clear()
        if region.descriptor is not None:
            os.close(region.descriptor)
            self._handover.end(region.name)
        self._reclaim_if_idle(region)

    def _reclaim_if_idle(self, region: Region) -> None:
        """Drops the mapping by dropping the reference: a tensor that still views it keeps it mapped.

        One that is registered with the device is dropped when it is so no more, which may take a while.
        """
        if not region.released or region.holds:
            return
        nbytes, registration = region.memory.nbytes, region.registration
        region.memory, region.registration = memoryview(b""), None
        if registration is None:
            self._count -= 1
            self._bytes -= nbytes
        else:
            registration.end(lambda: self._give_back(nbytes))


def _nothing() -> None:
    """Does nothing: there is nothing to take back."""


def _take_back(acts: dict[object, Callable[[], object]], entry: object) -> None:
    acts.pop(entry, None)


def _forget_views(rows: Region) -> None:
    """Lets go of all views that calls with their rows in `rows` were given."""
    for answer, _ in rows.views.values():
        answer.viewed_with.pop(rows.name, None)
    rows.views.clear()


def _without_secret(name: str) -> str:
    """A name as far as it may stand in logs and messages, in quotation marks."""
    match = re.fullmatch(r"(region-\d+)-[0-9a-f]{32}", name)
    return quoted(match.group(1) if match else name)
