"""What keys cost a call: the same call of a plain service, with a token, over TLS, and over mutual TLS.

    python -m bench.service.tls_cost [--turns 300] [--service-cores 6] [--patience 120] [--record]

Four services of one rank each serve one layer of four tiny experts (bench/service/hop.py). A client calls
each with its rows inline, in blocks that take turns, another kind first in every turn. The cost is the median
of the differences between a block's median and that of the plain service in the same turn, in microseconds,
with the interval that holds it in 95 of 100 cases. What is left without the bytes is the aim's. The bytes are
what OpenSSL takes in this process to encrypt and decrypt as many as the call's messages have, in records of
TLS. Beside it stands what TLS costs a bare gRPC echo of the same bytes (bench/service/echo_server.py): more
than that is ours. Rows in shared memory go over a Unix socket, which keys do not touch.

Where the machine has six cores or more, services and echoes have cores of their own. A turn counts only where
the cores in use are idle before and after it; with --patience 0 every turn counts.
"""

from __future__ import annotations

import argparse
import itertools
import math
import ssl
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import torch

from bench.lib.cores import Cores, on, usual
from bench.lib.quiet import rounds
from bench.lib.record import ROOT, Result, write
from bench.service.echo_server import METHOD, OPTIONS
from bench.service.hop import EXPERTS, TOP_K, Child, make_checkpoint, timed
from moeserve.proto.client import MoeClient
from moeserve.proto.credentials import Credentials
from moeserve.proto.heap import keep_freed_memory
from moeserve.runtime.keys.access import Role

sys.path.insert(0, str(ROOT / "tests" / "support"))

from keyed import Keyring

HIDDEN = 2048
ROWS = (1, 512)
BLOCK = 8  # calls of one kind in a row
MOST_CORES = 6  # of the services
AIM = 30.0  # microseconds a call, beside the bytes
KEYS = {"no keys": "", "token": "plain", "TLS and token": "tls", "mutual TLS": "mutual"}
"""What is compared: the mode of a `Keyring`, empty for none."""

PLAIN_ECHO, TLS_ECHO = "echo", "echo over TLS"
SERVE = "-m moeserve serve --launcher local --device cpu --port 0 --metrics-port -1 --health-port -1"
Call = Callable[[], object]


@dataclass(frozen=True)
class Cost:
    """Microseconds that one kind of call takes longer than another in the same turn: a median."""

    median: float
    low: float  # the median is between these in 95 of 100 cases
    high: float

    @classmethod
    def of(cls, differences: list[float]) -> Cost:
        """The median of `differences`, and its interval by their order alone."""
        found, count = sorted(differences), len(differences)
        off = 0.98 * math.sqrt(count)
        low, high = max(0, math.floor(count / 2 - off)), min(count - 1, math.ceil(count / 2 + off))
        return cls(statistics.median(found), found[low], found[high])


@dataclass(frozen=True)
class Case:
    """One number of rows: microseconds of every turn's median by kind, and of the bytes."""

    rows: int
    turns: list[dict[str, float]]
    bytes_us: float

    def median(self, kind: str) -> float:
        """Of the medians of all turns."""
        return statistics.median(turn[kind] for turn in self.turns)

    def cost(self, kind: str, beside: str = "no keys") -> Cost:
        """What a call takes longer than one of the kind `beside`, in the same turn."""
        return Cost.of([turn[kind] - turn[beside] for turn in self.turns])


def serving(mode: str, checkpoint: Path, folder: Path, stack: ExitStack) -> tuple[str, Credentials | None]:
    """A service of its own: its address, and what its callers show."""
    serve = [sys.executable, *SERVE.split(), "--checkpoint", str(checkpoint)]
    credentials = None
    lines = ["[cluster]", "threads_per_rank = 1"]
    if mode:
        ring = Keyring(folder / mode, mode)
        settings = ring.settings()
        lines += ["[keys]", *(f'{key.removeprefix("keys__")} = "{value}"' for key, value in settings.items())]
        credentials = ring.credentials(ring.shown("right", frozenset({Role.CALL})))
    config = folder / f"{mode or 'none'}.toml"
    config.write_text("\n".join([*lines, ""]))
    service = stack.enter_context(Child([*serve, str(config)], r"serving on (\S+)"))
    return service.said[0], credentials


def echoing(pair: tuple[str, str] | None, stack: ExitStack) -> str:
    """The port of a bare echo of its own, over TLS with the `pair` of a certificate and its key."""
    command = [sys.executable, "-m", "bench.service.echo_server", *(pair or ())]
    return stack.enter_context(Child(command, r"(\d+)")).said[0]


def echo_at(port: str, ca: str, stack: ExitStack) -> Callable[[bytes], bytes]:
    """Calls an echo; over TLS where there is an authority to trust."""
    if ca:
        trusted = grpc.ssl_channel_credentials(Path(ca).read_bytes())
        channel = grpc.secure_channel(f"localhost:{port}", trusted, options=OPTIONS)
    else:
        channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS)
    stack.callback(channel.close)
    call: Callable[[bytes], bytes] = channel.unary_unary(METHOD)
    return call


@dataclass(frozen=True)
class Calls:
    """What is compared for one number of rows."""

    by_kind: dict[str, Call]
    sizes: tuple[int, int]  # bytes of a request and of a reply

    def turn(self, number: int) -> dict[str, float]:
        """The microseconds of a block's median by kind; each turn begins with another kind."""
        kinds = list(self.by_kind)
        first = number % len(kinds)
        ordered = [*kinds[first:], *kinds[:first]]
        return {kind: statistics.median(timed(self.by_kind[kind], BLOCK)) * 1e6 for kind in ordered}


