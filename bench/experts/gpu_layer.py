"""A whole mixture-of-experts layer on all GPUs of a host: router logits in, mixed output out, phase by phase.

    torchrun --nproc-per-node 4 -m bench.experts.gpu_layer [--schemes fp8,nvfp4] [--tokens 1,16,4096]
        [--experts 256] [--fused-peer]

DeepSeek-V3's sizes (256 experts of 7168 x 2048, top-8 of 8 groups), one copy of each expert; two ranks with
128 experts hold as many each, and as many rows an expert, as four with 256. Each phase and
the whole layer are CUDA graphs where the dispatcher reads nothing on the host; medians over replays, the
slowest rank's. With few tokens that is the one with the most active experts, whose numbers are printed. Up to
--most-low-latency tokens the first dispatcher of --dispatchers is used, beyond it the second. FlashInfer's
fused layer runs beside with --fused-peer, its routing given; the fastest peers' experts and dispatcher stand
beside it as gpu_experts and gpu_a2a recorded them. Writes bench/results/gpu_layer.jsonl; aims are for 64
experts a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.lib.numbers import Numbers
from bench.lib.record import RESULTS, Result, write
from moeserve.device.machine import this_machine
from moeserve.dispatch.backends import DISPATCHERS
from moeserve.dispatch.dispatcher import Dispatched, Dispatcher, DispatchSpec
from moeserve.dispatch.members import Members
from moeserve.dispatch.routing import Routing
from moeserve.experts.activation import Activation
from moeserve.experts.batch import ExpertBatch, ExpertShape, ExpertWeights
from moeserve.experts.kernel import Kernel, KernelSpec, Prepared, Problem
from moeserve.experts.kernels import KERNELS
from moeserve.experts.placement import Placement
from moeserve.experts.routing.address_book import AddressBook
from moeserve.experts.routing.choices import StepAddressing, routed
from moeserve.experts.routing.gate import Gate
from moeserve.experts.routing.meter import LoadMeter
from moeserve.quant.format import Format, Packed, Scheme
from moeserve.quant.formats import BF16, format_named
from moeserve.runtime.planning.plan import kernels_that_serve

HIDDEN, INNER, TOP_K = 7168, 2048, 8
SHAPE = ExpertShape(HIDDEN, INNER, Activation("silu"))
SCHEMES = {
    "fp8": ("fp8_block128", "fp8_group128", "cuda_fp8", "fp8_group128"),
    "nvfp4": ("nvfp4", "bf16", "cuda_fp4", "bf16"),
    "bf16": ("bf16", "bf16", "triton_bf16", "bf16"),
}
"""Weights, activations, kernel and wire."""
AIMED_SLOTS = 64
AIMS = {
    "fp8": {1: 120, 16: 640, 128: 760, 4096: 3600},
    "nvfp4": {1: 90, 16: 400, 128: 500},
}
SAME_ROWS = {128: 512, 4096: 16384}
"""Tokens a rank of `AIMED_SLOTS` experts, and those of gpu_experts with as many rows an expert."""

INNER_STEPS = 5  # of a graph, so that launching it is not what is timed


def matrix(form: Format, n: int, k: int, experts: int) -> Packed:
    """Weights `[experts, n, k]` whose bytes are drawn at random, small and finite."""
    packed = form.empty((experts, n, k), "cuda")
    for part, tensor in zip(form.parts, packed.parts, strict=True):
        if tensor.dtype == torch.bfloat16:
            tensor.normal_(0.0, k**-0.5)
        elif tensor.dtype == torch.float32:
            tensor.fill_(1.0 / (64 * k**0.5))
        elif part.name == "codes":
            low, high = (0, 256) if form.bits < 6 else (0x20, 0x40)
            tensor.view(torch.uint8).random_(low, high)
        else:
            tensor.view(torch.uint8).random_(0x30, 0x40)
    return packed


@dataclass(frozen=True, eq=False)
class Layer:
    """One rank's share of the layer."""

    gate: Gate
    book: AddressBook
    meter: LoadMeter
    dispatcher: Dispatcher
    kernel: Kernel
    prepared: Prepared
    numbers: Numbers
    ranks: int
    experts: int  # of all ranks

    def run(self, last: str, hidden: Tensor, logits: Tensor, valid: Tensor) -> Tensor:
        """What the layer has made after its gate, its address book, or the whole of it."""
        if last == "gate":
            return self.gate.route(logits)[1]
        slots, weights = routed(
            self.gate, logits, valid, StepAddressing(0, self.book, self.meter, len(hidden))
        )
        if last == "address book":
            return slots
        arrived = self.dispatch(hidden, slots, weights)
        outputs = self.kernel.apply(self.prepared, self.likely(arrived.batch, len(hidden)))
        return self.dispatcher.combine(outputs, arrived.ticket)

    def dispatch(self, hidden: Tensor, slots: Tensor, weights: Tensor) -> Dispatched:
        """The layer's rows to their slots, as the next step."""
        routing = Routing(slots, weights, (len(hidden),) * self.ranks, 0)
        return self.dispatcher.dispatch(hidden, self.numbers.next(routing))

    def likely(self, batch: ExpertBatch, tokens: int) -> ExpertBatch:
        """A batch with how many rows a slot likely has, as a rank says it."""
        return replace(batch, likely=tokens * self.ranks * TOP_K / self.experts)


