"""Compares what moeserve reads with what others make of the same bytes, a million random values a format.

    python -m bench.numbers.cross_checks [--only TEXT] [--record]

Random codes and scales are written as a checkpoint of one expert, read by moeserve, and decoded by the peer's
own functions; elements (FP8, FP6, FP4, E8M0) are encoded and decoded one by one. Values must be equal bit for
bit. Where a peer rounds in another order, the table says so, and how many values are left when its order is
followed. Exit status 1 where any is left, or no peer is installed.

A peer that is not installed is listed as such and counts for nothing. They do not fit into one environment;
with moeserve on PYTHONPATH each of these runs its share (`pip install`, torch as in constraints.txt):

    moeserve[dev]         ml_dtypes, transformers, compressed-tensors
    llmcompressor         compressed-tensors as llm-compressor has it
    nvidia-modelopt[hf]   ModelOpt
    gptqmodel             GPTQModel
    torchao               torchao
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from bench.lib.checkpoint import Qwen3Moe, write_checkpoint
from bench.lib.record import Result, write
from bench.numbers.cross_peers import PEERS, Peer
from bench.numbers.cross_stored import STORED, Draw, Stored
from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.quant.elements import E2M1, E2M3, E3M2, FP8_LARGEST, decode_e8m0, decode_fp8, encode_fp8

HIDDEN, INNER = 512, 768
VALUES = 1 << 20
MODEL = Qwen3Moe(HIDDEN, INNER, experts=1, top_k=1, layers=1)
ROLES = {f"{name}_proj": shape for name, shape in MODEL.projections.items()}


@dataclass(frozen=True)
class Checked:
    """A row of the table."""

    what: str
    peer: str  # package and version
    values: int
    mismatches: int
    left: int  # mismatches that the note does not explain
    note: str = ""


def draw(stored: Stored) -> dict[str, dict[str, Tensor]]:
    """The tensors of an expert's projections."""
    source = torch.Generator().manual_seed(0)
    made = {role: stored.make(Draw(*size, source)) for role, size in ROLES.items()}
    for name in stored.shared:
        made["up_proj"][name] = made["gate_proj"][name].clone()
    return made


def read(stored: Stored, projections: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    """The projections' matrices, as moeserve reads them from a checkpoint."""
    tensors = {
        f"model.layers.0.mlp.experts.0.{role}.{suffix}": tensor.contiguous()
        for role, own in projections.items()
        for suffix, tensor in own.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), MODEL.config(quantization=stored.quantization), tensors)
        expert = Checkpoint(folder).experts(0, [0])
        gate, up = expert.gate_up.dequantize()[0].chunk(2)
        return {"gate_proj": gate, "up_proj": up, "down_proj": expert.down.dequantize()[0]}


def differing(ours: Tensor, theirs: Tensor) -> Tensor:
    """Returns where two matrices differ in a bit; zeros of either sign are equal, and so are all NaN."""
    return ~((ours == theirs) | (ours.isnan() & theirs.isnan()))


def compare(peer: Peer, installed: str) -> Checked:
    """Compares all projections of one stored form, as moeserve and as the peer read them."""
    stored = STORED[peer.stored]
    projections = draw(stored)
    ours = read(stored, projections)
    values = mismatches = left = 0
    for role, own in projections.items():
        theirs = peer.decode(own).detach().float()
        if theirs.shape != ours[role].shape:
            raise ValueError(f"{peer.package} makes {list(theirs.shape)} of {peer.stored} {role}")
        wrong = differing(ours[role], theirs)
        values, mismatches = values + wrong.numel(), mismatches + int(wrong.sum())
        if peer.reordered is not None:
            allowed = (peer.rounding * ours[role].abs()).nan_to_num(nan=peer.rounding)  # infinity x 0
            near = (ours[role] - theirs).abs() <= allowed
            wrong = differing(peer.reordered(own), theirs) | ~near
        left += int(wrong.sum())
    return Checked(peer.stored, f"{peer.package} {installed}", values, mismatches, left, peer.why)


def random_values(largest: float, smallest: float) -> Tensor:
    """Float32 of both signs between half of `smallest` and `largest`, and the midpoints between codes."""
    source = torch.Generator().manual_seed(0)
    low, high = torch.tensor([smallest / 2, largest]).log2()
    sizes = torch.exp2(low + (high - low) * torch.rand(VALUES, generator=source)).clamp(max=largest)
    return sizes * (torch.randint(0, 2, (VALUES,), generator=source) * 2 - 1)


