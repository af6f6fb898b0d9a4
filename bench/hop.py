"""The hop: what a call of the service costs beyond the step it runs.

    python bench/hop.py [--calls 400] [--malloc plain]

A service of two ranks (a process each, and one for the head) serves one layer of four tiny experts, so that
the
step is short. A client calls rank 0's lane with all the rows; rank 1 brings none. In blocks that take turns:

    echo      a bare Python gRPC server that returns the same bytes as the inline request, unparsed
    inline    `MoeClient.forward`, tensors in the message
    shared    the same with hidden states already in the lane's shared memory, and the answer written there
    step      the very same `Rank.step` in two other processes, without coordinator, lane or gRPC

hop p50 = p50 of the calls - p50 of the step; hop p99 = p99 of the calls - p50 of the step. The step's own
mean as
the serving ranks report it (their metrics) stands beside. Copying into and out of shared memory is not in
`shared` and is timed apart. Times are milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
import torch
from echo_server import METHOD, OPTIONS
from hop_step import BareStep
from safetensors.torch import save_file

from moeserve.proto.client import MoeClient

CASES = ((8, 2048), (256, 7168))
EXPERTS, INNER, TOP_K = 4, 32, 2
BLOCK = 20  # calls of one kind in a row
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 31),
    "MALLOC_TOP_PAD_": str(1 << 26),
}
"""Keeps glibc from returning a message's memory to the kernel, and faulting it in again, call by call."""


def make_checkpoint(path: Path, hidden: int) -> None:
    """One Qwen3-MoE layer with random experts; what attention would need is not there, and not read."""
    random = torch.Generator().manual_seed(0)
    tensors = {}
    for expert in range(EXPERTS):
        for name, shape in (
            ("gate_proj", (INNER, hidden)),
            ("up_proj", (INNER, hidden)),
            ("down_proj", (hidden, INNER)),
        ):
            weight = torch.randn(shape, generator=random).to(torch.bfloat16) * 0.02
            tensors[f"model.layers.0.mlp.experts.{expert}.{name}.weight"] = weight
    path.mkdir()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "moe_intermediate_size": INNER,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "num_hidden_layers": 1,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "hidden_act": "silu",
    }
    (path / "config.json").write_text(json.dumps(config))


class Process:
    """A child that says where it can be reached, and is ended with its context."""

    def __init__(self, command: list[str], said: str) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        lines = iter(self._process.stdout.readline, "")
        found = next((match for line in lines if (match := re.match(said, line))), None)
        if found is None:
            raise RuntimeError(f"{command[1:3]} ended with {self._process.wait()} before it was up")
        self.address = found[1]

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *ended: object) -> None:
        self._process.terminate()
        self._process.wait(30)


@dataclass
class Case:
    """One size: what is timed, and the seconds it took."""

    rows: int
    hidden: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    reported: float = 0.0  # the step's mean seconds as the ranks report it

    def p(self, kind: str, percent: float) -> float:
        """A percentile in milliseconds."""
        return float(np.percentile(self.seconds[kind], percent)) * 1e3

    def hop(self, kind: str, percent: float) -> float:
        """A percentile of the calls less the median step, in milliseconds."""
        return self.p(kind, percent) - self.p("step", 50)


def timed(call: Callable[[], object], calls: int) -> list[float]:
    """Seconds of each of `calls` calls."""
    seconds = []
    for _ in range(calls):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return seconds


def measure(rows: int, hidden: int, calls: int, folder: Path) -> Case:
    """Starts service, echo and bare ranks for one size, and times them by turns."""
    checkpoint = folder / f"hidden-{hidden}"
    make_checkpoint(checkpoint, hidden)
    serve = [
        sys.executable,
        "-m",
        "moeserve",
        "serve",
        "--checkpoint",
        str(checkpoint),
        "--launcher",
        "local",
    ]
    serve += ["--device", "cpu", "--port", "0", "--metrics-port", "0", "--data-parallel-size", "2"]
    with ExitStack() as stack:
        service = stack.enter_context(Process([*serve, "--enable-expert-parallel"], r"serving on (\S+)"))
        echo = stack.enter_context(
            Process([sys.executable, str(Path(__file__).with_name("echo_server.py"))], r"(\d+)")
        )
        bare = BareStep(checkpoint, rows)
        stack.callback(bare.close)
        client = stack.enter_context(MoeClient(service.address, lane=0, transport="inline"))
        kinds = kinds_of(client, f"127.0.0.1:{echo.address}", rows, hidden)
        case = Case(rows, hidden, {kind: [] for kind in (*kinds, "step")})
        for block in range(-2, -(-calls // BLOCK)):  # two to warm up
            for kind, call in kinds.items():
                case.seconds[kind] += timed(call, BLOCK) if block >= 0 else timed(call, BLOCK)[:0]
            case.seconds["step"] += bare.run(BLOCK)[: BLOCK if block >= 0 else 0]
        return case


def kinds_of(client: MoeClient, echo: str, rows: int, hidden: int) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(rows, hidden, generator=random).to(torch.bfloat16)
    experts = torch.rand(rows, EXPERTS, generator=random).argsort(dim=1)[:, :TOP_K].int().contiguous()
    weights = torch.full((rows, TOP_K), 1 / TOP_K)
    body = bytes(x.nbytes + experts.nbytes + weights.nbytes)
    channel = grpc.insecure_channel(echo, options=OPTIONS)
    bounce = channel.unary_unary(METHOD)
    placed, answer = client.allocate(0, (rows, hidden)), client.allocate(0, (rows, hidden))
    inside, outside = placed.tensor, torch.empty_like(x)
    inside.copy_(x)
    expected = client.forward(0, x, experts, weights)
    client.forward(0, placed, experts, weights, output=answer)
    if not torch.equal(answer.tensor, expected):
        raise RuntimeError("the answer in shared memory is another than the inline one")
    return {
        "echo": lambda: bounce(body),
        "inline": lambda: client.forward(0, x, experts, weights),
        "shared": lambda: client.forward(0, placed, experts, weights, output=answer),
        "copy": lambda: (inside.copy_(x), outside.copy_(answer.tensor)),
    }


def table(cases: list[Case]) -> str:
    """The result for people, in milliseconds."""
    lines = ["case            kind      call p50   p99 |  hop p50   p99 | x echo p50"]
    for case in cases:
        for kind in ("echo", "inline", "shared", "step", "copy"):
            calls = f"{case.p(kind, 50):8.2f} {case.p(kind, 99):6.2f}"
            hop, ratio = " " * 15, ""
            if kind in ("inline", "shared"):
                hop = f"{case.hop(kind, 50):8.2f} {case.hop(kind, 99):6.2f}"
                ratio = f"{case.hop(kind, 50) / case.p('echo', 50):5.2f}"
            lines.append(f"{case.rows:>4} x {case.hidden:<8} {kind:<8} {calls} | {hop} | {ratio}")
    return "\n".join(lines)


def main() -> None:
    """Measures every case and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=400, help="of each kind and case")
    parser.add_argument(
        "--malloc", choices=("tuned", "plain"), default="tuned", help="glibc settings of all processes"
    )
    args = parser.parse_args()
    wanted = MALLOC if args.malloc == "tuned" else {}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(
            sys.executable, [sys.executable, *sys.argv], os.environ | wanted
        )  # glibc reads them at start
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cases = [measure(rows, hidden, args.calls, Path(folder)) for rows, hidden in CASES]
    print(table(cases))


if __name__ == "__main__":
    main()
