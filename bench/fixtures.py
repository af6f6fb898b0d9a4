"""Loads checkpoints that real producers wrote and compares every expert weight with the formats' formulas.

    python bench/fixtures.py --fixtures FOLDER [--sources FOLDER/bf16]

FOLDER holds checkpoint directories at any depth. The formulas below are written from the formats'
definitions, over the stored bytes and without moeserve; weights must equal them bit for bit, whole and cut in
two slices. Where `--sources` has a directory whose name starts the checkpoint's, up to the first "-", weights
must also be as near to that unquantized model as the format is known to bring them. Exit status 1 if not.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from moeserve.experts.checkpoint import Checkpoint, CheckpointError

Tensors = Mapping[str, Tensor]

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble

KNOWN_ERROR = {"bf16": 0.0, "fp8": 0.0275, "mxfp8": 0.0275, "int8": 0.01, "nvfp4": 0.097, "mxfp4": 0.12}
KNOWN_ERROR |= {"int4": 0.165}
"""Largest relative error of a tensor, norm over norm, of random weights after each producer's rounding."""

EXPERT = re.compile(r".*\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(w[123]|(?:gate|up|down)_proj)\.(.+)")
ROLES = {"w1": 0, "w3": 1, "w2": 2, "gate_proj": 0, "up_proj": 1, "down_proj": 2}


def low_first(words: Tensor, bits: int) -> Tensor:
    """Codes of integers packed along the last dimension, lowest bits first."""
    width = words.element_size() * 8 // bits
    each = [(words >> (bits * place)) & ((1 << bits) - 1) for place in range(width)]
    return torch.stack(each, dim=-1).flatten(-2)


def spread(scale: Tensor, like: Tensor) -> Tensor:
    """`scale` repeated over its blocks to the shape of `like`."""
    if scale.dim() != 2:  # [N], or [N / 128, 1, K / 128, 1]
        scale = scale[:, None] if scale.dim() == 1 else scale[:, 0, :, 0]
    scale = scale.float()
    rows, columns = (-(-size // count) for size, count in zip(like.shape, scale.shape, strict=True))
    if columns > 1 and rows > 1:
        rows = columns = 128
    wide = scale.repeat_interleave(rows, 0)[: like.shape[0]]
    return wide.repeat_interleave(columns, 1)[:, : like.shape[1]]


def power(byte: Tensor) -> Tensor:
    """2^(byte - 127)."""
    return torch.exp2(byte.float() - 127)


def fp8(t: Tensors) -> Tensor:
    scale = t.get("weight_scale", t.get("weight_scale_inv"))
    values = t["weight"].float()
    if scale is None:
        raise KeyError("weight_scale")
    if scale.dtype == torch.uint8:
        return values * spread(power(scale), values)
    return values * (scale.float() if scale.numel() == 1 else spread(scale, values))


def nvfp4(t: Tensors) -> Tensor:
    codes = E2M1[low_first(t["weight_packed" if "weight_packed" in t else "weight"], 4).long()]
    scaled = codes * spread(t["weight_scale"], codes)
    return scaled / t["weight_global_scale"] if "weight_global_scale" in t else scaled * t["weight_scale_2"]


def mxfp4(t: Tensors) -> Tensor:
    codes = E2M1[low_first(t["weight_packed" if "weight_packed" in t else "weight"], 4).long()]
    return codes * spread(power(t["weight_scale" if "weight_scale" in t else "scale"]), codes)


def packed(t: Tensors) -> Tensor:
    rows, columns = t["weight_shape"].tolist()
    bits = 32 * t["weight_packed"].shape[1] // columns
    codes = low_first(t["weight_packed"], bits)[:, :columns]
    scale = t["weight_scale"].float()
    group = columns // scale.shape[1]
    groups = t["weight_g_idx"].long() if "weight_g_idx" in t else torch.arange(columns) // group
    zero = torch.full(scale.shape, 1 << (bits - 1))
    if "weight_zero_point" in t:
        zero = low_first(t["weight_zero_point"].mT.contiguous(), bits).mT[:rows]
    return (codes - zero[:, groups]).float() * scale[:, groups]


def gptq(t: Tensors, less: int) -> Tensor:
    groups = t["g_idx"].long()
    bits = 32 * t["qweight"].shape[0] // groups.numel()
    codes = low_first(t["qweight"].mT.contiguous(), bits)
    zero = (low_first(t["qzeros"], bits) + less).mT
    return (codes - zero[:, groups]).float() * t["scales"].float().mT[:, groups]


def awq(t: Tensors) -> Tensor:
    places = torch.tensor(AWQ_ORDER).argsort()
    codes, zero = (low_first(t[name], 4) for name in ("qweight", "qzeros"))
    codes, zero = (each.view(each.shape[0], -1, 8)[..., places].flatten(1) for each in (codes, zero))
    groups = torch.arange(codes.shape[0]) // (codes.shape[0] // zero.shape[0])
    values: Tensor = (codes - zero[groups]).float() * t["scales"].float()[groups]
    return values.mT


def formula(t: Tensors, config: Mapping[str, object]) -> tuple[str, Tensor]:
    """The number's name in KNOWN_ERROR, and the matrix that the tensors of a projection mean."""
    kinds: list[tuple[bool, str, Callable[[Tensors], Tensor]]] = [
        ("weight_global_scale" in t or "weight_scale_2" in t, "nvfp4", nvfp4),
        ("weight_shape" in t, "int4", packed),
        ("g_idx" in t, "int4", lambda t: gptq(t, int(config.get("checkpoint_format") != "gptq_v2"))),
        ("qzeros" in t, "int4", awq),
        (t.get("weight", t.get("weight_packed", E2M1)).dtype == torch.uint8, "mxfp4", mxfp4),
        ("weight_scale" in t or "weight_scale_inv" in t, "fp8", fp8),
        ("weight" in t, "bf16", lambda t: t["weight"].float()),
    ]
    name, compute = next((name, compute) for fits, name, compute in kinds if fits)
    if "weight" in t and t["weight"].dtype == torch.int8:
        name = "int8"
    return name, compute(t)


def matrices(path: Path) -> Iterator[tuple[int, int, str, Tensor, Tensor]]:
    """Layer, expert, number, gate_up and down of every expert, by formula."""
    config = json.loads((path / "config.json").read_text()).get("quantization_config") or {}
    found: dict[tuple[int, int], dict[int, dict[str, Tensor]]] = {}
    for file in sorted(path.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if match := EXPERT.fullmatch(name):
                layer, expert, projection, suffix = match.groups()
                roles = found.setdefault((int(layer), int(expert)), {})
                roles.setdefault(ROLES[projection], {})[suffix] = tensor
    for (layer, expert), roles in sorted(found.items()):
        (name, gate), (_, up), (_, down) = (formula(roles[role], config) for role in range(3))
        yield layer, expert, name, torch.cat((gate, up)), down


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
    for layer, expert, name, *expected in matrices(path):
        number, place = name, (layer, expert)
        if not whole_is_exact(checkpoint, place, expected):
            wrong = wrong or f"layer {layer} expert {expert} differs from the formula"
        if halves and not slices_are_exact(checkpoint, place, expected):
            wrong = wrong or f"slices of layer {layer} expert {expert} differ from the formula"
        errors += [] if plain is None else distances(checkpoint, plain, place)
    if not number:
        wrong = "none of its experts has tensors of its own; stacked ones have no formula here"
    elif errors and max(errors) > KNOWN_ERROR[number]:
        wrong = wrong or f"relative error {max(errors):.4f} is above the known {KNOWN_ERROR[number]}"
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
