"""The numeric reference: plain torch, slot by slot, float32 throughout; it judges every other kernel.

It computes any pair of formats that decode themselves, and serves quantized weights on a CPU. An active
expert's weights are decoded once a step, however many rows it has, and not kept, so that they stay as small
as in the checkpoint. `counts` and `offsets` are read on the host: no CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import torch
from torch import Tensor

from moeserve.experts.activation import ACTIVATIONS, NO_GATED_FORM
from moeserve.experts.batch import ExpertBatch, ExpertWeights, Grouping
from moeserve.experts.kernel import KernelEntry, KernelSpec, Prepared
from moeserve.quant.format import Format, Packed, Scheme
from moeserve.quant.formats import FORMATS, WIRES
from moeserve.quant.formats.floats import FLOATS
from moeserve.quant.schemes import SCHEMES

ROW_WISE = frozenset(WIRES.values())

TORCH_ARCHS = frozenset(
    [
        "cpu",
        *(f"sm{v}" for v in (70, 75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121)),
        "gfx90a",
        "gfx942",
        "gfx950",
    ]
)
"""Where plain torch operations run."""

COMPUTED = frozenset(ACTIVATIONS) - NO_GATED_FORM


class TorchReference:
    """`down(activation(gate_up(x)))` of each row in float32, each GEMM's input rounded as the scheme says."""

    def __init__(self, spec: KernelSpec) -> None:
        self._spec = spec

    def prepare(self, weights: ExpertWeights) -> Prepared:
        """The canonical tensors, as they are stored. ValueError: they do not fit the kernel's spec."""
        return Prepared(self._spec.fit(weights).tensors())

    def apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
        """RAGGED -> `[Rmax, H]`, PADDED -> `[e, C, H]`; rows outside the segments are uninitialised."""
        shape = batch.tokens.shape
        rows = _flat(batch.tokens)
        outputs = torch.empty(rows.shape, dtype=self._spec.out_dtype, device=rows.device)
        segments = zip(batch.offsets.tolist(), batch.counts.tolist(), strict=False)  # offsets have one more
        for slot, (start, count) in enumerate(segments):
            if count:
                own = slice(start, start + count)
                outputs[own] = self._expert(prepared.slot(slot), rows.rows(own))
        return outputs.view(shape)

    def _expert(self, slot: Mapping[str, Tensor], rows: Packed) -> Tensor:
        spec = self._spec
        shape, activations = spec.shape, spec.scheme.activations
        gate_up = _decoded(spec.scheme.weights, slot, "gate_up", (shape.gate_up_rows, shape.hidden))
        down = _decoded(spec.scheme.weights, slot, "down", (shape.hidden, shape.inner))
        values = rows.dequantize()
        x = values if rows.format == activations else _rounded(values, activations, slot.get("input_scale"))
        between = x @ gate_up.T
        if shape.bias:
            between += slot["gate_up_bias"]
        inner = shape.activation.apply(between)
        y = _rounded(inner, activations, slot.get("inner_scale")) @ down.T
        return y + slot["down_bias"] if shape.bias else y


def _flat(tokens: Packed) -> Packed:
    """PADDED rows `[e, C, H]` as `[e * C, H]`; RAGGED rows are so already."""
    if len(tokens.shape) == 2:
        return tokens
    rows, width = tokens.shape[:2].numel(), tokens.shape[-1]
    return Packed(
        tokens.format, torch.Size((rows, width)), tuple(part.flatten(0, 1) for part in tokens.parts)
    )


def _decoded(form: Format, slot: Mapping[str, Tensor], side: str, shape: tuple[int, int]) -> Tensor:
    parts = tuple(slot[f"{side}.{part.name}"] for part in form.parts)
    return Packed(form, torch.Size(shape), parts).dequantize()


def _rounded(values: Tensor, form: Format, scale: Tensor | None) -> Tensor:
    """`values` quantized and back; a static format takes its scale from the expert."""
    if form.given is not None and scale is not None:
        form = form.given(scale)
    return form.quantize(values).dequantize()


ENTRY = KernelEntry(
    name="torch_reference",
    build=TorchReference,
    schemes=frozenset(SCHEMES.values())
    | {Scheme(w, a) for w, a in product(FORMATS.values(), FLOATS.values())},
    eats=ROW_WISE,
    groupings=frozenset(Grouping),
    activations=COMPUTED,
    archs=TORCH_ARCHS,
    reference=True,
    verified=("cpu", "sm90"),
)
