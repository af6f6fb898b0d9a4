"""Dispatch and combine of our dispatchers beside NCCL and FlashInfer, on the same work, as CUDA graphs.

    torchrun --nproc-per-node 4 -m bench.dispatch.gpu_a2a [--dispatchers nvlink_ll nvlink_ht]
        [--wires fp8_group128 bf16] [--tokens 1 16 128 256 1024 4096] [--libraries flashinfer]
        [--counts FILE --layer 20] [--record]

First the ceiling: every GPU stores to all its peers at once. Then each dispatcher dispatches and combines,
with all that belongs to it: layout, quantization, grouping, weighted sums. Its answers are checked before it
is timed. So is a library's dispatcher that our adapter makes whole (--libraries), where the library is
installed. A dispatcher that reads counts on the host (all2allv) is launched instead, since no graph can hold
it. Two peers do less: `NCCL, bytes only` moves the same bytes with split sizes known on the host;
`FlashInfer, rows only` moves rows quantized before, leaves them as they came, and adds up sums weighed
before. Microseconds a step, the slowest rank's. Routing is uniform, or drawn from a trace of expert loads
with --counts. bfloat16 hidden states and answers.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from bench.dispatch.a2a_peers import ceiling, flashinfer_step, nccl_steps
from bench.lib.numbers import Numbers
from bench.lib.record import Result, write
from moeserve.dispatch.backends import DISPATCHERS
from moeserve.dispatch.backends.all2allv import destinations
from moeserve.dispatch.dispatcher import Dispatched, Dispatcher, DispatchSpec
from moeserve.dispatch.members import Members
from moeserve.dispatch.peers.wires import RowRecord
from moeserve.dispatch.routing import Routing
from moeserve.experts.load import read_trace
from moeserve.quant.format import Format, Packed
from moeserve.quant.formats import STATIC, format_named

Step = Callable[[], object]

NCCL, ROWS_ONLY = "NCCL, bytes only", "FlashInfer, rows only"

AIMS = {1: 11.0, 16: 14.0, 128: 30.0, 1024: 190.0}
"""Microseconds of dispatch and combine by tokens a rank, for fp8_group128 and uniform routing on 4 GPUs."""

MANY, OF_CEILING = 4096, 1.10
"""From so many tokens on the aim is this multiple of what the same bytes take at the measured ceiling."""


@dataclass(frozen=True)
class Work:
    """What every contender is given."""

    spec: DispatchSpec
    hidden: Tensor  # [T, H]
    routing: Routing  # without a step's number

    @property
    def tokens(self) -> int:
        """The tokens of this rank's lane."""
        return self.hidden.shape[0]


def graphed(step: Step, inner: int = 20, replays: int = 7, numbers: Numbers | None = None) -> float:
    """Microseconds of `step` in a graph that holds it `inner` times: the slowest rank's median.

    `numbers` are those of the steps, where `step` is one of a dispatcher's.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            step()
    times = []
    for _ in range(replays + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if numbers is not None:
            numbers.replayed(inner)
        dist.barrier()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / inner)
    return slowest(statistics.median(times[1:]))


def launched(step: Step, repeats: int = 20) -> float:
    """Microseconds of `step` launched from the host, which it waits for: the slowest rank's median."""
    times = []
    for _ in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return slowest(statistics.median(times[3:]))


def slowest(value: float) -> float:
    """The largest `value` of all ranks."""
    shared = torch.tensor(value, device="cuda")
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return float(shared)


def work(spec: DispatchSpec, tokens: int, load: Tensor | None) -> Work:
    """`tokens` rows of every lane, their slots distinct: uniform, or in proportion to `load [E]`."""
    random = torch.Generator("cuda").manual_seed(tokens * 64 + spec.rank)
    weight = torch.ones(spec.slots * spec.ranks) if load is None else load.float().clamp_min(1e-6)
    noise = torch.empty((tokens, weight.shape[0]), device="cuda").exponential_(generator=random)
    slots = (weight.cuda() / noise).topk(spec.top_k, dim=1).indices
    hidden = torch.randn((tokens, spec.hidden), device="cuda", generator=random).to(spec.dtype)
    weights = torch.rand((tokens, spec.top_k), device="cuda", generator=random)
    return Work(spec, hidden, Routing(slots.int(), weights, (tokens,) * spec.ranks, 0))


def ours(name: str, task: Work, *, parted: bool = True) -> tuple[float, float]:
    """Dispatch alone, and dispatch with combine, of the dispatcher `name`, its answers checked first.

    Not `parted`: the first is NaN, since some libraries refuse a dispatch that is not combined.
    """
    entry = DISPATCHERS[name]
    dispatcher = entry.build(task.spec, dist.group.WORLD)
    numbers = Numbers(dispatcher)
    timed = launched if entry.host_sync else partial(graphed, numbers=numbers)
    try:
        outputs = check(dispatcher, task, numbers)

        def out() -> Dispatched:
            return dispatcher.dispatch(task.hidden, numbers.next(task.routing))

        def both() -> None:
            dispatcher.combine(outputs, out().ticket)

        alone = math.nan
        if parted:
            alone = timed(out)
        return alone, timed(both)
    finally:
        dist.barrier()
        dispatcher.close()