def build(scheme: str, dispatcher: str, rows: int, args: argparse.Namespace) -> Layer:
    """Every rank builds its own; collective."""
    weights_name, activations_name, usual, wire = SCHEMES[scheme]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    weights, activations = format_named(weights_name), format_named(activations_name)
    experts = args.experts
    stored, slots = Scheme(weights, activations), experts // ranks
    problem = Problem(stored, BF16, SHAPE, experts, ranks, ranks, TOP_K, rows)
    (entry, *_), _ = kernels_that_serve(problem, this_machine(), KERNELS, args.kernel or usual)
    kernel = entry.build(KernelSpec(stored, SHAPE, torch.bfloat16))
    spec = DispatchSpec(
        members=Members.of_ranks(ranks),
        seat=rank,
        slots=slots,
        hidden=HIDDEN,
        top_k=TOP_K,
        lane_rows=rows,
        dtype=torch.bfloat16,
        wire=format_named(wire),
        row_align=entry.row_align,
        device="cuda",
    )
    gate = Gate("DeepSeekV3", experts, TOP_K, groups=8, topk_groups=4, scaling=2.5)
    prepared = kernel.prepare(
        ExpertWeights(
            matrix(weights, SHAPE.gate_up_rows, HIDDEN, slots), matrix(weights, HIDDEN, INNER, slots)
        )
    )
    carrier = DISPATCHERS[dispatcher].build(spec, dist.group.WORLD)
    return Layer(
        gate.with_bias(torch.zeros(experts, device="cuda")),
        AddressBook(Placement.even(1, experts, ranks), "cuda", "auto", rank),
        LoadMeter((1, experts, experts), "cuda"),
        carrier,
        kernel,
        prepared,
        Numbers(carrier),
        ranks,
        experts,
    )


