"""`PeerMemory`: one buffer on every rank of a host, mapped into all the others.

On GPUs it is CUDA IPC memory of its own allocation, opened on the opener's device; on the CPU it is shared
memory, so that a protocol over peer memory runs, and is tested, without a GPU.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

SHARED_FOLDER = "/dev/shm"


class Mapped(Protocol):
    """This rank's memory and its maps of others'."""

    def handle(self) -> Any:
        """What another process needs to open this rank's memory; picklable."""

    def open(self, handle: Any) -> Tensor:
        """Another rank's memory, uint8 `[nbytes]`."""

    @property
    def mine(self) -> Tensor:
        """This rank's memory, uint8 `[nbytes]`, zeroed."""

    def opened_by_all(self) -> None:
        """No further process will open this rank's memory."""

    def close(self) -> None:
        """Unmaps the others' memory and frees this rank's."""


class PeerMemory:
    """A buffer of `nbytes` on every rank, zeroed, each mapped into all others.

    Collective over torch.distributed's default group, whose ranks must share a host. When one rank cannot
    allocate or map, or is `refused` for a reason of its caller's, all raise RuntimeError with every rank's
    reason, and nothing stays allocated.
    """

    def __init__(self, nbytes: int, rank: int, ranks: int, device: str, *, refused: str = "") -> None:
        self.nbytes = nbytes
        self._memory: Mapped | None = None
        reason, handle = refused, None
        try:
            if not refused:
                self._memory = _Shared(nbytes) if device == "cpu" else _Cuda(nbytes, torch.device(device))
                handle = self._memory.handle()
        except (OSError, RuntimeError) as error:
            reason = f"cannot allocate {nbytes} bytes: {error}"
        found = _gathered(ranks, (socket.gethostname(), handle, reason))
        reasons = {at: text for at, (_, _, text) in enumerate(found) if text}
        hosts = [host for host, _, _ in found]
        if not reasons and len(set(hosts)) > 1:
            reasons = {at: f"is on host {host}" for at, host in enumerate(hosts)}
        self._raise(reasons)
        assert self._memory is not None
        reason, views = "", []
        for at, (_, other, _) in enumerate(found):
            try:
                views.append(self._memory.mine if at == rank else self._memory.open(other))
            except (OSError, RuntimeError) as error:
                reason = f"cannot map the memory of rank {at}: {error}"
                break
        self._raise({at: text for at, text in enumerate(_gathered(ranks, reason)) if text})
        self._memory.opened_by_all()
        self.views = tuple(views)
        self.pointers = torch.tensor([view.data_ptr() for view in views], dtype=torch.int64, device=device)

    @property
    def mine(self) -> Tensor:
        """This rank's own bytes, uint8 `[nbytes]`."""
        assert self._memory is not None
        return self._memory.mine

    def close(self) -> None:
        """Unmaps and frees; on a GPU it waits for the device. Not collective: a peer may be dead.

        A peer that still stores into this memory keeps it alive until it unmaps it, and harms nobody.
        """
        self.views = ()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _raise(self, reasons: dict[int, str]) -> None:
        if reasons:
            self.close()
            listed = "; ".join(f"rank {rank} {text}" for rank, text in reasons.items())
            raise RuntimeError(f"peer memory needs ranks of one host that can map each other's: {listed}")


def _gathered(ranks: int, mine: Any) -> list[Any]:
    """`mine` of every rank, by rank."""
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, mine)
    return found


class _Shared:
    """POSIX shared memory; its name is gone once all have opened it, so a killed rank leaves nothing."""

    def __init__(self, nbytes: int) -> None:
        file, self._path = tempfile.mkstemp(prefix=f"moeserve-{os.getpid()}-", dir=SHARED_FOLDER)
        try:
            os.posix_fallocate(file, 0, nbytes)
            self._mine = _tensor(file, nbytes)
        except OSError:
            os.unlink(self._path)
            raise
        finally:
            os.close(file)
        self._nbytes = nbytes

    def handle(self) -> str:
        return self._path

    def open(self, handle: str) -> Tensor:
        file = os.open(handle, os.O_RDWR)
        try:
            return _tensor(file, self._nbytes)
        finally:
            os.close(file)

    @property
    def mine(self) -> Tensor:
        return self._mine

    def opened_by_all(self) -> None:
        os.unlink(self._path)
        self._path = ""

    def close(self) -> None:
        if self._path:
            self.opened_by_all()
        del self._mine  # a map goes with the last tensor on it


def _tensor(file: int, nbytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)


class _Cuda:
    """Memory of this process's GPU, outside torch's allocator, and others' opened on the same GPU.

    Opened on its owner's device instead, a kernel that touches it would die with an illegal access.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        from cuda.bindings import driver

        self._driver, self._device, self._opened = driver, device, list[Any]()
        self._nbytes = nbytes
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # the context is there
            self._address = self._call(driver.cuMemAlloc(nbytes))
            self._call(driver.cuMemsetD8(self._address, 0, nbytes))
            torch.cuda.synchronize(device)
        self._mine = self._view(int(self._address))

    def handle(self) -> bytes:
        return bytes(self._call(self._driver.cuIpcGetMemHandle(self._address)).reserved)

    def open(self, handle: bytes) -> Tensor:
        named = self._driver.CUipcMemHandle()
        named.reserved = handle
        lazily = self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        with torch.cuda.device(self._device):
            address = self._call(self._driver.cuIpcOpenMemHandle(named, lazily))
        self._opened.append(address)
        return self._view(int(address))

    @property
    def mine(self) -> Tensor:
        return self._mine

    def opened_by_all(self) -> None:
        """CUDA's handles may stay."""

    def close(self) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.synchronize(self._device)
            while self._opened:
                self._call(self._driver.cuIpcCloseMemHandle(self._opened.pop()))
            self._call(self._driver.cuMemFree(self._address))

    def _view(self, address: int) -> Tensor:
        return torch.as_tensor(_Bytes(address, self._nbytes), device=self._device)

    def _call(self, answer: tuple[Any, ...]) -> Any:
        """The driver's result without its status. Raises RuntimeError with the driver's words."""
        status, *result = answer
        if status != self._driver.CUresult.CUDA_SUCCESS:
            _, text = self._driver.cuGetErrorString(status)
            raise RuntimeError(text.decode() if isinstance(text, bytes) else str(text))
        return result[0] if result else None


class _Bytes:
    """Device memory as torch takes it over, without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }
