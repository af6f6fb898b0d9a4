"""What choosing replicas anew each step does to its time: one layer on all GPUs, by choice and rows a lane.

    torchrun --nproc-per-node 4 -m bench.balance.gpu_balanced_steps --counts FILE [--redundant-per-rank 2]

DeepSeek-V3's sizes, FP8 blocks, experts drawn from the loads of some layers of FILE (a published count file),
placed by a policy for that load. Each choice runs the same batches, block after block in turns; a step is
address book, dispatch, experts and combine, timed by events, the slowest rank's.
Writes bench/results/gpu_balanced_steps.jsonl.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bench.lib.numbers import Numbers
from bench.lib.record import Result, write
from moeserve.dispatch.backends import DISPATCHERS
from moeserve.dispatch.dispatcher import Dispatcher, DispatchSpec
from moeserve.dispatch.members import Members
from moeserve.dispatch.routing import Routing
from moeserve.experts.activation import Activation
from moeserve.experts.balance import balancer_named
from moeserve.experts.balance.room import even_with_room
from moeserve.experts.batch import ExpertShape, ExpertWeights
from moeserve.experts.kernel import Kernel, KernelSpec, Prepared
from moeserve.experts.kernels import KERNELS
from moeserve.experts.load import Load, read_trace
from moeserve.experts.placement import Placement
from moeserve.experts.routing.address_book import AddressBook
from moeserve.quant.format import Format, Packed, Scheme
from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_GROUP

HIDDEN, INNER, TOP_K = 7168, 2048, 8
CHOICES = ("hash", "lp", "auto")
ROWS = (128, 1024, 4096)
BLOCKS, STEPS, BATCHES = 8, 12, 4


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer on this rank: the books, by choice, and what carries and computes."""

    books: dict[str, AddressBook]
    dispatcher: Dispatcher
    kernel: Kernel
    prepared: Prepared
    numbers: Numbers

    def step(
        self, choice: str, hidden: Tensor, experts: Tensor, weights: Tensor, lanes: tuple[int, ...]
    ) -> Tensor:
        """One step of the layer."""
        valid = torch.ones(len(hidden), dtype=torch.bool, device="cuda")
        routing = Routing(self.books[choice].resolve(0, experts, valid), weights, lanes, 0)
        arrived = self.dispatcher.dispatch(hidden, self.numbers.next(routing))
        return self.dispatcher.combine(self.kernel.apply(self.prepared, arrived.batch), arrived.ticket)


def random_packed(form: Format, shape: tuple[int, ...]) -> Packed:
    """Stored bytes that decode to small finite values."""
    packed = form.empty(shape, "cuda")
    codes, scales = packed.parts
    codes.view(torch.uint8).random_(0x20, 0x40)
    scales.fill_(0.02)
    return packed


def build(placement: Placement, dispatcher: str, rows: int) -> Layer:
    """This rank's share of one layer."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shape = ExpertShape(HIDDEN, INNER, Activation("silu"), bias=False)
    scheme = Scheme(FP8_BLOCK, FP8_GROUP)
    entry, slots = KERNELS["triton_fp8"], placement.slots_per_owner
    kernel = entry.build(KernelSpec(scheme, shape, torch.bfloat16))
    weights = ExpertWeights(
        random_packed(FP8_BLOCK, (slots, shape.gate_up_rows, HIDDEN)),
        random_packed(FP8_BLOCK, (slots, HIDDEN, INNER)),
    )
    spec = DispatchSpec(
        members=Members.of_ranks(ranks),
        seat=rank,
        slots=slots,
        hidden=HIDDEN,
        top_k=TOP_K,
        lane_rows=rows,
        dtype=torch.bfloat16,
        wire=FP8_GROUP,
        row_align=entry.row_align,
        device="cuda",
    )
    books = {choice: AddressBook(placement, "cuda", choice, rank) for choice in CHOICES}
    carrier = DISPATCHERS[dispatcher].build(spec, dist.group.WORLD)
    return Layer(books, carrier, kernel, kernel.prepare(weights), Numbers(carrier))


def batch(load: np.ndarray, rows: int, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Rows whose experts are drawn, each once a row, in proportion to `load [E]`."""
    heat = torch.log(torch.as_tensor(load + 1e-9, dtype=torch.float32, device="cuda"))
    noise = torch.empty(rows, len(load), device="cuda").exponential_(generator=random).log_().neg_()
    experts = (heat + noise).topk(TOP_K, dim=1).indices.int()
    hidden = torch.randn(rows, HIDDEN, device="cuda", generator=random).bfloat16()
    return hidden, experts, torch.full((rows, TOP_K), 1 / TOP_K, device="cuda")


def measure(layer: Layer, load: np.ndarray, rows: int) -> dict[str, list[float]]:
    """Milliseconds of each step by choice, the slowest rank's; and mean over max of the ranks' rows."""
    random = torch.Generator("cuda").manual_seed(dist.get_rank())
    lanes = (rows,) * dist.get_world_size()
    batches = [batch(load, rows, random) for _ in range(BATCHES)]
    times: dict[str, list[float]] = {choice: [] for choice in CHOICES}
    for choice in CHOICES:
        for one in batches:
            layer.step(choice, *one, lanes)
    for block in range(BLOCKS):
        for choice in CHOICES if block % 2 else CHOICES[::-1]:
            events = []
            for at in range(STEPS):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                dist.barrier()
                begin.record()
                layer.step(choice, *batches[at % BATCHES], lanes)
                end.record()
                events.append((begin, end))
            torch.cuda.synchronize()
            mine = torch.tensor([b.elapsed_time(e) for b, e in events], device="cuda")
            dist.all_reduce(mine, dist.ReduceOp.MAX)
            times[choice] += mine.tolist()
    return times


def evenness(layer: Layer, load: np.ndarray, rows: int, placement: Placement) -> dict[str, float]:
    """Mean over largest rank rows by choice, mean over the batches."""
    random = torch.Generator("cuda").manual_seed(dist.get_rank())
    found: dict[str, list[float]] = {choice: [] for choice in CHOICES}
    for _ in range(BATCHES):
        _, experts, _ = batch(load, rows, random)
        valid = torch.ones(rows, dtype=torch.bool, device="cuda")
        for choice, book in layer.books.items():
            slots = book.resolve(0, experts, valid)
            counts = torch.bincount(slots.flatten() // placement.slots_per_owner, minlength=placement.owners)
            dist.all_reduce(counts)
            found[choice].append(float(counts.float().mean() / counts.max()))
    return {choice: statistics.mean(values) for choice, values in found.items()}


def main() -> None:
    """Prints a table from rank 0 and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", required=True)
    parser.add_argument("--layer", type=int, default=20, help="position among the layers of the file")
    parser.add_argument("--redundant-per-rank", type=int, default=2)
    parser.add_argument("--policy", default="flexible")
    parser.add_argument("--dispatcher", default="all2allv")
    args = parser.parse_args()
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # NVLink multicast stays off
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    ranks = dist.get_world_size()
    tokens = read_trace(args.counts).total.tokens[args.layer : args.layer + 1]
    room = even_with_room(1, tokens.shape[1], ranks, args.redundant_per_rank * ranks)
    placement = balancer_named(args.policy).first(room, Load(tokens))
    layer = build(placement, args.dispatcher, max(ROWS))
    results = []
    for rows in ROWS:
        times = measure(layer, tokens[0], rows)
        even = evenness(layer, tokens[0], rows, placement)
        if dist.get_rank():
            continue
        median = {choice: statistics.median(values) for choice, values in times.items()}
        for choice in CHOICES:
            ratio = median[choice] / median["hash"]
            text = f"{median[choice]:.3f} ms, {ratio:.4f} of hash, even {even[choice]:.4f}"
            print(f"{rows} rows a lane, {choice}: {text}", flush=True)
        setting = f"{rows} rows a lane, EP{ranks}, {args.redundant_per_rank} redundant a rank, {args.policy}"
        for choice in CHOICES[1:]:
            peers = {"hash": median["hash"], "evenness": even[choice], "evenness of hash": even["hash"]}
            results.append(
                Result(
                    "gpu_balanced_steps",
                    f"{setting}, {choice}",
                    median[choice],
                    "ms",
                    "lower",
                    median["hash"],
                    peers,
                )
            )
    if not dist.get_rank():
        write(results)
    time.sleep(0.5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
