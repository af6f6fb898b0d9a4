"""What keys cost a call: the same call of a plain service, with a token, over TLS, and over mutual TLS.

    python -m bench.service.tls_cost [--calls 600] [--patience 300] [--dry]

Four services of one rank each serve one layer of four tiny experts (bench/service/hop.py). A client calls
each with its rows inline, in blocks that take turns. The cost is the median of the differences between a
block's median and that of the plain service in the same turn, in microseconds. The bytes are what OpenSSL
takes in this process to encrypt and decrypt as many as the call's messages have, in records of TLS: what is
left without them is the aim's. Rows in shared memory go over a Unix socket, which keys do not touch. A turn
counts only where the machine is idle before and after it; with --patience 0 every turn counts, and nothing
is recorded.
"""

from __future__ import annotations

import argparse
import ssl
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.lib.quiet import rounds
from bench.lib.record import ROOT, Result, write
from bench.service.hop import EXPERTS, TOP_K, Child, make_checkpoint, timed
from moeserve.proto.client import MoeClient
from moeserve.proto.heap import keep_freed_memory
from moeserve.runtime.keys.access import Role

sys.path.insert(0, str(ROOT / "tests" / "support"))

from keyed import Keyring

HIDDEN = 2048
ROWS = (1, 512)
BLOCK = 10  # calls of one kind in a row
AIM = 30.0  # microseconds a call, beside the bytes
KEYS = {"no keys": "", "token": "plain", "TLS and token": "tls", "mutual TLS": "mutual"}
"""What is compared: the mode of a `Keyring`, empty for none."""

SERVE = "-m moeserve serve --launcher local --device cpu --port 0 --metrics-port -1"


@dataclass(frozen=True)
class Case:
    """One number of rows: microseconds of every turn's median by kind, and of the bytes."""

    rows: int
    turns: list[dict[str, float]]
    bytes_us: float

    def median(self, kind: str) -> float:
        """Of the medians of all turns."""
        return statistics.median(turn[kind] for turn in self.turns)

    def cost(self, kind: str) -> float:
        """What a call takes longer than one of the plain service, in the same turn."""
        return statistics.median(turn[kind] - turn["no keys"] for turn in self.turns)


def client_of(mode: str, checkpoint: Path, folder: Path, stack: ExitStack) -> MoeClient:
    """A client of a service of its own."""
    serve = [sys.executable, *SERVE.split(), "--checkpoint", str(checkpoint)]
    credentials = None
    if mode:
        ring = Keyring(folder / mode, mode)
        settings = ring.settings()
        lines = [f'{key.removeprefix("keys__")} = "{value}"' for key, value in settings.items()]
        (folder / f"{mode}.toml").write_text("\n".join(["[keys]", *lines, ""]))
        serve.append(str(folder / f"{mode}.toml"))
        credentials = ring.credentials(ring.shown("right", frozenset({Role.CALL})))
    service = stack.enter_context(Child(serve, r"serving on (\S+)"))
    return stack.enter_context(
        MoeClient(service.said[0], lane=0, transport="inline", credentials=credentials)
    )


def measure(rows: int, clients: dict[str, MoeClient], ring: Keyring, args: argparse.Namespace) -> Case:
    """Times the calls of one size by turns."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(rows, HIDDEN, generator=random).bfloat16()
    experts = torch.rand(rows, EXPERTS, generator=random).argsort(dim=1)[:, :TOP_K].int().contiguous()
    weights = torch.full((rows, TOP_K), 1 / TOP_K)
    calls: dict[str, Callable[[], object]] = {
        kind: (lambda client=client: client.forward(0, x, experts, weights))  # type: ignore[misc]
        for kind, client in clients.items()
    }
    for call in calls.values():
        timed(call, 4 * BLOCK)

    def turn() -> dict[str, float]:
        return {kind: statistics.median(timed(call, BLOCK)) * 1e6 for kind, call in calls.items()}

    count = -(-args.calls // BLOCK)
    turns: Iterator[dict[str, float]] = (
        rounds(turn, count, args.patience) if args.patience else (turn() for _ in range(count))
    )
    sizes = x.nbytes + experts.nbytes + weights.nbytes, x.nbytes
    return Case(rows, list(turns), encrypted_us(sizes, ring))


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
    lines += [f"  {kind:<14} {case.cost(kind):+8.0f} us" for kind in KEYS if kind != "no keys"]
    return "\n".join(lines)


def results(case: Case) -> list[Result]:
    """One case for the record."""
    found = []
    for kind, mode in KEYS.items():
        if not mode:
            continue
        beside = case.bytes_us if mode in ("tls", "mutual") else 0.0
        facts = {"whole cost": case.cost(kind), "its bytes": beside, "call": case.median("no keys")}
        rounded = {name: round(value, 1) for name, value in facts.items()}
        cost = round(case.cost(kind) - beside, 1)
        found.append(Result("tls_cost", f"{kind}, {case.rows} rows", cost, "us", "lower", AIM, rounded))
    return found


def main() -> None:
    """Measures both sizes, prints them and writes the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=600, help="of each kind and size; 600 by default")
    parser.add_argument("--patience", type=float, default=300, help="seconds to wait for a quiet machine")
    parser.add_argument("--dry", action="store_true", help="print only, leave the record as it is")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        make_checkpoint(folder / "checkpoint", HIDDEN)
        clients = {kind: client_of(mode, folder / "checkpoint", folder, stack) for kind, mode in KEYS.items()}
        ring = Keyring(folder / "bytes", "tls")
        cases = []
        for rows in ROWS:
            cases.append(measure(rows, clients, ring, args))
            print(shown(cases[-1]), flush=True)
    if args.patience and not args.dry:
        write([result for case in cases for result in results(case)])


if __name__ == "__main__":
    main()
