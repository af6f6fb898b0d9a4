"""Times the carriers that run over NCCL, dispatch and combine apart, eagerly and as CUDA graphs.

    torchrun --nproc-per-node 4 bench/gpu_carriers.py [--hidden 7168 --experts 256 --top-k 8]

Uniform random routing, bf16 answers. Microseconds, the slowest rank's median; a graph only where the carrier
reads nothing on the host. `GB/s` is what a rank sent to others over the time, in the faster of the two ways.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from moeserve.dispatch.backends import DISPATCHERS
from moeserve.dispatch.dispatcher import Dispatcher, DispatchSpec
from moeserve.dispatch.routing import Routing
from moeserve.quant.formats import format_named


def eager(step: Callable[[], object], repeats: int = 30) -> float:
    """Median microseconds of `step` by events."""
    for _ in range(5):
        step()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        dist.barrier()
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return slowest(statistics.median(times))


def graphed(step: Callable[[], object], inner: int = 10, repeats: int = 10) -> float:
    """Median microseconds of `step` inside a graph that holds it `inner` times."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            step()
    return eager(graph.replay, repeats) / inner


def slowest(value: float) -> float:
    """The largest `value` of all ranks."""
    shared = torch.tensor(value, device="cuda")
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return float(shared)


def routing(tokens: int, spec: DispatchSpec) -> Routing:
    """Distinct random slots and weights for `tokens` rows of every lane."""
    chosen = torch.rand(tokens, spec.slots * spec.ranks, device="cuda").argsort(dim=1)[:, : spec.top_k]
    return Routing(chosen.int(), torch.rand(tokens, spec.top_k, device="cuda"), (tokens,) * spec.ranks)


def measure(name: str, spec: DispatchSpec, tokens: int) -> str:
    """One line of the table."""
    row = DISPATCHERS[name]
    carrier: Dispatcher = row.build(spec)
    hidden = torch.randn(tokens, spec.hidden, device="cuda", dtype=spec.dtype)
    route = routing(tokens, spec)
    arrived = carrier.dispatch(hidden, route).wait()
    outputs: Tensor = torch.randn(arrived.batch.tokens.shape, device="cuda", dtype=spec.dtype)
    carrier.combine(outputs, arrived.ticket).wait()
    sent = carrier.traffic
    ways: tuple[Callable[[], object], ...] = (
        lambda: carrier.dispatch(hidden, route).wait(),
        lambda: carrier.combine(outputs, arrived.ticket).wait(),
    )
    cells = []
    for way, nbytes in zip(ways, (sent.dispatched, sent.combined), strict=True):
        slow = eager(way)
        fast = None if row.host_sync else graphed(way)
        best = slow if fast is None else fast
        cells += [f"{slow:.0f}", "-" if fast is None else f"{fast:.1f}", f"{nbytes / best / 1e3:.0f}"]
    carrier.close()
    return " | ".join((name, str(tokens), *cells))


def main() -> None:
    """Prints one table from rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--wire", default="fp8_group128")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 128, 256, 1024, 4096])
    options = parser.parse_args()
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # NVLink multicast stays off
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    torch.manual_seed(dist.get_rank())
    spec = DispatchSpec(
        rank=dist.get_rank(),
        ranks=dist.get_world_size(),
        slots=options.experts // dist.get_world_size(),
        hidden=options.hidden,
        top_k=options.top_k,
        lane_rows=max(options.tokens),
        dtype=torch.bfloat16,
        wire=format_named(options.wire),
        device="cuda",
    )
    if spec.rank == 0:
        print(f"{spec.ranks} x {torch.cuda.get_device_name()}, torch {torch.__version__}, wire {spec.wire}")
        print("carrier | tokens | dispatch us | in a graph | GB/s | combine us | in a graph | GB/s")
    for name in ("naive", "allgather_reducescatter", "all2allv"):
        for tokens in options.tokens:
            line = measure(name, spec, tokens)
            if spec.rank == 0:
                print(line, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
