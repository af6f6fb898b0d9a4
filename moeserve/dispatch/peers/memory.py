"""`PeerMemory`: one buffer of every member of a host, mapped into those it exchanges rows with.

On GPUs it is CUDA IPC memory of its own allocation, opened on the opener's device; on the CPU it is shared
memory, so that a protocol over peer memory runs, and is tested, without a GPU.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moeserve.device.streams import stream_for
from moeserve.dispatch.members import Member

SHARED_FOLDER = "/dev/shm"
HANDLE_BYTES = 64  # of CUDA IPC
SHARED_BYTES = 2 << 20
"""CUDA IPC shares whole blocks of so many bytes: less would be mapped with its neighbours."""


class Mapped(Protocol):
    """This member's memory and its maps of others'."""

    def handle(self) -> Any:
        """What another process needs to open this member's memory; picklable."""

    def open(self, handle: Any, nbytes: int) -> Tensor:
        """Another member's memory, uint8 `[nbytes]`."""

    def close_map(self, view: Tensor) -> None:
        """Unmaps a view of `open`."""

    @property
    def mine(self) -> Tensor:
        """This member's memory, uint8 `[nbytes]`, zeroed."""

    def close_maps(self) -> None:
        """Unmaps the others' memory."""

    def close(self) -> None:
        """Unmaps the others' memory and frees this member's."""


@dataclass(frozen=True)
class PeerOffer:
    """What a member tells others of its memory, so that they can map it; picklable."""

    member: Member
    host: str
    nbytes: int
    handle: Any
    layout: tuple[object, ...]  # what all members' layouts must agree in
    refused: str = ""  # why it has no memory to offer


def memory_on(device: str, nbytes: int) -> Mapped:
    """Memory of `nbytes` on `device`, zeroed, of an allocation of its own. Raises OSError or RuntimeError."""
    return _Shared(nbytes) if device == "cpu" else _Cuda(nbytes, torch.device(device))


class PeerMemory:
    """This member's buffer of `nbytes`, zeroed, and its maps of others', which are of the same host.

    Raises RuntimeError when the buffer cannot be allocated.
    """

    def __init__(self, nbytes: int, device: str) -> None:
        self.nbytes = nbytes
        try:
            memory = memory_on(device, nbytes)
        except (OSError, RuntimeError) as error:
            raise RuntimeError(f"cannot allocate {nbytes} bytes: {error}") from error
        self._memory: Mapped | None = memory
        self.views: dict[int, Tensor] = {}  # by seat
        self._retired: list[tuple[Any, Tensor]] = []

    @property
    def mine(self) -> Tensor:
        """This member's own bytes, uint8 `[nbytes]`."""
        assert self._memory is not None
        return self._memory.mine

    def handle(self) -> Any:
        """What another process of this host needs to map this memory; picklable."""
        assert self._memory is not None
        return self._memory.handle()

    def map(self, offer: PeerOffer) -> Tensor:
        """Maps the memory that `offer` tells of: uint8 `[nbytes]`. Raises RuntimeError where it cannot."""
        assert self._memory is not None
        if offer.host != socket.gethostname():
            raise RuntimeError(f"the memory of seat {offer.member.seat} is on host {offer.host}")
        try:
            view = self._memory.open(offer.handle, offer.nbytes)
        except (OSError, RuntimeError) as error:
            raise RuntimeError(f"cannot map the memory of seat {offer.member.seat}: {error}") from error
        self.views[offer.member.seat] = view
        return view

    def unmap(self, seat: int) -> None:
        """Unmaps the memory of `seat`, once what the device has been given to do does not use it any more."""
        view = self.views.pop(seat, None)
        if view is not None:
            done = torch.cuda.current_stream(view.device).record_event() if view.is_cuda else None
            self._retired.append((done, view))
        self.sweep()

    def sweep(self) -> None:
        """Unmaps what `unmap` left to the device, where it has come that far. Waits for nothing."""
        assert self._memory is not None
        left = []
        for done, view in self._retired:
            if done is None or done.query():
                self._memory.close_map(view)
            else:
                left.append((done, view))
        self._retired = left

    def part(self) -> None:
        """Unmaps the others' memory, and leaves this member's to a peer that may still store into it; `close`
        frees it once that peer's process has ended. On a GPU it waits for the device.
        """
        self.views, self._retired = {}, []
        if self._memory is not None:
            self._memory.close_maps()

    def close(self) -> None:
        """Unmaps and frees; on a GPU it waits for the device. Not collective: a peer may be dead.

        What CUDA does with memory that is freed while another process maps it is not said: `part` comes first
        where one may still run.
        """
        self.views, self._retired = {}, []
        if self._memory is not None:
            self._memory.close()
            self._memory = None


