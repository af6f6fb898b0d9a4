"""Orders of the rows of gate and up in one matrix; the canonical one is all of gate, then all of up.

Codes and scales are moved alike; a scale of the whole matrix stays. Scales of 128x128 blocks can only be
exchanged by halves, and only where the halves are whole blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeserve.quant.format import WHOLE, Format, Part
from moeserve.quant.formats import FORMATS
from moeserve.quant.layout import Rearrangement, TensorMove, must_divide
from moeserve.quant.layouts.rows import Alternated, Exchanged, Separated

BY_ROWS = frozenset(form for form in FORMATS.values() if all(p.rows in (1, WHOLE) for p in form.parts))
"""Formats whose rows can be put into any order."""

CUTE_GROUP = 64


def _in_order(name: str, formats: frozenset[Format], order: Sequence[TensorMove]) -> Rearrangement:
    def moves(part: Part, shape: torch.Size) -> Sequence[TensorMove]:
        if part.rows == WHOLE:
            return ()
        must_divide("rows", shape[-2], 2 * part.rows)  # a block across both halves belongs to neither
        return order

    return Rearrangement(name, formats, moves)


UP_GATE = _in_order("up_gate", frozenset(FORMATS.values()), (Exchanged(),))
"""Up above gate, `w31`: FlashInfer's CUTLASS and TensorRT-LLM kernels."""

GATE_UP_BY_TURNS = _in_order("gate_up_by_turns", BY_ROWS, (Alternated(),))
"""g0, u0, g1, u1, ...: gpt-oss' own order, and that of the Triton MXFP4 kernels."""

UP_GATE_BY_TURNS = _in_order("up_gate_by_turns", BY_ROWS, (Exchanged(), Alternated()))
"""u0, g0, u1, g1, ...: TensorRT-LLM's MXFP4; gpt-oss' rows, each pair exchanged."""

FROM_TURNS = _in_order("from_turns", BY_ROWS, (Separated(),))
"""A matrix stored g0, u0, g1, u1, ... as gate above up: what de-interleaves a gpt-oss checkpoint."""

UP_GATE_BY_64 = _in_order("up_gate_by_64", BY_ROWS, (Exchanged(), Alternated(CUTE_GROUP)))
"""64 rows of up, 64 of gate, and so on: FlashInfer's CuTe DSL kernels."""

ENTRIES = (UP_GATE, GATE_UP_BY_TURNS, UP_GATE_BY_TURNS, FROM_TURNS, UP_GATE_BY_64)