def with_midpoints(x: Tensor, codes: Tensor) -> Tensor:
    """`x`, and after it every midpoint of two neighbouring finite codes, where rounding ties."""
    known = sorted(set(codes[codes.isfinite()].tolist()))
    return torch.cat((x, torch.tensor([(a + b) / 2 for a, b in pairwise(known)])))


def elements() -> Iterator[Checked]:
    """Each element encoding against ml_dtypes; ImportError where it is missing."""
    import ml_dtypes

    name = f"ml_dtypes {version('ml_dtypes')}"
    minifloats = {E2M1: "float4_e2m1fn", E3M2: "float6_e3m2fn", E2M3: "float6_e2m3fn"}
    for element, kind in minifloats.items():
        dtype, codes = getattr(ml_dtypes, kind), torch.arange(1 << element.bits, dtype=torch.uint8)
        theirs = torch.from_numpy(codes.numpy().view(dtype).astype("float32"))
        yield _same(f"{element.name} decoded", name, element.values(), theirs)
        x = with_midpoints(random_values(element.largest, float(theirs[1])), theirs)
        encoded = torch.from_numpy(x.numpy().astype(dtype).view("uint8"))
        yield _same(f"{element.name} encoded", name, element.encode(x).to(torch.uint8), encoded)
    for fp8, largest in FP8_LARGEST.items():
        kind = str(fp8).removeprefix("torch.")
        dtype, codes = getattr(ml_dtypes, kind), torch.arange(256, dtype=torch.uint8)
        theirs = torch.from_numpy(codes.numpy().view(dtype).astype("float32"))
        yield _same(f"{kind} decoded", name, decode_fp8(codes.view(fp8)), theirs)
        x = with_midpoints(random_values(largest, float(theirs[1])), theirs)
        x = x[x.abs() <= largest]
        encoded = torch.from_numpy(x.numpy().astype(dtype).view("uint8"))
        yield _same(f"{kind} encoded", name, encode_fp8(x, fp8).view(torch.uint8), encoded)
    codes = torch.arange(256, dtype=torch.uint8)
    theirs = torch.from_numpy(codes.numpy().view(ml_dtypes.float8_e8m0fnu).astype("float32"))
    yield _same("float8_e8m0fnu decoded", name, decode_e8m0(codes), theirs)


def _same(what: str, peer: str, ours: Tensor, theirs: Tensor) -> Checked:
    """Codes are compared as integers: a zero keeps its sign."""
    wrong = int(differing(ours, theirs).sum())
    return Checked(what, peer, ours.numel(), wrong, wrong)


def installed(package: str) -> str | None:
    """Returns the version of the installed peer."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def checks(only: str) -> Iterator[tuple[str, str, Callable[[], list[Checked]] | None]]:
    """What is compared, with whom, and how; None where the peer is not installed."""
    if not only or only in "elements ml_dtypes":
        found = installed("ml_dtypes")
        yield "elements", "ml_dtypes", (lambda: list(elements())) if found else None
    for peer in PEERS:
        if only not in f"{peer.stored} {peer.package}":
            continue
        found = installed(peer.package)
        run = (lambda peer=peer, found=found: [compare(peer, found)]) if found else None
        yield peer.stored, peer.package, run


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="checks that have this text in the form or the package")
    parser.add_argument("--record", action="store_true", help="write bench/results/cross_checks.jsonl")
    args = parser.parse_args()
    rows, done = [("format", "peer", "values", "mismatches", "left", "")], []
    for what, package, run in checks(args.only):
        if run is None:
            rows.append((what, package, "-", "-", "-", "not installed"))
            continue
        for one in run():
            done.append(one)
            counts = (str(one.values), str(one.mismatches), str(one.left))
            rows.append((one.what, one.peer, *counts, one.note if one.mismatches else ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    wrong = [one for one in done if one.left]
    print(f"{len(done)} compared, {len(wrong)} with values left over")
    if args.record and done:
        write(result(one) for one in done)
    return 1 if wrong or not done else 0


def result(one: Checked) -> Result:
    """The line of a results file: values that are left over, and the mismatches that are explained."""
    case = f"{one.what}: {one.peer}" + (f"; {one.note}" if one.mismatches else "")
    peers = {"mismatches before that is followed": float(one.mismatches)} if one.mismatches else {}
    return Result("cross_checks", case, float(one.left), f"of {one.values} values", "lower", 0.0, peers)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