@dataclass(frozen=True)
class MemoryRequest:
    """The memory that one member needs."""

    member: Member
    nbytes: int
    device: str
    layout: tuple[object, ...] = ()  # what all members' layouts must agree in
    refused: str = ""  # a reason of the caller's not to allocate it

    def offer(self, memory: PeerMemory | None, refused: str = "") -> PeerOffer:
        """What others are told of `memory`; without one, why there is none."""
        handle = None if memory is None else memory.handle()
        return PeerOffer(self.member, socket.gethostname(), self.nbytes, handle, self.layout, refused)


_LEFT: list[PeerMemory] = []  # of joinings that came to no end


def leave_over(memory: PeerMemory) -> None:
    """Parts with memory that others may have mapped, and that nobody is going to use."""
    _LEFT.append(memory)
    memory.part()


def left_over() -> list[PeerMemory]:
    """What was left over since the last time: its taker closes it once others have unmapped it."""
    found = []
    while _LEFT:
        found.append(_LEFT.pop())
    return found


def join_memory(request: MemoryRequest, group: ProcessGroup) -> PeerMemory:
    """Allocates this member's memory, and maps that of every member of `group` that it exchanges rows with.

    Collective over `group`, whose members must share a host. When one cannot allocate or map, or is refused
    for a reason of its caller's, all raise RuntimeError with every member's reason. Nothing stays allocated
    then, nor where a member is lost meanwhile, but for what others may have mapped: that is `left_over`.
    """
    memory, reason = None, request.refused
    try:
        memory = None if reason else PeerMemory(request.nbytes, request.device)
    except RuntimeError as error:
        reason = str(error)
    try:
        offers: list[PeerOffer] = _gathered(request.offer(memory, reason), group)
    except BaseException:
        if memory is not None:
            memory.close()
        raise
    reasons = {offer.member.seat: offer.refused for offer in offers if offer.refused}
    if not reasons and len({offer.host for offer in offers}) > 1:
        reasons = {offer.member.seat: f"is on host {offer.host}" for offer in offers}
    if not reasons:
        reasons = {o.member.seat: text for o in offers if (text := disagreement(request.layout, o))}
    if reasons and memory is not None:
        memory.close()
    _raise(reasons)
    assert memory is not None
    reason = ""
    try:
        for offer in offers:
            if exchanges(request.member, offer.member):
                memory.map(offer)
    except RuntimeError as error:
        reason = str(error)
    try:
        found: list[tuple[int, str]] = _gathered((request.member.seat, reason), group)
        _raise({seat: text for seat, text in found if text})
    except BaseException:
        leave_over(memory)
        raise
    return memory


def exchanges(one: Member, other: Member) -> bool:
    """Whether rows travel between two members: one has a lane and the other is an owner. Not with itself."""
    there = one.lane is not None and other.owner is not None
    back = one.owner is not None and other.lane is not None
    return one.seat != other.seat and (there or back)


def disagreement(layout: tuple[object, ...], offer: PeerOffer) -> str:
    """Why memory of `layout` and that of `offer` do not fit together; empty where they do."""
    if layout == offer.layout:
        return ""
    return f"lays its memory out for {list(offer.layout)}, and another member for {list(layout)}"


def _raise(reasons: dict[int, str]) -> None:
    if reasons:
        listed = "; ".join(f"seat {seat} {text}" for seat, text in sorted(reasons.items()))
        raise RuntimeError(f"peer memory needs members of one host that can map each other's: {listed}")