def calls_of(rows: int, clients: dict[str, MoeClient], echoes: dict[str, Callable[[bytes], bytes]]) -> Calls:
    """One call of each kind, and the bytes of its request and of its reply."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(rows, HIDDEN, generator=random).bfloat16()
    experts = torch.rand(rows, EXPERTS, generator=random).argsort(dim=1)[:, :TOP_K].int().contiguous()
    weights = torch.full((rows, TOP_K), 1 / TOP_K)
    calls: dict[str, Call] = {
        kind: (lambda client=client: client.forward(0, x, experts, weights))  # type: ignore[misc]
        for kind, client in clients.items()
    }
    body = bytes(x.nbytes)
    calls |= {kind: (lambda echo=echo: echo(body)) for kind, echo in echoes.items()}  # type: ignore[misc]
    return Calls(calls, (x.nbytes + experts.nbytes + weights.nbytes, x.nbytes))


def measure(calls: Calls, cores: Cores, args: argparse.Namespace) -> list[dict[str, float]]:
    """Every turn's medians."""
    for call in calls.by_kind.values():
        timed(call, 4 * BLOCK)
    numbers = itertools.count()
    if not args.patience:
        return [calls.turn(next(numbers)) for _ in range(args.turns)]
    used = cores.service | cores.load
    return list(rounds(lambda: calls.turn(next(numbers)), args.turns, args.patience, used))


def encrypted_us(sizes: tuple[int, int], ring: Keyring) -> float:
    """Microseconds in which a request and a reply of so many bytes are encrypted and decrypted."""
    server, client = (
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        ssl.create_default_context(cafile=ring.service.path),
    )
    server.load_cert_chain(*ring.pair)
    ways = [ssl.MemoryBIO() for _ in range(2)]
    ends = [
        client.wrap_bio(ways[0], ways[1], server_hostname="localhost"),
        server.wrap_bio(ways[1], ways[0], server_side=True),
    ]
    for end in (*ends, *ends):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue

    def carry() -> None:
        for (sender, receiver), size in zip((ends, ends[::-1]), sizes, strict=True):
            sender.write(bytes(size))
            while size:
                size -= len(receiver.read(size))

    timed(carry, 20)
    return statistics.median(timed(carry, 200)) * 1e6


def shown(case: Case) -> str:
    """One case for people."""
    lines = [f"{case.rows} rows x {HIDDEN} bf16: a call without keys {case.median('no keys'):.0f} us"]
    lines += [f"  encrypting and decrypting its bytes {case.bytes_us:.0f} us"]
    echo = case.cost(TLS_ECHO, PLAIN_ECHO)
    lines += [f"  TLS for an echo of {case.median(PLAIN_ECHO):.0f} us {_said(echo)}"]
    lines += [f"  {kind:<14} {_said(case.cost(kind))}" for kind in KEYS if kind != "no keys"]
    return "\n".join(lines)


def _said(cost: Cost) -> str:
    return f"{cost.median:+.1f} us ({cost.low:+.1f} to {cost.high:+.1f})"


def results(case: Case) -> list[Result]:
    """One case for the record."""
    found, echo = [], case.cost(TLS_ECHO, PLAIN_ECHO).median
    for kind, mode in KEYS.items():
        if not mode:
            continue
        over_tls, cost = mode in ("tls", "mutual"), case.cost(kind)
        facts = {"whole cost": cost.median, "at least": cost.low, "at most": cost.high}
        facts |= {"a call without keys": case.median("no keys")}
        if over_tls:
            facts |= {"its bytes": case.bytes_us, "TLS for an echo": echo, "beside that": cost.median - echo}
        rounded = {name: round(value, 1) for name, value in facts.items()}
        ours = round(cost.median - over_tls * case.bytes_us, 1)
        found.append(Result("tls_cost", f"{kind}, {case.rows} rows", ours, "us", "lower", AIM, rounded))
    return found


def main() -> None:
    """Measures both sizes, prints them and writes the record where asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=300, help="of each size; 300 by default")
    parser.add_argument("--patience", type=float, default=120, help="seconds to wait for quiet cores")
    parser.add_argument(
        "--service-cores", type=int, default=usual(MOST_CORES), help="of the services alone; 0: all, for both"
    )
    parser.add_argument("--record", action="store_true", help="write bench/results/tls_cost.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    cores = Cores.shared_out(args.service_cores)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        make_checkpoint(folder / "checkpoint", HIDDEN)
        ring = Keyring(folder / "bytes", "tls")
        with on(cores.service):
            served = {
                kind: serving(mode, folder / "checkpoint", folder, stack) for kind, mode in KEYS.items()
            }
            ports = {PLAIN_ECHO: echoing(None, stack), TLS_ECHO: echoing(ring.pair, stack)}
        stack.enter_context(on(cores.load))
        clients = {
            kind: stack.enter_context(MoeClient(address, lane=0, transport="inline", credentials=credentials))
            for kind, (address, credentials) in served.items()
        }
        authorities = {PLAIN_ECHO: "", TLS_ECHO: ring.service.path}
        echoes = {kind: echo_at(port, authorities[kind], stack) for kind, port in ports.items()}
        cases = []
        for rows in ROWS:
            calls = calls_of(rows, clients, echoes)
            cases.append(Case(rows, measure(calls, cores, args), encrypted_us(calls.sizes, ring)))
            print(shown(cases[-1]), flush=True)
    if args.record:
        write([result for case in cases for result in results(case)])


if __name__ == "__main__":
    main()
