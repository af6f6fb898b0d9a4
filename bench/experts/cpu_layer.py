"""Times one MoE layer on this machine's CPU beside transformers' own experts.

    python -m bench.experts.cpu_layer [--tokens 1 32 512] [--dtypes fp32 bf16] [--ranks 4] [--seconds 15]

64 experts, hidden 2048, inner 768, top-8. Two forms of ours: one rank in this process (dispatcher `local`),
and `--ranks` spawned ranks that share the cores, each with its part of the experts and of the tokens
(`allgather_reducescatter` over gloo). The peers are `Qwen3MoeExperts` with experts_implementation `eager`
and `grouped_mm`, in this process with all cores. All get the same weights, rows and routing, their answers
are compared first, and their runs alternate. A run of the ranks is timed from the word to begin to the last
rank's word that it is done. Medians, in milliseconds.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from bench.lib.numbers import Numbers
from bench.lib.quiet import idle
from bench.lib.record import Result, write
from moeserve.dispatch.backends import DISPATCHERS
from moeserve.dispatch.dispatcher import Dispatcher, DispatchSpec
from moeserve.dispatch.members import Members
from moeserve.dispatch.routing import Routing
from moeserve.experts.activation import Activation
from moeserve.experts.bank import Bank
from moeserve.experts.batch import ExpertShape, ExpertWeights
from moeserve.experts.kernel import Kernel, KernelSpec
from moeserve.experts.kernels import KERNELS
from moeserve.quant.format import Format, Scheme
from moeserve.quant.formats import format_named

EXPERTS, TOP_K = 64, 8
SHAPE = ExpertShape(hidden=2048, inner=768, activation=Activation("silu"))
KERNEL = "torch_grouped_mm"
AIM = 1.3  # of grouped_mm's time, at 512 tokens on ranks
BOUNDS = {"fp32": 1e-5, "bf16": 2e-2}  # RMS of the difference from grouped_mm, relative to its output's


@dataclass(frozen=True, eq=False)
class Tokens:
    """Rows of a step with their routing, the same in every process."""

    hidden: Tensor  # [T, H]
    experts: Tensor  # [T, K] int32
    weights: Tensor  # [T, K] float32

    @classmethod
    def made(cls, count: int, form: Format) -> Tokens:
        """`count` random rows, each with distinct random experts."""
        generator = torch.Generator().manual_seed(count)
        hidden = torch.randn(count, SHAPE.hidden, generator=generator).to(form.dtype)
        chosen = torch.rand(count, EXPERTS, generator=generator).topk(TOP_K)
        return cls(hidden, chosen.indices.int(), chosen.values.softmax(dim=1))

    def lane(self, rank: int, ranks: int) -> tuple[Tokens, tuple[int, ...]]:
        """The rows of one of `ranks` lanes, and how many each lane has."""
        parts = [tensor.tensor_split(ranks) for tensor in (self.hidden, self.experts, self.weights)]
        return Tokens(*(part[rank] for part in parts)), tuple(len(rows) for rows in parts[0])


def expert_weights(first: int, count: int, form: Format) -> ExpertWeights:
    """`count` experts from `first` on, each from a seed of its own: any process can make any of them."""
    gate_up = torch.empty(count, SHAPE.gate_up_rows, SHAPE.hidden, dtype=form.dtype)
    down = torch.empty(count, SHAPE.hidden, SHAPE.inner, dtype=form.dtype)
    for expert in range(count):
        generator = torch.Generator().manual_seed(first + expert)
        for matrix in (gate_up[expert], down[expert]):
            matrix.copy_(torch.randn(matrix.shape, generator=generator) / matrix.shape[1] ** 0.5)
    return ExpertWeights(form.quantize(gate_up), form.quantize(down))


class OneRank:
    """A rank's step without its control: dispatcher, kernel, dispatcher."""

    def __init__(self, rank: int, ranks: int, form: Format, lane_rows: int) -> None:
        slots = EXPERTS // ranks
        members = Members.of_ranks(ranks)
        spec = DispatchSpec(members, rank, slots, SHAPE.hidden, TOP_K, lane_rows, form.dtype, form)
        self._rank, self._ranks = rank, ranks
        entry = DISPATCHERS["local" if ranks == 1 else "allgather_reducescatter"]
        self._dispatcher: Dispatcher = entry.build(spec, dist.group.WORLD if ranks > 1 else None)
        self._numbers = Numbers(self._dispatcher)
        self._kernel: Kernel = KERNELS[KERNEL].build(KernelSpec(Scheme(form, form), SHAPE, form.dtype))
        self._bank = Bank()
        self._bank.load(0, self._kernel, expert_weights(rank * slots, slots, form), range(slots))

    def step(self, tokens: Tokens) -> Callable[[], Tensor]:
        """A run of the step on this rank's lane of `tokens`."""
        lane, rows = tokens.lane(self._rank, self._ranks)
        routing = Routing(lane.experts, lane.weights, rows, 0)

        def run() -> Tensor:
            arrived = self._dispatcher.dispatch(lane.hidden, self._numbers.next(routing))
            outputs = self._kernel.apply(self._bank[0], arrived.batch)
            return self._dispatcher.combine(outputs, arrived.ticket)

        return run