def _gathered(mine: Any, group: ProcessGroup) -> list[Any]:
    """`mine` of every member of `group`, by position."""
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, mine, group=group)
    return found


class _Shared:
    """POSIX shared memory without a name, so that a killed process leaves nothing.

    Others open it by the file descriptor of the process that holds it.
    """

    def __init__(self, nbytes: int) -> None:
        self._file, path = tempfile.mkstemp(prefix=f"moeserve-{os.getpid()}-", dir=SHARED_FOLDER)
        os.unlink(path)
        try:
            os.posix_fallocate(self._file, 0, nbytes)
            self._mine = _tensor(self._file, nbytes)
        except OSError:
            os.close(self._file)
            raise

    def handle(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def open(self, handle: str, nbytes: int) -> Tensor:
        file = os.open(handle, os.O_RDWR)
        try:
            return _tensor(file, nbytes)
        finally:
            os.close(file)

    def close_map(self, view: Tensor) -> None:
        """A map goes with the last tensor on it."""

    def close_maps(self) -> None:
        """They go with the last tensors on them."""

    @property
    def mine(self) -> Tensor:
        return self._mine

    def close(self) -> None:
        os.close(self._file)
        del self._mine  # a map goes with the last tensor on it


def _tensor(file: int, nbytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)


class _Cuda:
    """Memory of this process's GPU, outside torch's allocator, and others' opened on the same GPU.

    Opened on its owner's device instead, a kernel that touches it would die with an illegal access.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        from cuda.bindings import driver

        self._driver, self._device = driver, device
        self._opened: dict[int, Any] = {}  # by address
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # the context is there
            whole = -(-nbytes // SHARED_BYTES) * SHARED_BYTES
            self._address = self._call(driver.cuMemAlloc(whole))
            stream = stream_for("peer memory", device)  # others may wait for long
            self._call(driver.cuMemsetD8Async(self._address, 0, nbytes, stream.cuda_stream))
            stream.synchronize()
        self._mine = self._view(int(self._address), nbytes)

    def handle(self) -> bytes:
        return bytes(self._call(self._driver.cuIpcGetMemHandle(self._address)).reserved)

    def open(self, handle: bytes, nbytes: int) -> Tensor:
        if len(handle) != HANDLE_BYTES:
            raise RuntimeError(f"a handle of {len(handle)} bytes; CUDA's have {HANDLE_BYTES}")
        named = self._driver.CUipcMemHandle()
        named.reserved = handle
        lazily = self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        with torch.cuda.device(self._device):
            address = self._call(self._driver.cuIpcOpenMemHandle(named, lazily))
            base, whole = self._call(self._driver.cuMemGetAddressRange(address))
            if (there := int(base) + int(whole) - int(address)) < nbytes:
                self._call(self._driver.cuIpcCloseMemHandle(address))
                raise RuntimeError(f"it has {there} bytes, and {nbytes} are needed")
        self._opened[int(address)] = address
        return self._view(int(address), nbytes)

    def close_map(self, view: Tensor) -> None:
        with torch.cuda.device(self._device):
            self._call(self._driver.cuIpcCloseMemHandle(self._opened.pop(view.data_ptr())))

    @property
    def mine(self) -> Tensor:
        return self._mine

    def close_maps(self) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.synchronize(self._device)
            while self._opened:
                self._call(self._driver.cuIpcCloseMemHandle(self._opened.popitem()[1]))

    def close(self) -> None:
        self.close_maps()
        with torch.cuda.device(self._device):
            self._call(self._driver.cuMemFree(self._address))

    def _view(self, address: int, nbytes: int) -> Tensor:
        return torch.as_tensor(_Bytes(address, nbytes), device=self._device)

    def _call(self, answer: tuple[Any, ...]) -> Any:
        """The driver's result without its status. Raises RuntimeError with the driver's words."""
        status, *result = answer
        if status != self._driver.CUresult.CUDA_SUCCESS:
            _, text = self._driver.cuGetErrorString(status)
            raise RuntimeError(text.decode() if isinstance(text, bytes) else str(text))
        return result[0] if len(result) == 1 else result


class _Bytes:
    """Device memory as torch takes it over, without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }
