"""Shared-memory regions as a client sees them: mapped from a file descriptor that the lane's process handed
over.

The connection over which the descriptor came is the lease: when it closes, which it also does when this
process dies, the lane takes the region back once no call holds it.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from moeserve.proto import moe_pb2
from moeserve.proto.errors import Unavailable
from moeserve.proto.tensors import Plain, Spec, as_numpy, as_torch
from moeserve.proto.transports.region_calls import RegionCalls

if TYPE_CHECKING:
    import torch

GRANTED = b"+"
GRANTED_WITH_CALLS = b"+bell"  # these bytes are what older clients and lanes say
REFUSED = b"-"
NAME_BYTES = 256
HANDOVER_SECONDS = 10.0
ALIGN = 64
SMALLEST_REGION = 1 << 16


_open = WeakSet["RemoteRegion"]()


def socket_address(name: str) -> str:
    """The address to give to `socket`: `@name` stands for the abstract namespace, as `ss` prints it."""
    return "\0" + name[1:] if name.startswith("@") else name


def _forked() -> None:
    """In a child: leases are its parent's, and would outlive it where the child does."""
    for region in [*_open]:
        region.close()


os.register_at_fork(after_in_child=_forked)


class RemoteRegion:
    """A region of a lane's process, mapped here.

    Its memory stays mapped as long as a view of it is alive, even after `close`; the lane may then have
    forgotten it.
    """

    def __init__(
        self,
        name: str,
        memory: mmap.mmap,
        lease: socket.socket,
        calls: RegionCalls | None,
        address: str = "",
    ) -> None:
        self.name = name
        self.address = address  # of the lane; "" where a mailbox is part of it
        self.calls = calls  # None where the lane takes no calls over a lease
        self.size = len(memory)
        self._memory = memory
        self._lease = lease
        self.process = os.getpid()  # that has fetched it
        _open.add(self)

    @classmethod
    def open(cls, made: moe_pb2.CreateRegionReply, address: str = "") -> RemoteRegion:
        """Fetches the descriptor of a region that CreateRegion `made`, and maps it. address: of the lane.

        Raises Unavailable when the lane's process is gone or refuses the name.
        """
        lease = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            lease.settimeout(HANDOVER_SECONDS)
            lease.connect(socket_address(made.socket))
            _check_user(lease)
            lease.send(made.name.encode())
            descriptor, takes_calls = _receive_descriptor(lease)
            try:
                memory = mmap.mmap(descriptor, made.size)
            finally:
                os.close(descriptor)
            lease.settimeout(0)
        except (OSError, ValueError) as failed:  # of mmap: the lane says another size than the region has
            lease.close()
            text = f"region of {made.size} bytes could not be fetched from {made.socket}: {failed}"
            raise Unavailable("UNAVAILABLE", "region_lost", text) from failed
        return cls(made.name, memory, lease, RegionCalls(lease) if takes_calls else None, address)

    @property
    def alive(self) -> bool:
        """Whether the lane's process still keeps the region, and this process fetched it: after a fork it is
        its parent's, too.
        """
        if self.process != os.getpid():
            return False
        try:
            return self._lease.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def bytes(self) -> memoryview:
        """All of its memory."""
        return memoryview(self._memory)

    def view(self, offset: int, spec: Spec) -> Plain:
        """The array of `spec` that starts `offset` bytes into the region; ValueError when it does not fit."""
        if offset < 0 or offset + spec.nbytes > self.size:
            raise ValueError(f"{spec} at offset {offset} ends behind the region's {self.size} bytes")
        return as_numpy(memoryview(self._memory)[offset : offset + spec.nbytes], spec, "region")

    def message(self, offset: int, spec: Spec) -> moe_pb2.Region:
        """Returns this place as a message of the contract."""
        return moe_pb2.Region(name=self.name, offset=offset, size=spec.nbytes)

    def close(self) -> None:
        """Gives the lease back."""
        self._lease.close()

    def end(self) -> None:
        """Gives the lease back; a call that is under way over it ends, with Unavailable. After a fork the
        lease is its parent's, too, and stays.
        """
        if self.process == os.getpid():
            with suppress(OSError):  # it has ended
                self._lease.shutdown(socket.SHUT_RDWR)


