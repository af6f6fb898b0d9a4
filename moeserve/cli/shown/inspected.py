"""The output of `moeserve inspect`: a summary of layers, routing and ranks, as text or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moeserve.checkpoints.checkpoint import CONFIG, Checkpoint
from moeserve.checkpoints.store import values_of
from moeserve.cli.shown.inspect_excluded import brief, excluded_modules
from moeserve.cli.shown.units import human, ranges
from moeserve.experts.placement import EMPTY, Placement
from moeserve.experts.routing.families import gate_for
from moeserve.experts.routing.gate import Gate
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


@dataclass(frozen=True)
class LayerSummary:
    """The experts of one layer; layers with equal summaries share a line of the table."""

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
    """What a rank of an expert-parallel group holds: experts of each layer, and bytes over all layers."""

    rank: int
    experts: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Inspected:
    """A summary of a checkpoint's experts, from its config and headers."""

    checkpoint: Checkpoint
    gate: Gate
    layers: dict[int, LayerSummary]  # by decoder layer
    ranks: list[RankSummary]

    @classmethod
    def of(cls, checkpoint: Checkpoint, ranks: int) -> Inspected:
        """Makes the summary; reads no weights. Raises CheckpointError, or ValueError for a router."""
        layers = {layer: _layer(checkpoint, layer) for layer in checkpoint.layers}
        with values_of(checkpoint.path / CONFIG):
            gate = gate_for(checkpoint.config)
        return cls(checkpoint, gate, layers, _ranks(checkpoint, ranks))

    @property
    def nbytes(self) -> int:
        """Bytes of all experts of all layers."""
        return sum(summary.layer_nbytes for summary in self.layers.values())

    def json(self) -> dict[str, Any]:
        """Returns the summary as JSON values."""
        checkpoint = self.checkpoint
        return {
            "checkpoint": str(checkpoint.path),
            "architecture": checkpoint.architecture,
            "model_type": checkpoint.model_type,
            "dialect": checkpoint.dialect.name,
            "dtype": str(checkpoint.dtype).removeprefix("torch."),
            "excluded": excluded_modules(checkpoint.quantization),
            "routing": _routing(self.gate),
            "by_token": _by_token(checkpoint),
            "layers": [{"layer": layer} | asdict(summary) for layer, summary in self.layers.items()],
            "nbytes": self.nbytes,
            "ranks": [asdict(rank) for rank in self.ranks],
        }

    def text(self) -> str:
        """Returns the summary as text: three tables."""
        checkpoint, dtype = self.checkpoint, str(self.checkpoint.dtype).removeprefix("torch.")
        head = [
            ("checkpoint", str(checkpoint.path)),
            ("architecture", f"{checkpoint.architecture} ({checkpoint.model_type})"),
            ("dialect", f"{checkpoint.dialect.name}, model dtype {dtype}"),
            ("routing", _routing_line(self.gate)),
            ("experts", f"{human(self.nbytes)} in {len(self.layers)} layers"),
        ]
        if by_token := _by_token(checkpoint):
            head.insert(4, ("by token id", f"layers {ranges(by_token)}: a table chooses experts, not logits"))
        if checkpoint.quantization is not None:
            head.append(("excluded", brief(excluded_modules(checkpoint.quantization))))
        sections = [columns(head), columns(_layer_rows(self.layers)), columns(_rank_rows(self.ranks))]
        return "\n\n".join(sections)


def columns(rows: Sequence[tuple[str, ...]]) -> str:
    """Formats a table as text; every column is as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in padded)


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
    held = (tuple(int(e) for e in placement.of_owner(0, rank) if e != EMPTY) for rank in range(count))
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
    return {name: getattr(gate, name) for name in (*names, "weight_on_input", "by_model")}


def _by_token(checkpoint: Checkpoint) -> list[int]:
    """Returns the layers whose experts a table chooses by token id."""
    return [layer for layer in checkpoint.layers if checkpoint.family.by_token(checkpoint.config, layer)]


def _routing_line(gate: Gate) -> str:
    if gate.by_model:
        return f"top {gate.top_k} of {gate.experts}; takes ids and weights, not logits: {gate.by_model}"
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
