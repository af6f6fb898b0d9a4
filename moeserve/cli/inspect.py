"""`moeserve inspect CHECKPOINT`: what a checkpoint holds, by its config and headers.

Weights are read only to compare them with another checkpoint's, `--against`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moeserve.checkpoints.checkpoint import Checkpoint, CheckpointError
from moeserve.cli.inspect_against import errors_against, errors_json, errors_rows
from moeserve.cli.inspect_excluded import brief, excluded_modules
from moeserve.experts.placement import EMPTY, Placement
from moeserve.experts.routing.gate import Gate, gate_for
from moeserve.quant.format import WHOLE, Format

LAYER_COLUMNS = (
    "layers",
    "experts",
    "hidden",
    "inner",
    "activation",
    "weights",
    "group",
    "activations",
    "an expert",
    "a layer",
)
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class LayerSummary:
    """One layer's experts; layers that are equal but for their index share a row."""

    experts: int
    hidden: int
    inner: int
    activation: str
    bias: bool
    weights: str  # a number format
    group: str  # what shares the finest scale: 128x128, 1x16, row, matrix; - where there is none
    activations: str
    expert_nbytes: int
    layer_nbytes: int


@dataclass(frozen=True)
class RankSummary:
    """What one rank of an expert-parallel group holds: experts of each layer, and bytes of all layers."""

    rank: int
    experts: tuple[int, ...]
    nbytes: int


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand; its `func` is `run`."""
    about = "show layers, experts, shapes, scheme, excluded modules, routing and bytes of a checkpoint"
    parser = subparsers.add_parser("inspect", help=about, description=about)
    parser.add_argument("checkpoint", help="folder with config.json and safetensors")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="spread whole experts over N ranks")
    parser.add_argument(
        "--against",
        metavar="REFERENCE",
        help="the same model unquantized: relative error of each layer's experts; reads all their weights",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Prints the checkpoint's summary; 1 if it cannot be served, with the reason on stderr."""
    try:
        if args.ranks < 1:
            raise ValueError(f"--ranks={args.ranks} must be 1 or more")
        checkpoint = Checkpoint(args.checkpoint)
        layers = {layer: _layer(checkpoint, layer) for layer in checkpoint.layers}
        ranks = _ranks(checkpoint, args.ranks)
        gate = gate_for(checkpoint.config)
        errors = errors_against(checkpoint, args.against) if args.against else []
    except (CheckpointError, ValueError) as error:
        print(f"moeserve inspect: {error}", file=sys.stderr)
        return 1
    if args.json:
        found = _json(checkpoint, gate, layers, ranks)
        print(
            json.dumps(found | ({"against": errors_json(args.against, errors)} if errors else {}), indent=2)
        )
        return 0
    print(_text(checkpoint, gate, layers, ranks))
    if errors:
        print(f"\nrelative error against {args.against}\n{_columns(errors_rows(errors))}")
    return 0


def human(nbytes: int) -> str:
    """Bytes in the largest unit that leaves a number of one or more: `1536` -> `1.5 KiB`."""
    size, unit = float(nbytes), UNITS[0]
    for unit in UNITS:
        if size < 1024 or unit == UNITS[-1]:
            break
        size /= 1024
    return f"{size:.0f} {unit}" if size == round(size) else f"{size:.1f} {unit}"


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges: `[0, 1, 2, 5]` -> `0-2, 5`; `none` if empty."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) or "none"


def _layer(checkpoint: Checkpoint, layer: int) -> LayerSummary:
    shape, scheme, nbytes = checkpoint.shape(layer), checkpoint.scheme(layer), checkpoint.expert_nbytes(layer)
    return LayerSummary(
        experts=checkpoint.num_experts,
        hidden=shape.hidden,
        inner=shape.inner,
        activation=shape.activation.name,
        bias=shape.bias,
        weights=scheme.weights.name,
        group=_group(scheme.weights),
        activations=scheme.activations.name,
        expert_nbytes=nbytes,
        layer_nbytes=nbytes * checkpoint.num_experts,
    )


def _group(form: Format) -> str:
    if len(form.parts) == 1:
        return "-"
    rows, columns = form.block
    if columns == WHOLE:
        return "matrix" if rows == WHOLE else "row"
    return f"{rows}x{columns}"


