"""What each rank of the peer-memory tests does."""

import glob
import os

import torch
import torch.distributed as dist

from moeserve.dispatch.peers.memory import SHARED_FOLDER, PeerMemory


def write_to_all(rank: int, ranks: int, device: str) -> list[int]:
    """Stores this rank's number + 1 into its place of every rank's memory; what is here once all have."""
    memory = PeerMemory(ranks, rank, ranks, device)
    for view in memory.views:
        view[rank] = rank + 1
    if device != "cpu":
        torch.cuda.synchronize()
    dist.barrier()
    found = memory.mine.tolist()
    dist.barrier()
    memory.close()
    return found


def named_files(rank: int, ranks: int) -> list[str]:
    """Names that this rank's memory still has in the shared folder once all have opened it."""
    memory = PeerMemory(4096, rank, ranks, "cpu")
    found = glob.glob(f"{SHARED_FOLDER}/moeserve-{os.getpid()}-*")
    memory.close()
    return found


def too_much_on_one(rank: int, ranks: int) -> str:
    """What each rank hears when rank 1 asks for more than there is."""
    try:
        PeerMemory(1 << 50 if rank == 1 else 4096, rank, ranks, "cpu")
    except RuntimeError as error:
        return str(error) + str(glob.glob(f"{SHARED_FOLDER}/moeserve-{os.getpid()}-*"))
    return "nothing"


def one_has_no_room(rank: int, ranks: int) -> str:
    """What each rank hears when the caller on rank 0 refuses."""
    try:
        PeerMemory(4096, rank, ranks, "cpu", refused="" if rank else "needs 8 bytes; 4 are free")
    except RuntimeError as error:
        return str(error) + str(glob.glob(f"{SHARED_FOLDER}/moeserve-{os.getpid()}-*"))
    return "nothing"