def rank_process(rank: int, ranks: int, store: str, orders: Connection, form_name: str) -> None:
    """One spawned rank: for each token count it is sent, its answer, then one run for each word to go."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    form = format_named(form_name)
    worker = OneRank(rank, ranks, form, lane_rows=4096)
    orders.send("ready")
    while count := orders.recv():
        run = worker.step(Tokens.made(count, form))
        orders.send(run().float().numpy())
        while orders.recv():
            run()
            orders.send("done")
    dist.destroy_process_group()


@contextmanager
def spawned_ranks(ranks: int, form: Format) -> Iterator[list[Connection]]:
    """Pipes to `ranks` processes that are ready; they end with the block."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes = [context.Pipe() for _ in range(ranks)]
        processes = [
            context.Process(
                target=rank_process, args=(rank, ranks, store, pipes[rank][1], form.name), daemon=True
            )
            for rank in range(ranks)
        ]
        for process, (_, far_end) in zip(processes, pipes, strict=True):
            process.start()
            far_end.close()  # so that a rank that died reads as end of file
        ends = [pipe for pipe, _ in pipes]
        try:
            for end in ends:
                end.recv()
            yield ends
            for end in ends:
                end.send(0)
            for process in processes:
                process.join(timeout=30)
        finally:
            for process in processes:
                process.kill()


def together(ends: list[Connection], word: object) -> list[object]:
    """Says `word` to every rank and waits for what each answers."""
    for end in ends:
        end.send(word)
    return [end.recv() for end in ends]


class Peers:
    """transformers' experts over the same weights, one module for all implementations."""

    def __init__(self, form: Format) -> None:
        self._config = Qwen3MoeConfig(
            num_experts=EXPERTS,
            hidden_size=SHAPE.hidden,
            moe_intermediate_size=SHAPE.inner,
            num_experts_per_tok=TOP_K,
            hidden_act="silu",
        )
        with torch.device("meta"):
            self._experts = Qwen3MoeExperts(self._config)
        weights = expert_weights(0, EXPERTS, form)
        self._experts.gate_up_proj = torch.nn.Parameter(weights.gate_up.parts[0], requires_grad=False)
        self._experts.down_proj = torch.nn.Parameter(weights.down.parts[0], requires_grad=False)

    def run(self, implementation: str, tokens: Tokens) -> Tensor:
        """The layer's output, `[T, H]`."""
        self._config._experts_implementation = implementation
        return self._experts(tokens.hidden, tokens.experts.long(), tokens.weights.to(tokens.hidden.dtype))


def alternate(runs: dict[str, Callable[[], object]], seconds: float, patience: float) -> dict[str, float]:
    """Median milliseconds of each run; they take turns for `seconds`, at least five times.

    A round counts only where the machine was otherwise idle before and after it. RuntimeError: five of them
    did not come within `patience` seconds.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    begun, spent, rounds = time.perf_counter(), 0.0, 0
    while spent < seconds or rounds < 5:
        if time.perf_counter() - begun > patience:
            if rounds >= 5:
                break
            found = f"{rounds} quiet rounds of 5 in {patience:.0f} s"
            raise RuntimeError(f"other processes keep the machine busy: {found}; give more --patience")
        if not idle(0.1):
            continue
        taken = {name: timed(run) for name, run in runs.items()}
        if idle(0.1):
            for name, value in taken.items():
                times[name].append(value)
            spent, rounds = spent + sum(taken.values()) / 1e3, rounds + 1
    return {name: statistics.median(values) for name, values in times.items()}


def timed(run: Callable[[], object]) -> float:
    """Milliseconds of one run."""
    time.sleep(0.005)  # threads of the run before stop spinning
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1e3


def check(name: str, found: Tensor, expected: Tensor, bound: float) -> None:
    """Raises ValueError when an answer is not the peer's."""
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    if not error <= bound:
        raise ValueError(f"{name}: relative error {error:.2e} against grouped_mm is above {bound}")


def measure(form: Format, args: argparse.Namespace) -> Iterator[Result]:
    """Two results a token count: ours in one process, and ours on ranks."""
    counts, ranks = args.tokens, args.ranks
    peers, alone = Peers(form), OneRank(0, 1, form, lane_rows=max(counts))
    with spawned_ranks(ranks, form) as ends:
        for count in counts:
            tokens = Tokens.made(count, form)
            step = alone.step(tokens)
            expected = peers.run("grouped_mm", tokens)
            check("in process", step(), expected, BOUNDS[form.name])
            answers = torch.cat([torch.from_numpy(answer) for answer in together(ends, count)])
            check(f"{ranks} ranks", answers, expected, BOUNDS[form.name])
            times = alternate(
                {
                    "eager": lambda: peers.run("eager", tokens),  # noqa: B023
                    "grouped_mm": lambda: peers.run("grouped_mm", tokens),  # noqa: B023
                    "in process": step,
                    f"{ranks} ranks": lambda: together(ends, True),
                },
                args.seconds,
                args.patience,
            )
            for end in ends:
                end.send(False)
            ours = {name: times.pop(name) for name in ("in process", f"{ranks} ranks")}
            named = {f"transformers {name}": round(value, 3) for name, value in times.items()}
            for name, value in ours.items():
                aimed = count == 512 and name != "in process"
                aim = round(AIM * times["grouped_mm"], 3) if aimed else None
                case = f"{form.name}, {count} tokens, {name}"
                yield Result("cpu_layer", case, round(value, 3), "ms", "lower", aim, named)


def main() -> None:
    parser = argparse.ArgumentParser(description="One MoE layer on the CPU beside transformers' experts.")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1, 32, 512], help="rows of a step, over all lanes"
    )
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=sorted(BOUNDS))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=15, help="of measuring, for each token count")
    parser.add_argument(
        "--patience", type=float, default=300, help="seconds to wait for a quiet machine, for each"
    )
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    for name in args.dtypes:
        for result in measure(format_named(name), args):
            write([result])
            ratios = "  ".join(f"{result.ratio(peer):5.2f} x {peer}" for peer in result.peers)
            print(f"{result.case:32} {result.ours:9.2f} ms  {ratios}", flush=True)


if __name__ == "__main__":
    main()
