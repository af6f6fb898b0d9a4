"""`RingEnd`: one process's end of a pair of rings in memory that two processes of a host share.

Each direction is a ring of bytes with two counters: of bytes written, which only the writer changes, and of
bytes read, which only the reader changes. A writer publishes a frame by its counter after the bytes are
there, so a process that is killed while it writes leaves nothing behind. An eventfd wakes the reader. The
memory is sealed: neither process can make it smaller under the other.

That counters are seen after the bytes they count is a promise of x86's memory order; `supported` says so.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import platform
import select
import time
from typing import NamedTuple

from moeserve.runtime.control.frames import LENGTH

RING_BYTES = 1 << 18
_COUNTERS = 128  # bytes before a direction's data: two counters, on cache lines of their own
_READ = 8  # index of the second counter, in words of 8 bytes
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_FULL_SECONDS = 0.0005  # between looks at a ring that is full
_GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


def supported() -> bool:
    """Whether processes of this host can share rings."""
    return (
        platform.machine() in ("x86_64", "AMD64") and hasattr(os, "eventfd") and hasattr(os, "memfd_create")
    )


class Descriptors(NamedTuple):
    """What makes a pair of rings: their memory, and what wakes the reader at each end."""

    memory: int
    first: int  # wakes the end that made the rings
    second: int  # wakes the other one

    def copied(self) -> Descriptors:
        """Others of the same things. Raises OSError, and leaves none open then."""
        made: list[int] = []
        try:
            for descriptor in self:
                made.append(os.dup(descriptor))
        except OSError:
            for descriptor in made:
                os.close(descriptor)
            raise
        return Descriptors(*made)

    def close(self) -> None:
        """Closes all three."""
        for descriptor in self:
            os.close(descriptor)


def make_rings(nbytes: int) -> Descriptors:
    """Descriptors of new rings of `nbytes` bytes each way, a power of two. Raises OSError, ValueError."""
    if nbytes < mmap.PAGESIZE or nbytes & (nbytes - 1):
        raise ValueError(f"a ring of {nbytes} bytes: it must be a power of two of at least {mmap.PAGESIZE}")
    made: list[int] = []
    try:
        made.append(os.memfd_create("moeserve-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.ftruncate(made[0], 2 * (_COUNTERS + nbytes))
        fcntl.fcntl(made[0], fcntl.F_ADD_SEALS, _SEALS)
        made += [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2)]
    except OSError:
        for descriptor in made:
            os.close(descriptor)
        raise
    return Descriptors(*made)


class RingEnd:
    """Reads and writes like a connected socket. One thread reads at a time, and one writes.

    connection: the descriptor of a socket between the same two processes, which tells when the other one has
    gone; it has to stay open as long as the end is used. spin: seconds for which a reader looks again and
    again before it sleeps; it gives the interpreter up between two looks.
    """

    def __init__(self, descriptors: Descriptors, connection: int, *, first: bool, spin: float = 0.0) -> None:
        """Maps the rings. first: whether this end made them. The descriptors belong to the end from now on.

        Raises OSError or ValueError for descriptors that are no rings; they stay the caller's then.
        """
        size = os.fstat(descriptors.memory).st_size
        nbytes = size // 2 - _COUNTERS
        if nbytes < mmap.PAGESIZE or nbytes & (nbytes - 1) or size % 2:
            raise ValueError(f"memory of {size} bytes is no pair of rings")
        if fcntl.fcntl(descriptors.memory, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError("the memory of the rings is not sealed: it could be cut off")
        whole = memoryview(mmap.mmap(descriptors.memory, size))
        halves = [whole[at : at + size // 2] for at in (0, size // 2)]
        out, into = halves if first else reversed(halves)
        self.nbytes = nbytes
        self._out_counters, self._out = out[:_COUNTERS].cast("Q"), out[_COUNTERS:]
        self._in_counters, self._in = into[:_COUNTERS].cast("Q"), into[_COUNTERS:]
        self._written = self._read = 0
        _, own, other = descriptors if first else (descriptors[0], descriptors[2], descriptors[1])
        self._own, self._other, self._spin, self._connection = own, other, spin, connection
        self._events = select.epoll()
        self._events.register(own, select.EPOLLIN | select.EPOLLET)  # each write wakes; none has to be read
        self._events.register(connection, select.EPOLLRDHUP)
        self._is_gone = select.poll()
        self._is_gone.register(connection, select.POLLRDHUP)
        self._closed = self._gone = self._woken = False
        self._descriptors = descriptors

    # -- writing --------------------------------------------------------------------------------------------

    def write(self, data: bytes | memoryview, within: float) -> None:
        """Writes `data`: at once what the ring holds, more of it piece by piece as the other end reads.

        Raises BlockingIOError where the other end takes nothing for `within` seconds (0: no bound), and
        ConnectionError where it is gone or this end is closed.
        """
        if isinstance(data, bytes) and self._written_whole(data):
            return
        view = data if isinstance(data, bytes) else memoryview(data).cast("B")
        size, start = len(view), 0
        while start < size:
            free = self._free()
            if free < min(size, self.nbytes) and not (free and size > self.nbytes):
                self._await_more(free, within)
                continue
            if self._closed:
                raise ConnectionError("this end of the ring is closed")
            count = min(free, size - start)
            self._put(view if count == size else view[start : start + count], count)
            start += count
            os.eventfd_write(self._other, 1)

    def _written_whole(self, data: bytes) -> bool:
        """Writes what has room in one piece, as nearly all frames have: the short way of `write`."""
        written, size = self._written, len(data)
        used, at = written - self._out_counters[_READ], written & (self.nbytes - 1)
        if used < 0 or used + size > self.nbytes or at + size > self.nbytes or self._closed:
            return False
        self._out[at : at + size] = data
        self._written = self._out_counters[0] = written + size
        os.eventfd_write(self._other, 1)
        return True

    def _free(self) -> int:
        used = self._written - self._out_counters[_READ]
        if not 0 <= used <= self.nbytes:
            raise ConnectionError(f"the other end says that it has read {-used} bytes more than there were")
        return self.nbytes - used

    def _put(self, data: bytes | memoryview, count: int) -> None:
        at = self._written & (self.nbytes - 1)
        if at + count <= self.nbytes:
            self._out[at : at + count] = data
        else:
            left = self.nbytes - at
            self._out[at:] = data[:left]
            self._out[: count - left] = data[left:]
        self._written += count
        self._out_counters[0] = self._written

    def _await_more(self, free: int, within: float) -> None:
        """Waits until more than `free` bytes are, which were not enough when they were looked at. What was
        read since counts: the reader of an empty ring reads nothing more. Raises as `write`.
        """
        since = time.monotonic()
        while self._free() <= free:
            if self._closed or self._is_gone.poll(0):
                raise ConnectionError("the other end is gone")
            if within and time.monotonic() - since > within:
                raise BlockingIOError(f"{free} bytes of the ring are free, and nothing is read")
            time.sleep(_FULL_SECONDS)

    # -- reading --------------------------------------------------------------------------------------------

    def frame(self) -> bytes | None:
        """The body of the next frame, where all of it is there in one piece, as of nearly all frames: the
        short way of `read`. None where it is not, also where what is there is no frame. Waits for bytes.
        """
        if self._in_counters[0] == self._read:
            self._wait()
        there, at = self._in_counters[0] - self._read, self._read & (self.nbytes - 1)
        if not LENGTH.size <= there <= self.nbytes or at + LENGTH.size > self.nbytes:
            return None
        (length,) = LENGTH.unpack_from(self._in, at)
        end = at + LENGTH.size + length
        if LENGTH.size + length > there or end > self.nbytes:
            return None
        body = bytes(self._in[at + LENGTH.size : end])
        self._read = self._in_counters[_READ] = self._read + LENGTH.size + length
        return body

    def read(self, size: int) -> bytes:
        """The next `size` bytes; fewer where the other end is gone and has written no more.

        Raises ConnectionError for counters that cannot be.
        """
        if self._there() >= size:
            return self._take(size)
        data = bytearray()
        while len(data) < size:
            there = self._there()
            if there:
                data += self._take(min(there, size - len(data)))
            elif not self._wait():
                break
        return bytes(data)

    def readinto(self, into: memoryview) -> int:
        """Fills `into`; returns how many bytes came before the other end was gone."""
        view, filled = into.cast("B"), 0
        while filled < len(view):
            there = self._there()
            if there:
                data = self._take(min(there, len(view) - filled))
                view[filled : filled + len(data)] = data
                filled += len(data)
            elif not self._wait():
                break
        return filled

    def _there(self) -> int:
        there = self._in_counters[0] - self._read
        if not 0 <= there <= self.nbytes:
            raise ConnectionError(f"the other end says that {there} bytes are in a ring of {self.nbytes}")
        return there

    def _take(self, count: int) -> bytes:
        at = self._read & (self.nbytes - 1)
        data = bytes(self._in[at : at + count])
        if len(data) < count:
            data += bytes(self._in[: count - len(data)])
        self._read += count
        self._in_counters[_READ] = self._read
        return data

    def await_bytes(self, seconds: float) -> bool:
        """Whether bytes are there within `seconds`; False at once where none will come any more, and when
        this end is woken.
        """
        return self._wait(time.monotonic() + seconds)

    def wake(self) -> None:
        """Has the `await_bytes` under way return, or the next one; from any thread."""
        self._woken = True
        os.eventfd_write(self._own, 1)

    @property
    def ready(self) -> bool:
        """Whether bytes are there."""
        return self._in_counters[0] != self._read

    @property
    def over(self) -> bool:
        """Whether this end is closed or the other one is gone. Bytes that it wrote before may be there."""
        return self._closed or self._gone

    def _wait(self, until: float = math.inf) -> bool:
        """Waits for bytes, at most until then on the monotonic clock; False where none came, or will come."""
        spins_until = min(until, time.monotonic() + self._spin) if self._spin else 0.0
        while not self._closed:
            if self._in_counters[0] != self._read:
                return True
            if self._gone:
                return False
            left: float | None = None
            if spins_until or until < math.inf:
                if self._woken and until < math.inf:
                    self._woken = False
                    return False
                now = time.monotonic()
                left = 0.0 if now < spins_until else None if until == math.inf else until - now
                if left is not None and left < 0.0:
                    return False
            for descriptor, event in self._events.poll(left):
                if descriptor == self._connection and event & _GONE:
                    self._gone = True  # what it wrote before is read first
        return False

    def close(self) -> None:
        """Ends both directions here: who reads or writes returns or fails. The socket tells the other end."""
        self._closed = True
        os.eventfd_write(self._own, 1)

    def __del__(self) -> None:
        """Closes the descriptors, once no thread uses the end any more."""
        if (descriptors := self.__dict__.get("_descriptors")) is not None:
            self._events.close()
            descriptors.close()