def check(dispatcher: Dispatcher, task: Work, numbers: Numbers) -> Tensor:
    """Raises AssertionError unless experts that change nothing give back the rows; returns their outputs."""
    arrived = dispatcher.dispatch(task.hidden, numbers.next(task.routing))
    packed = arrived.batch.tokens
    outputs = (
        torch.stack([part.dequantize() for part in _slabs(packed)]).view(packed.shape).to(task.spec.dtype)
    )
    answer = dispatcher.combine(outputs, arrived.ticket)
    rows = task.spec.wire.quantize(task.hidden).dequantize().to(task.spec.dtype).float()
    expected = rows * task.routing.weights.sum(dim=1, keepdim=True)
    error = (answer.float() - expected).abs().max() / expected.abs().max()
    late = dispatcher.late()
    assert slowest(float(error)) < 2e-2 and not late, f"error {float(error):.3g}, late {late}"
    return outputs


def _slabs(packed: Packed) -> list[Packed]:
    """The batch in pieces, so that no more than one is float32 at a time."""
    rows = range(packed.shape[0])
    if len(packed.shape) == 2:
        return [packed]
    return [packed.rows(slice(i, i + 1)) for i in rows]


def measure(task: Work, dispatchers: list[str], libraries: list[str]) -> dict[str, tuple[float, float]]:
    """Microseconds by contender: dispatch, and dispatch with combine."""
    spec, found = task.spec, {}
    for name in (*dispatchers, *libraries):
        try:
            if name in dispatchers:
                found[name] = ours(name, task)
            else:
                found[f"{name}, whole"] = ours(name, task, parted=False)
        except (ImportError, ValueError, RuntimeError, AssertionError) as error:
            note(f"{name} at {task.tokens}: {error}")
    sent = destinations(spec, task.routing.slots).sum(dim=0).tolist()
    away, home = nccl_steps(spec, sent)
    first = graphed(away)
    found[NCCL] = (first, first + graphed(home))
    fi = flashinfer_step(task.spec, task.routing, task.hidden)
    if callable(fi):
        found[ROWS_ONLY] = (math.nan, graphed(fi))
    else:
        note(f"{ROWS_ONLY} at {task.tokens}: {fi}")
    return found


def aimed(task: Work, ceiling: float) -> float | None:
    """Microseconds that the best dispatcher of ours should take; `ceiling` in GB/s out of a GPU."""
    spec, tokens = task.spec, task.tokens
    if tokens < MANY:
        return AIMS.get(tokens)
    away = destinations(spec, task.routing.slots).sum(dim=0)
    away[spec.rank] = 0
    nbytes = RowRecord(spec.wire, spec.hidden).nbytes + spec.hidden * spec.dtype.itemsize
    return slowest(OF_CEILING * float(away.sum()) * nbytes / ceiling / 1e3)


def note(text: str) -> None:
    """Prints from rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def wire_named(name: str) -> Format:
    """A wire; a static one with a constant that suits standard normal rows."""
    if name in STATIC:
        given = STATIC[name].given
        assert given is not None
        return given(torch.tensor(6.0 / 2688))
    return format_named(name)


def main() -> None:
    """Prints a table from rank 0 and, with --record, keeps each size in bench/results/gpu_a2a.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument(
        "--dispatchers", nargs="+", default=["nvlink_ll", "nvlink_ht", "allgather_reducescatter"]
    )
    parser.add_argument("--libraries", nargs="*", default=["flashinfer"])
    parser.add_argument("--wires", nargs="+", default=["fp8_group128", "nvfp4_static", "bf16"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 128, 256, 1024, 4096])
    parser.add_argument("--counts")
    parser.add_argument("--layer", type=int, default=20, help="position among the layers of the file")
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # NVLink multicast stays off
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    note(f"{ranks} x {torch.cuda.get_device_name()}, torch {torch.__version__}")
    top = ceiling(rank, ranks, graphed)
    note(f"ceiling: {top:.0f} GB/s out of each GPU, all storing to all peers at once")
    load = torch.from_numpy(read_trace(args.counts).total.tokens[args.layer]) if args.counts else None
    routing = "skewed" if args.counts else "uniform"
    keep = args.record and rank == 0
    if keep:
        write([Result("gpu_a2a", f"all peers at once, EP{ranks}", top, "GB/s", "higher")])
    for wire in args.wires:
        for tokens in args.tokens:
            spec = DispatchSpec(
                members=Members.of_ranks(ranks),
                seat=rank,
                slots=args.experts // ranks,
                hidden=args.hidden,
                top_k=args.top_k,
                lane_rows=tokens,
                dtype=torch.bfloat16,
                wire=wire_named(wire),
                device="cuda",
                patience=5.0,
            )
            task = work(spec, tokens, load)
            found = measure(task, args.dispatchers, args.libraries)
            aim = aimed(task, top) if ranks == 4 and wire == "fp8_group128" and load is None else None
            best = min((n for n in args.dispatchers if n in found), key=lambda n: found[n][1], default="")
            cells = [f"{name} {both:.1f} ({alone:.1f} out)" for name, (alone, both) in found.items()]
            note(f"{wire}, {routing}, {tokens}: {' | '.join(cells)}")
            results = []
            for name in args.dispatchers:
                if name not in found:
                    continue
                peers = {f"{name} dispatch": found[name][0]}
                peers |= {other: both for other, (_, both) in found.items() if other != name}
                case = f"{name}, {wire}, {routing}, {tokens} tokens a rank, EP{ranks}, dispatch + combine"
                judged = aim if name == best else None
                results.append(Result("gpu_a2a", case, found[name][1], "us", "lower", judged, peers))
            if keep and results:
                write(results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