def microseconds(
    work: Callable[[], object], *, graphed: bool, numbers: Numbers | None = None, repeats: int = 21
) -> float:
    """Median time of `work`, the slowest rank's; all ranks begin together.

    `numbers` are those of the steps, where `work` dispatches once.
    """
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    run, inner = work, 1
    if graphed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(INNER_STEPS):
                work()
        run, inner = graph.replay, INNER_STEPS
    dist.barrier()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if graphed and numbers is not None:
            numbers.replayed(inner)
        dist.barrier()
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / inner)
    slowest = torch.tensor(statistics.median(times), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def inputs(tokens: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, router logits, and that all rows are real."""
    draw = torch.Generator("cuda").manual_seed(dist.get_rank() * 7 + tokens)
    hidden = torch.randn(tokens, HIDDEN, device="cuda", generator=draw).bfloat16()
    logits = torch.randn(tokens, experts, device="cuda", generator=draw).bfloat16()
    return hidden, logits, torch.ones(tokens, dtype=torch.bool, device="cuda")


def active_experts(batch: ExpertBatch) -> list[int]:
    """How many experts have rows, by rank; collective."""
    own = (batch.counts > 0).sum().view(1)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    return [int(number) for number in every]


def phases(
    layer: Layer, given: tuple[Tensor, Tensor, Tensor], *, graphed: bool
) -> tuple[dict[str, float], list[int]]:
    """Microseconds of each phase and of the whole `layer`; and how many experts are active on each rank.

    Dispatch and combine are timed together, since a dispatcher may wait for the way home of each step.
    Gate and address book are one launch here: the book's time is what it adds to the gate's.
    """
    hidden, logits, valid = given
    gate = microseconds(lambda: layer.run("gate", *given), graphed=graphed)
    book = microseconds(lambda: layer.run("address book", *given), graphed=graphed)
    whole = microseconds(lambda: layer.run("combine", *given), graphed=graphed, numbers=layer.numbers)
    ids, weights = layer.gate.route(logits)
    slots = layer.book.resolve(0, ids, valid)
    arrived = layer.dispatch(hidden, slots, weights)
    kept = layer.likely(arrived.batch, len(hidden))
    outputs = layer.kernel.apply(layer.prepared, kept)
    layer.dispatcher.combine(outputs, arrived.ticket)
    torch.cuda.synchronize()
    active = active_experts(kept)

    def carried() -> Tensor:
        there = layer.dispatch(hidden, slots, weights)
        return layer.dispatcher.combine(outputs, there.ticket)

    carrying = microseconds(carried, graphed=graphed, numbers=layer.numbers)
    experts = microseconds(lambda: layer.kernel.apply(layer.prepared, kept), graphed=graphed)
    found = {
        "gate": gate,
        "address book": book - gate,
        "dispatch + combine": carrying,
        "experts": experts,
        "layer": whole,
    }
    return found, active


def fused_peers(sizes: list[int], experts: int) -> dict[int, dict[str, float]]:
    """FlashInfer's fused SM90 layer by tokens a rank, for both ways it combines; none where it cannot run."""
    found: dict[int, dict[str, float]] = {tokens: {} for tokens in sizes}
    try:
        from flashinfer import moe_ep
    except ImportError:
        return found
    slots = experts // dist.get_world_size()
    gate_up = torch.randn(slots, 2 * INNER, HIDDEN, device="cuda", dtype=torch.bfloat16) * 0.02
    down = torch.randn(slots, HIDDEN, INNER, device="cuda", dtype=torch.bfloat16) * 0.02
    for most in sorted({max(256, tokens) for tokens in sizes}):
        fitting = [tokens for tokens in sizes if max(256, tokens) == most]
        for combine in ("bf16", "fp8"):
            layer = _fused(moe_ep, most, (gate_up, down), combine)
            for tokens in fitting:
                name = f"FlashInfer fused SM90, {combine} combine, routing given"
                found[tokens][name] = round(_timed_fused(moe_ep, layer, tokens, experts), 1)
            layer.destroy()
    return found


def _fused(moe_ep: Any, most: int, weights: tuple[Tensor, Tensor], combine: str) -> Any:
    """The library's layer for up to `most` tokens a rank; it rounds the weights to FP8."""
    ranks, slots = dist.get_world_size(), weights[0].shape[0]
    kernel = moe_ep.Sm90_Fp8_Fp8_Bf16_PushCuda_MegaMoeConfig(
        intermediate_size=INNER, top_k=TOP_K, combine_dtype=combine, grouped_combine=combine == "fp8"
    )
    return moe_ep.MoEEpLayer(
        moe_ep.BootstrapConfig(world_size=ranks, rank=dist.get_rank(), process_group=dist.group.WORLD),
        moe_ep.FleetParams(num_experts=slots * ranks, max_tokens_per_rank=most, token_hidden_size=HIDDEN),
        moe_ep.MoEWeightPack(*weights),
        backend=moe_ep.MegaConfig(megakernel=kernel),
    )


def _timed_fused(moe_ep: Any, layer: Any, tokens: int, experts: int) -> float:
    """Microseconds of one forward in a CUDA graph."""
    hidden, logits, _ = inputs(tokens, experts)
    given = moe_ep.MoEEpTensors(
        hidden_states=hidden,
        topk_ids=logits.float().topk(TOP_K, 1).indices.int().contiguous(),
        topk_weights=torch.rand(tokens, TOP_K, device="cuda"),
        output=torch.empty_like(hidden),
    )
    return microseconds(lambda: layer.forward(given), graphed=True)


def best_phases(scheme: str, tokens: int, ranks: int) -> dict[str, float]:
    """Microseconds of the fastest peer's experts and the fastest peer's dispatcher, as recorded.

    None where one of the two was not measured with as many rows an expert.
    """
    weights, wire = scheme, SCHEMES[scheme][3]
    experts = recorded("gpu_experts", f"{weights}, {SAME_ROWS.get(tokens)} tokens x 2, ", ", whole")
    dispatchers = recorded(
        "gpu_a2a", f"nvlink_ll, {wire}, uniform, {tokens} tokens a rank, EP{ranks}, ", "combine"
    )
    wholes = [value for name, value in experts.items() if "only" not in name]
    moved = [value for name, value in dispatchers.items() if "only" in name]
    if not wholes or not moved:
        return {}
    return {"best peers' phases, other runs": round(min(wholes) + min(moved), 1)}


def recorded(bench: str, begin: str, end: str) -> dict[str, float]:
    """The peers of the case of `bench` that begins and ends so; none where there is no such case."""
    path = RESULTS / f"{bench}.jsonl"
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else iter(())
    cases = (line for line in lines if line["case"].startswith(begin) and line["case"].endswith(end))
    return next((dict(line["peers"]) for line in cases), {})


def measure(scheme: str, tokens: int, args: argparse.Namespace) -> list[Result]:
    """One scheme at one size; the whole layer last."""
    low, high = args.dispatchers.split(",")
    dispatcher = low if tokens <= args.most_low_latency else high
    layer = build(scheme, dispatcher, tokens, args)
    found, active = phases(layer, inputs(tokens, args.experts), graphed=not DISPATCHERS[dispatcher].host_sync)
    layer.dispatcher.close()
    ranks = dist.get_world_size()
    aim = AIMS.get(scheme, {}).get(tokens) if args.experts == AIMED_SLOTS * ranks else None
    beside = best_phases(scheme, tokens, ranks) if args.experts == AIMED_SLOTS * ranks else {}
    results = []
    for part, value in found.items():
        kernel = args.kernel or SCHEMES[scheme][2]
        spread = f"EP{ranks}" if args.experts == 256 else f"EP{ranks} of {args.experts} experts"
        case = f"{scheme}, {tokens} tokens a rank, {spread}, {dispatcher}, {kernel}: {part}"
        whole = part == "layer"
        results.append(
            Result(
                "gpu_layer",
                case,
                round(value, 1),
                "us",
                "lower",
                float(aim) if aim and whole else None,
                beside if whole else {},
            )
        )
    if not dist.get_rank():
        shown = ", ".join(f"{part} {value:.1f}" for part, value in found.items())
        rest = found["layer"] - sum(value for part, value in found.items() if part != "layer")
        print(f"{scheme} {tokens} tokens, {dispatcher}: {shown}; beyond its phases {rest:.1f} us; {active=}")
        sys.stdout.flush()
    return results


def main() -> None:
    """Prints from rank 0 and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schemes", default="fp8,nvfp4")
    parser.add_argument("--tokens", default="1,16,128,4096")
    parser.add_argument("--dispatchers", default="nvlink_ll,nvlink_ht")
    parser.add_argument("--kernel", default="", help="instead of the usual one of the scheme")
    parser.add_argument("--experts", type=int, default=256, help="of all ranks together")
    parser.add_argument("--most-low-latency", type=int, default=256)
    parser.add_argument("--fused-peer", action="store_true", help="FlashInfer's layer, compiled at first use")
    args = parser.parse_args()
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # NVLink multicast stays off
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    sizes = [int(tokens) for tokens in args.tokens.split(",")]
    wholes: dict[int, Result] = {}  # of FP8, by tokens
    for scheme in args.schemes.split(","):
        for tokens in sizes:
            results = measure(scheme, tokens, args)
            if scheme == "fp8":
                wholes[tokens] = results[-1]
            if not dist.get_rank():
                write(results)
            torch.cuda.empty_cache()
    peers = fused_peers(sizes, args.experts) if args.fused_peer else {}  # last: a library may fail
    if not dist.get_rank() and wholes and any(peers.values()):
        print(f"peers by tokens a rank: {peers}", flush=True)
        write(replace(whole, peers=peers[tokens] | whole.peers) for tokens, whole in wholes.items())
    time.sleep(0.5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
