"""What choosing replicas anew each step costs on a GPU: from a lane's ids to slots, in a CUDA graph.

    python -m bench.balance.gpu_replicas [--redundant 8 16 32 64] [--ranks 4 8 32 64]
        [--tokens 128 4096] [--tune]

256 experts of skewed load, placed for it by `flexible`; 8 different ones a token, drawn by that load. Every
choice is first held to the torch path on the CPU: each row at a slot of its expert, waterfill's rows of each
rank the same, lp's fullest rank at most a row fuller. A graph holds CALLS resolves; medians of its replays,
one call's share. "torch" is lp by tensor operations, in a graph too. `--tune` prints the kernel's time by
rounds, moves and warps, with the fullest rank over the mean, and writes nothing. Sizes that fail are named.
Writes bench/results/gpu_replicas.jsonl.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bench.lib.record import Result, write
from moeserve.experts.balance import balancer_named
from moeserve.experts.balance.room import even_with_room
from moeserve.experts.load import Load
from moeserve.experts.placement import EMPTY, Placement
from moeserve.experts.routing import address_kernels
from moeserve.experts.routing.address_book import AddressBook

EXPERTS, TOP_K = 256, 8
CHOICES = ("hash", "waterfill", "lp")
AIM = 20.0  # us
CALLS, REPLAYS = 20, 50
LANE = 1


@dataclass(frozen=True, eq=False)
class Case:
    """A placement, and a lane's batch of the load it was made for."""

    placement: Placement
    experts: Tensor  # [T, K] int64, CPU
    name: str

    @classmethod
    def of(cls, redundant: int, ranks: int, tokens: int) -> Case:
        random = np.random.default_rng(redundant * ranks)
        chance = random.lognormal(0, 0.9, EXPERTS)
        base = even_with_room(1, EXPERTS, ranks, redundant)
        placement = balancer_named("flexible").first(base, Load(chance[None]))
        # the K largest of log chance + Gumbel noise are drawn by chance, without replacement
        noisy = np.log(chance) + random.gumbel(size=(tokens, EXPERTS))
        experts = torch.from_numpy(np.argsort(-noisy, axis=1)[:, :TOP_K].copy())
        return cls(placement, experts, f"EP{ranks} +{redundant}, {tokens} tokens x {TOP_K}")

    def loads(self, slots: Tensor) -> Tensor:
        """Rows of each rank."""
        owners = slots.cpu().flatten().long() // self.placement.slots_per_owner
        return torch.bincount(owners, minlength=self.placement.owners)

    def checked(self, choice: str, slots: Tensor) -> float:
        """Largest over mean rows of a rank. Raises ValueError where `slots` are not those of `choice`."""
        slots = slots.cpu()
        held = torch.from_numpy(np.append(self.placement.slots[0], EMPTY))[slots.long()]
        if not torch.equal(held.long(), self.experts):
            raise ValueError(f"{choice}: {int((held != self.experts).sum())} rows at slots of other experts")
        book = AddressBook(self.placement, "cpu", choice, LANE)
        wanted = self.loads(book.resolve(0, self.experts, torch.ones(len(self.experts), dtype=torch.bool)))
        found = self.loads(slots)
        if choice == "waterfill" and not torch.equal(found, wanted):
            raise ValueError(f"waterfill: rows by rank {found.tolist()}, by torch {wanted.tolist()}")
        if int(found.max()) > int(wanted.max()) + 1:
            raise ValueError(f"{choice}: {int(found.max())} rows on a rank, by torch {int(wanted.max())}")
        return float(found.max() / found.double().mean())


def microseconds(call: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """One call's share of a graph of CALLS, the median of replays, and what it left."""
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            slots = call()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / CALLS)
    return statistics.median(times), slots.clone()


def measured(case: Case) -> Result:
    """Measures every choice of replicas in one case."""
    experts = case.experts.cuda()
    valid = torch.ones(len(experts), dtype=torch.bool, device="cuda")
    times, balance = {}, {}
    for choice in CHOICES:
        book = AddressBook(case.placement, "cuda", choice, LANE)
        began = time.monotonic()
        times[choice], slots = microseconds(lambda book=book: book.resolve(0, experts, valid))
        balance[choice] = case.checked(choice, slots)
        if not torch.equal(slots, book.resolve(0, experts, valid)):
            raise ValueError(f"{choice}: another call of the same batch gave other slots")
        used = "" if choice == "hash" else compiled()
        print(
            f"    {choice:9s} {times[choice]:8.2f} us  largest/mean {balance[choice]:.4f}  "
            f"{time.monotonic() - began:.1f} s in all  {used}",
            flush=True,
        )
    book = AddressBook(case.placement, "cuda", "lp")
    book._on_device = None  # what tensor operations take, where no kernel serves
    times["torch"], _ = microseconds(lambda: book.resolve(0, experts, valid))
    print(f"    torch     {times['torch']:8.2f} us", flush=True)
    ours, peers = times.pop("lp"), {name: round(value, 2) for name, value in times.items()}
    return Result("gpu_replicas", case.name, round(ours, 2), "us", "lower", AIM, peers)


def compiled() -> str:
    """Registers, spills and shared memory of the kernel compiled last."""
    kernel = list(address_kernels.address_rows.device_caches[torch.cuda.current_device()][0].values())[-1]
    return f"{kernel.n_regs} registers, {kernel.n_spills} spilled, {kernel.metadata.shared} B shared"


def tune(case: Case) -> None:
    """Prints the time of lp by rounds, moves and warps."""
    experts = case.experts.cuda()
    valid = torch.ones(len(experts), dtype=torch.bool, device="cuda")
    usual = (address_kernels.ROUNDS, address_kernels.MOVES)
    for (rounds, moves), warps in itertools.product((usual, (8, 4), (6, 3), (0, 0)), (2, 4, 8, 16)):
        address_kernels.ROUNDS, address_kernels.MOVES = rounds, moves
        book = AddressBook(case.placement, "cuda", "lp", LANE)
        book._on_device.warps = warps
        spent, slots = microseconds(lambda book=book: book.resolve(0, experts, valid))
        loads = case.loads(slots)
        even = float(loads.max() / loads.double().mean())
        print(
            f"    {rounds:2d} rounds {moves} moves {warps:2d} warps {spent:7.2f} us  "
            f"largest/mean {even:.4f}  {compiled()}",
            flush=True,
        )
    address_kernels.ROUNDS, address_kernels.MOVES = usual


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of the choice of replicas on a GPU.")
    parser.add_argument("--redundant", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 32, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 4096])
    parser.add_argument("--tune", action="store_true", help="time by rounds, moves and warps instead")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    torch.set_num_threads(4)
    results, failed = [], 0
    for sizes in itertools.product(args.redundant, args.ranks, args.tokens):
        print("+{} redundant, {} ranks, {} tokens".format(*sizes), flush=True)
        try:
            case = Case.of(*sizes)
        except ValueError as error:  # slots that do not divide over the ranks
            print(f"    left out: {error}", flush=True)
            continue
        try:
            if args.tune:
                tune(case)
            else:
                results.append(measured(case))
                write(results)
        except Exception:  # the next size may still work
            failed += 1
            traceback.print_exc()
    if failed:
        sys.exit(f"{failed} sizes failed")


if __name__ == "__main__":
    main()
