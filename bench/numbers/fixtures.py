"""Loads checkpoints that real producers wrote and compares every expert weight with the formats' formulas.

    python -m bench.numbers.fixtures --fixtures FOLDER [--sources FOLDER/bf16]

FOLDER holds checkpoint directories at any depth. Weights must equal what `bench/numbers/formulas.py`
computes from the stored bytes, bit for bit, whole and cut in two slices. Where `--sources` has a directory
whose name the checkpoint's begins with, up to the first "-", weights must also be as near to that unquantized
model as the format is known to bring them. Exit status 1 if not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

from bench.numbers.formulas import KNOWN_ERROR, experts
from moeserve.checkpoints.checkpoint import Checkpoint, CheckpointError

GPTQ = 1.5
"""How much more a weight may move where GPTQ rounds: it keeps outputs, not weights."""


def whole_is_exact(checkpoint: Checkpoint, place: tuple[int, int], expected: list[Tensor]) -> bool:
    """Whether an expert, read whole, has the expected gate_up and down."""
    read = checkpoint.experts(place[0], [place[1]])
    found = read.gate_up.dequantize()[0], read.down.dequantize()[0]
    return all(map(torch.equal, found, expected))


def slices_are_exact(checkpoint: Checkpoint, place: tuple[int, int], expected: list[Tensor]) -> bool:
    """Whether two slices of an expert are its halves; with activation order, whether they add up to it."""
    half, (gate, up) = checkpoint.inner // 2, expected[0].chunk(2)
    pieces = [checkpoint.experts(place[0], [place[1]], part=(index, 2)) for index in range(2)]
    rows = [piece.gate_up.dequantize()[0] for piece in pieces]
    downs = [piece.down.dequantize()[0] for piece in pieces]
    if pieces[0].down.format.parts[-1].name == "order":
        sums = sum(d.double() @ r[:half].double() for d, r in zip(downs, rows, strict=True))
        return torch.allclose(torch.as_tensor(sums), expected[1].double() @ gate.double(), rtol=1e-12)
    cut = (torch.cat((gate[own], up[own])) for own in (slice(half), slice(half, None)))
    return all(map(torch.equal, rows, cut)) and torch.equal(torch.cat(downs, dim=1), expected[1])


def distances(checkpoint: Checkpoint, source: Checkpoint, place: tuple[int, int]) -> list[float]:
    """Relative error of an expert's gate_up and down against an unquantized model."""
    ours, theirs = (each.experts(place[0], [place[1]]) for each in (checkpoint, source))
    pairs = (
        (packed.dequantize(), truth.dequantize())
        for packed, truth in ((ours.gate_up, theirs.gate_up), (ours.down, theirs.down))
    )
    return [((values - truth).norm() / truth.norm()).item() for values, truth in pairs]


def sliceable(checkpoint: Checkpoint) -> bool:
    """Whether two slices cut no block."""
    try:
        return all(checkpoint.shape(layer, 2).inner for layer in checkpoint.layers)
    except ValueError:
        return False


def check(path: Path, source: Path | None) -> tuple[list[str], str | None]:
    """A row of the table, and what is wrong."""
    checkpoint = Checkpoint(path)
    plain, halves = Checkpoint(source) if source is not None else None, sliceable(checkpoint)
    errors: list[float] = []
    number, wrong = "", None
    for one in experts(path):
        number, place, expected = one.kind, (one.layer, one.expert), [one.gate_up, one.down]
        if not whole_is_exact(checkpoint, place, expected):
            wrong = wrong or f"layer {one.layer} expert {one.expert} differs from the formula"
        if halves and not slices_are_exact(checkpoint, place, expected):
            wrong = wrong or f"slices of layer {one.layer} expert {one.expert} differ from the formula"
        errors += [] if plain is None else distances(checkpoint, plain, place)
    if not number:
        wrong = "it has no expert tensors that a formula is known for"
    elif errors and max(errors) > (known := KNOWN_ERROR[number] * (GPTQ if "gptq" in path.name else 1)):
        wrong = wrong or f"relative error {max(errors):.4f} is above the known {known:.4f}"
    scheme = checkpoint.scheme(checkpoint.layers[0])
    error = f"{sum(errors) / len(errors):.4f} {max(errors):.4f}" if errors else "-"
    row = [path.name, checkpoint.dialect.name, str(scheme), "yes" if wrong is None else "NO", error]
    return row, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--fixtures", type=Path, required=True, help="folder of checkpoint directories")
    parser.add_argument("--sources", type=Path, help="folder of unquantized models; FIXTURES/bf16 by default")
    args = parser.parse_args()
    sources = args.sources or args.fixtures / "bf16"
    rows, bad = [["checkpoint", "dialect", "scheme", "exact", "error against source (mean, max)"]], 0
    for config in sorted(args.fixtures.rglob("config.json")):
        path = config.parent
        source = sources / path.name.split("-")[0]
        try:
            row, wrong = check(path, source if source.is_dir() and source != path else None)
        except (CheckpointError, KeyError, ValueError) as error:
            row, wrong = [path.name, "-", "-", "NO", "-"], str(error)
        rows.append(row)
        if wrong is not None:
            bad += 1
            print(f"{path}: {wrong}", file=sys.stderr)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(f"{len(rows) - 1} checkpoints, {bad} wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