def _ranks(checkpoint: Checkpoint, count: int) -> list[RankSummary]:
    placement = Placement.even(1, checkpoint.num_experts, count)
    each = sum(checkpoint.expert_nbytes(layer) for layer in checkpoint.layers)
    held = (tuple(int(e) for e in placement.of_rank(0, rank) if e != EMPTY) for rank in range(count))
    return [RankSummary(rank, experts, len(experts) * each) for rank, experts in enumerate(held)]


def _routing(gate: Gate) -> dict[str, Any]:
    names = (
        "method",
        "scoring",
        "top_k",
        "experts",
        "renormalize",
        "biased",
        "groups",
        "topk_groups",
        "scaling",
    )
    return {name: getattr(gate, name) for name in (*names, "weight_on_input")}


def _by_token(checkpoint: Checkpoint) -> list[int]:
    """Layers whose experts a table chooses by token id."""
    return [layer for layer in checkpoint.layers if checkpoint.family.by_token(checkpoint.config, layer)]


def _json(
    checkpoint: Checkpoint, gate: Gate, layers: dict[int, LayerSummary], ranks: list[RankSummary]
) -> dict[str, Any]:
    return {
        "checkpoint": str(checkpoint.path),
        "architecture": checkpoint.architecture,
        "model_type": checkpoint.model_type,
        "dialect": checkpoint.dialect.name,
        "dtype": str(checkpoint.dtype).removeprefix("torch."),
        "excluded": excluded_modules(checkpoint.quantization),
        "routing": _routing(gate),
        "by_token": _by_token(checkpoint),
        "layers": [{"layer": layer} | asdict(summary) for layer, summary in layers.items()],
        "nbytes": sum(summary.layer_nbytes for summary in layers.values()),
        "ranks": [asdict(rank) for rank in ranks],
    }


def _text(
    checkpoint: Checkpoint, gate: Gate, layers: dict[int, LayerSummary], ranks: list[RankSummary]
) -> str:
    total = sum(summary.layer_nbytes for summary in layers.values())
    head = [
        ("checkpoint", str(checkpoint.path)),
        ("architecture", f"{checkpoint.architecture} ({checkpoint.model_type})"),
        ("dialect", f"{checkpoint.dialect.name}, model dtype {str(checkpoint.dtype).removeprefix('torch.')}"),
        ("routing", _routing_line(gate)),
        ("experts", f"{human(total)} in {len(layers)} layers"),
    ]
    if by_token := _by_token(checkpoint):
        head.insert(4, ("by token id", f"layers {ranges(by_token)}: a table chooses experts, not logits"))
    if checkpoint.quantization is not None:
        head.append(("excluded", brief(excluded_modules(checkpoint.quantization))))
    sections = [_columns(head), _columns(_layer_rows(layers)), _columns(_rank_rows(ranks))]
    return "\n\n".join(sections)


def _routing_line(gate: Gate) -> str:
    settings = [f"{gate.method} ({gate.scoring}), top {gate.top_k} of {gate.experts}"]
    settings += ["renormalized"] * bool(gate.renormalize) + ["correction bias"] * bool(gate.biased)
    settings += [f"{gate.topk_groups} of {gate.groups} groups"] * (gate.groups > 1)
    settings += [f"scaled by {gate.scaling:g}"] * (gate.scaling != 1)
    return ", ".join(settings + ["weight on the input"] * gate.weight_on_input)


def _layer_rows(layers: dict[int, LayerSummary]) -> list[tuple[str, ...]]:
    alike: dict[LayerSummary, list[int]] = {}
    for layer, summary in layers.items():
        alike.setdefault(summary, []).append(layer)
    rows: list[tuple[str, ...]] = [LAYER_COLUMNS]
    for row, same in alike.items():
        sizes = (str(row.experts), str(row.hidden), str(row.inner))
        how = (row.activation + (" + bias" if row.bias else ""), row.weights, row.group, row.activations)
        rows.append((ranges(same), *sizes, *how, human(row.expert_nbytes), human(row.layer_nbytes)))
    return rows


def _rank_rows(ranks: list[RankSummary]) -> list[tuple[str, ...]]:
    rows = [(str(rank.rank), ranges(rank.experts), human(rank.nbytes)) for rank in ranks]
    return [("rank", "experts of each layer", "bytes"), *rows]


def _columns(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in padded)