def _check_user(lease: socket.socket) -> None:
    """Raises ConnectionRefusedError unless this user's process listens: a region's name is not for others."""
    _, user, _ = struct.unpack("3i", lease.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.geteuid():
        raise ConnectionRefusedError(f"a process of user {user} listens there")


def _receive_descriptor(lease: socket.socket) -> tuple[int, bool]:
    """The region's descriptor, and whether the lane takes calls over the lease."""
    answer, descriptors, _, _ = socket.recv_fds(lease, NAME_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    if not descriptors:
        raise ConnectionRefusedError(answer[1:].decode(errors="replace") or "the lane closed the connection")
    return descriptors[0], answer == GRANTED_WITH_CALLS


@dataclass(frozen=True, eq=False)
class SharedTensor:
    """A tensor in a region of one lane: filled by the caller, or written by the lane, without a copy.

    Made by `MoeClient.allocate`. It must not be changed while a call that was given it runs.
    """

    region: RemoteRegion
    offset: int
    spec: Spec
    rank: int

    @cached_property
    def array(self) -> NDArray[Any]:
        """A numpy view; bfloat16 as `ml_dtypes.bfloat16` where installed, else as uint16 bits."""
        made = self.plain.storage
        if self.spec.dtype.name != "bf16":
            return made
        try:
            import ml_dtypes
        except ModuleNotFoundError:
            return made
        return made.view(np.dtype(ml_dtypes.bfloat16))

    @property
    def tensor(self) -> torch.Tensor:
        """A torch view on the CPU."""
        return as_torch(self.plain.storage.data, self.spec)

    @cached_property
    def plain(self) -> Plain:
        """The view in the storage type of the contract."""
        return self.region.view(self.offset, self.spec)

    @cached_property
    def place(self) -> moe_pb2.Region:
        """Returns its place in shared memory, as a message of the contract."""
        return self.region.message(self.offset, self.spec)

    def overlaps(self, other: SharedTensor) -> bool:
        """Whether both have bytes of one region in common."""
        ends = self.offset + self.spec.nbytes, other.offset + other.spec.nbytes
        return self.region is other.region and self.offset < ends[1] and other.offset < ends[0]

    def close(self) -> None:
        """Gives the region back to the lane."""
        self.region.close()


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up so that the next array starts on a cache line."""
    return -(-nbytes // ALIGN) * ALIGN


def region_size(nbytes: int) -> int:
    """The size to ask for: powers of two, so that calls of like size use the same regions again."""
    return max(SMALLEST_REGION, 1 << max(0, nbytes - 1).bit_length())


class RegionPool:
    """Idle regions of one lane. A fresh region costs 0.7 ms a MiB to create and touch, so they are kept."""

    def __init__(self, *, most_idle: int = 16) -> None:
        self._most_idle = most_idle
        self._idle: deque[RemoteRegion] = deque()
        self._lock = threading.Lock()
        self._closed = False

    def take(self, size: int) -> RemoteRegion | None:
        """An idle region of just `size` bytes that the lane still keeps, or None: then create one."""
        with self._lock:
            fitting = [region for region in self._idle if region.size == size]
            for region in reversed(fitting):
                self._idle.remove(region)
                if region.alive:
                    return region
                region.close()
        return None

    def give(self, region: RemoteRegion) -> None:
        """Keeps `region` for the next call; it must not be in use by any."""
        with self._lock:
            surplus = region if self._closed else None
            if not self._closed:
                self._idle.append(region)
                surplus = self._idle.popleft() if len(self._idle) > self._most_idle else None
        if surplus is not None:
            surplus.close()

    def give_back(self) -> None:
        """Gives all idle regions back to the lane."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()

    def close(self) -> None:
        """Gives all idle regions back to the lane, and those that come back later at once."""
        with self._lock:
            self._closed = True
        self.give_back()
