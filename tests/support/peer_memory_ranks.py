"""What each rank of the peer-memory tests does."""

import glob
import os

import torch
import torch.distributed as dist
from parallel import group

from moeserve.dispatch.members import Member
from moeserve.dispatch.peers.memory import SHARED_FOLDER, MemoryRequest, PeerMemory, join_memory


def joined(rank: int, nbytes: int, device: str, refused: str = "") -> PeerMemory:
    """The memory of a member that is both, joined with all other workers'."""
    return join_memory(MemoryRequest(Member(rank, rank, rank), nbytes, device, (), refused), group())


def write_to_all(rank: int, ranks: int, device: str) -> list[int]:
    """Stores this rank's number + 1 into its place of every rank's memory; what is here once all have."""
    memory = joined(rank, ranks, device)
    for view in (memory.mine, *memory.views.values()):
        view[rank] = rank + 1
    if device != "cpu":
        torch.cuda.synchronize()
    dist.barrier(group=group())
    found = memory.mine.tolist()
    dist.barrier(group=group())
    memory.close()
    return found


def named_files(rank: int, ranks: int) -> list[str]:
    """Names that this rank's memory still has in the shared folder once all have opened it."""
    memory = joined(rank, 4096, "cpu")
    found = glob.glob(f"{SHARED_FOLDER}/moeserve-{os.getpid()}-*")
    memory.close()
    return found


def too_much_on_one(rank: int, ranks: int) -> str:
    """What each rank hears when rank 1 asks for more than there is."""
    try:
        joined(rank, 1 << 50 if rank == 1 else 4096, "cpu")
    except RuntimeError as error:
        return str(error) + str(glob.glob(f"{SHARED_FOLDER}/moeserve-{os.getpid()}-*"))
    return "nothing"


def one_has_no_room(rank: int, ranks: int) -> str:
    """What each rank hears when the caller on rank 0 refuses."""
    try:
        joined(rank, 4096, "cpu", "" if rank else "needs 8 bytes; 4 are free")
    except RuntimeError as error:
        return str(error) + str(glob.glob(f"{SHARED_FOLDER}/moeserve-{os.getpid()}-*"))
    return "nothing"
