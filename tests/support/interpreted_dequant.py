"""Runs the portable kernel under Triton's interpreter, in a process of its own.

`python interpreted_dequant.py [decode] [round] [outside] [steps] [every_step]`; all by default but the last,
which takes whole steps of every scheme where `steps` takes as few as have every format among them.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace

import language_once  # noqa: F401
import torch
import triton
import triton.language as tl
from error_model import bound_of, settled_rows
from made_experts import Arrival, activation_named, fresh_seed, make_scheme
from torch import Tensor

from moeserve.experts.batch import ExpertBatch, ExpertShape, Grouping
from moeserve.experts.kernel import KernelSpec
from moeserve.experts.kernels import triton_dequant
from moeserve.experts.kernels.torch_reference import TorchReference
from moeserve.experts.kernels.triton.decode import by_group, word_tile
from moeserve.experts.kernels.triton.dequant_gemm import stored_tile
from moeserve.experts.kernels.triton.dequant_step import (
    CUTS,
    FINE,
    WORD_CUTS,
    DequantRows,
    DequantStep,
    Side,
    cut_for,
)
from moeserve.experts.kernels.triton.stored import ROUNDINGS, Stored, product_dtype
from moeserve.experts.kernels.triton.words import holds, of_packed
from moeserve.experts.kernels.triton_dequant import UNREAD
from moeserve.quant.act_order import in_order
from moeserve.quant.bits import pack_nibbles, pack_sextets
from moeserve.quant.format import Format, Packed, Scheme
from moeserve.quant.formats import FORMATS
from moeserve.quant.formats.floats import BF16, FP32
from moeserve.quant.layouts.word_codes import WORDS
from moeserve.quant.schemes import SCHEMES, scheme_named

IN_WORDS = frozenset({"e2m1", "e3m2", "e2m3", "e4m3", "signed_int4"})
"""Elements that are read from words alone, as are integers of words that have zero points."""

COUNTS = (3, 0, 1)
N = K = 256


@triton.jit
def decode_kernel(
    codes, fine, zero, out, N, K, width, ELEMENT: tl.constexpr, WORDS: tl.constexpr, FINE: tl.constexpr,
    ROWS: tl.constexpr, SPAN: tl.constexpr, SUMS: tl.constexpr, ZERO: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """One tile of weights, fine scales included, as float32."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k0 = tl.program_id(1) * BK
    SCALED: tl.constexpr = FINE != "none" and not SUMS
    if WORDS:
        tile = word_tile(codes, fine, zero, n, k0, N, width, ELEMENT, SCALED, SPAN, ZERO, tl.float32, BN, BK)
    else:
        tile = stored_tile(codes, fine, zero, n, k0, N, K, ELEMENT, FINE, ROWS, SPAN, ZERO, SCALED, BN, BK)
    k = k0 + tl.arange(0, BK)
    if SUMS:
        tile *= by_group(fine, n // ROWS, n < N, k0, K, FINE, SPAN, BN, BK)
    tl.store(out + n[:, None] * K + k[None, :], tile.to(tl.float32), mask=(n < N)[:, None] & (k < K)[None, :])


def every_code(form: Format) -> Tensor:
    """Codes `[N, K]` of which each row has every one, but for NaN where a row is NaN with it."""
    column = torch.arange(K)[None, :] + torch.arange(N)[:, None]
    if form.bits == 4:
        return pack_nibbles(column % 16)
    if form.bits == 6:
        return pack_sextets(column % 64)
    if form.bits == 8:
        codes = (column % 256).to(torch.uint8)
        if form.dtype == torch.float8_e4m3fn:
            codes[1:] = codes[1:].masked_fill((codes[1:] & 127) == 127, 3)
        return codes.view(form.dtype)
    return (torch.randn(N, K) * 8).to(form.dtype)


def every_scale(form: Format) -> Packed:
    """A matrix in which every code meets every byte that a scale can be; float32 scales are random bf16."""
    parts = [every_code(form)]
    for part in form.parts[1:]:
        size = part.shape_of((N, K))
        rows = torch.arange(size[0])[:, None].expand(size)
        if part.name == "order":
            groups = torch.arange(K) // int(form.parts[1].columns)
            parts.append(groups[torch.randperm(K)][None].int())
        elif part.name == "zero":
            low = 0 if part.dtype == torch.uint8 else -128
            parts.append((rows % (17 if low == 0 else 256) + low).to(part.dtype).contiguous())
        elif part.dtype == torch.float32:
            parts.append((torch.randn(size).exp() * 1e-2).bfloat16().float())
        else:
            near = (rows + torch.arange(size[1]) % 3 * (rows < 250)).to(torch.uint8)
            parts.append(near.contiguous().view(part.dtype))
    return Packed(form, torch.Size((N, K)), tuple(parts))


def same(found: Tensor, wanted: Tensor) -> bool:
    """Equal value by value, NaN where NaN."""
    return torch.equal(found.nan_to_num(nan=12345.0), wanted.nan_to_num(nan=12345.0))


def side_of(packed: Packed, *, words: bool) -> Side:
    """A matrix as the only slot of a side."""
    stored = Stored.of(packed.format)
    stack = Packed(packed.format, torch.Size((1, *packed.shape)), tuple(part[None] for part in packed.parts))
    if words:
        return Side(stored, of_packed(stored, stack, torch.float32), words, None)
    names = (part.name for part in packed.format.parts)
    return Side(stored, dict(zip(names, stack.parts, strict=True)), words, None)


def decoded(side: Side, bn: int, bk: int) -> Tensor:
    """The values `[N, K]` of one matrix, tile by tile."""
    out, stored = torch.full((N, K), 7.0), side.stored
    fine = side.part(stored.fine.name if stored.fine else None)
    zero = side.part("zero" if stored.zero else None)
    decode_kernel[(N // bn, K // bk)](
        side.part("codes"), fine, zero, out, N, K, side.parts["codes"].shape[-1],
        WORDS[stored.element] if side.words else stored.element, side.words,
        FINE[stored.fine.dtype] if stored.fine else "none", stored.fine.rows if stored.fine else 1,
        stored.span, stored.blocks, stored.zero is not None, bn, bk,
    )  # fmt: skip
    if side.words:
        return out * side.parts["outer"][0][:, None]
    return out if stored.outer is None else out * side.parts[stored.outer.name][0]


def check_decode() -> None:
    """Every code of every format, with every scale, is what the format decodes it to; tiles by turns.

    Where words hold the codes, a row is NaN with any of them.
    """
    for at, form in enumerate(form for form in FORMATS.values() if form not in UNREAD):
        packed = every_scale(form)
        if any(part.name == "order" for part in form.parts):
            packed, _ = in_order(packed)
        stored = Stored.of(packed.format)
        in_words = holds(stored, torch.float32)
        as_stored = stored.element not in IN_WORDS and not (in_words and stored.zero is not None)
        for words in [False] * as_stored + [True] * in_words:
            found, wanted = (
                decoded(side_of(packed, words=words), *((64, 128), (128, 64))[at % 2]),
                packed.dequantize(),
            )
            if words:
                for values in (found, wanted):
                    values[values.isnan().any(1)] = torch.nan
            assert same(found, wanted), (form, words, (found - wanted).abs().max())


def ragged(rows: int, width: int) -> ExpertBatch:
    """All rows in two slots."""
    counts = torch.tensor([rows - 5, 5], dtype=torch.int32)
    offsets = torch.tensor([0, rows - 5, rows], dtype=torch.int32)
    tokens = Packed(FP32, torch.Size((rows, width)), (torch.zeros(rows, width),))
    return ExpertBatch(tokens, Grouping.RAGGED, counts, offsets)


def rows_to_round(width: int) -> Tensor:
    """Rows of many sizes, halves of steps, zeros, infinities of range, one value, and a NaN."""
    x = torch.randn(23, width) * torch.logspace(-12, 6, 23)[:, None]
    x[3] = 0
    x[4, : width // 2] = 0
    x[5] = torch.arange(width) / 2.0 - width // 4
    x[6] = 2.5
    x[7, 5] = float("nan")
    return x


def check_rounding() -> None:
    """Every activation format rounds rows of an odd width as its own encode and decode do."""
    given, width = torch.tensor([0.013, 0.21]), 133
    for form, how in ROUNDINGS.items():
        x, batch = rows_to_round(width), ragged(23, width)
        rounded = DequantStep(batch, 23, CUTS[0]).round(x, how, given if form.given else None, torch.float32)
        found, scale = rounded.values, rounded.scale
        if rounded.span >= 0 and scale is not None:
            wide = scale if rounded.span == 0 else scale.repeat_interleave(rounded.span, 1)[:, :width]
            found = found * wide
        wanted = (
            form.quantize(x).dequantize()
            if form.given is None
            else torch.cat(
                [
                    form.given(s).quantize(own).dequantize()
                    for s, own in zip(given, (x[:18], x[18:]), strict=True)
                ]
            )
        )
        close = torch.allclose(found, wanted, rtol=1e-6, atol=0, equal_nan=True)
        assert close, (form, (found - wanted).abs().nan_to_num().amax(1))


def error_of_step(
    scheme: Scheme, shape: ExpertShape, grouping: Grouping, wire: Format
) -> tuple[float, float]:
    """RMS error against the reference, amid rows of NaN, relative to the reference's RMS; and its bound."""
    generator = torch.Generator().manual_seed(fresh_seed())
    weights = make_scheme(shape, len(COUNTS), scheme, generator)
    arrival = Arrival(COUNTS, grouping, spare=3)
    rows = settled_rows(arrival.rows(shape.hidden, generator), scheme, wire, weights)
    batch = arrival.batch(rows, shape.hidden, wire)
    spec = KernelSpec(scheme, shape, torch.float32)
    found, wanted = (
        torch.cat(arrival.segments(kernel.apply(kernel.prepare(weights), batch), batch)).double()
        for kernel in (triton_dequant.TritonDequant(spec), TorchReference(spec))
    )
    carried = [wire.quantize(own).dequantize() for own in rows]
    entry = triton_dequant.ENTRY  # what is multiplied in float32 here has scales of bf16, also for fp16
    entry = replace(entry, rounded_products=dict.fromkeys(entry.rounded_products, BF16))
    bound = bound_of(entry, spec, weights, carried, wire)
    return float((found - wanted).norm() / wanted.norm()), bound


def interpreted_products(weights: Stored, activations: Format, fp8_products: frozenset[str]) -> torch.dtype:
    """The shipped choice with float32 for bf16, whose products the interpreter gets wrong, and in words."""
    dtype = product_dtype(weights, activations, fp8_products)
    return torch.float32 if dtype == torch.bfloat16 or holds(weights, dtype) else dtype


def covering(schemes: list[Scheme]) -> Iterator[Scheme]:
    """Few of `schemes`, with every format of weights and of rows: first those that bring two new ones."""
    seen: set[tuple[str, Format]] = set()
    for new, scheme in itertools.product((2, 1), schemes):
        brought = {("weights", scheme.weights), ("rows", scheme.activations)}
        if len(brought - seen) >= new:
            seen |= brought
            yield scheme


def check_steps() -> None:
    """Whole steps of schemes that have every format among them."""
    own = sorted(triton_dequant.ENTRY.schemes & set(SCHEMES.values()), key=str)
    check_whole(list(covering(own)))


def check_every_step() -> None:
    """Whole steps of every scheme, and of some with rows of fp16."""
    own, more = triton_dequant.ENTRY.schemes & set(SCHEMES.values()), triton_dequant.ENTRY.schemes
    check_whole(sorted(own, key=str) + sorted(more - own, key=str)[::6])


def check_whole(schemes: list[Scheme]) -> None:
    """Whole steps, groupings, biases and wires in turn; and over a block of an inner size without a gate."""
    triton_dequant.product_dtype = interpreted_products
    triton_dequant.fp8_products = lambda device: frozenset({"e4m3"})
    groupings = list(Grouping)
    for i, scheme in enumerate(schemes):
        shape = ExpertShape(133, 19, activation_named("silu"), bias=i % 3 == 0)
        wire = scheme.activations if scheme.activations.given is None and i % 4 < 2 else FP32
        error, bound = error_of_step(scheme, shape, groupings[i % 2], wire)
        assert error <= bound, (scheme, error, bound)
    for name in ("swigluoai", "relu2_no_mul"):
        shape = ExpertShape(32, 130, activation_named(name), bias=True)
        error, bound = error_of_step(scheme_named("nvfp4 x bf16"), shape, Grouping.RAGGED, BF16)
        assert error <= bound, (name, error, bound)


def check_outside() -> None:
    """Rows outside the segments are not written, by any cut."""
    shape = ExpertShape(64, 32, activation_named("silu"))
    weights = make_scheme(shape, 2, Scheme(BF16, BF16), torch.Generator().manual_seed(0))
    for cut in CUTS:
        batch = replace(ragged(12, 64), counts=torch.tensor([4, 2], dtype=torch.int32))
        step = DequantStep(batch, 12, cut)
        x = torch.ones(12, 64, dtype=torch.bfloat16)
        side = Side(Stored.of(BF16), {"codes": weights.gate_up.parts[0]}, words=False, bias=None)
        torch.use_deterministic_algorithms(mode=True)  # torch.empty is NaN then
        out = step.gemm(DequantRows(x), side, 64, torch.float32)
        torch.use_deterministic_algorithms(mode=False)
        written = (~out.isnan()).any(1).tolist()
        assert written == [r < 4 or 7 <= r < 9 for r in range(12)], (cut, written)


CHECKS = {"decode": check_decode, "round": check_rounding, "steps": check_steps, "outside": check_outside}
EVERY_STEP = {"every_step": check_every_step}


def main() -> None:
    torch.manual_seed(fresh_seed())
    for name in sys.argv[1:] or CHECKS:
        (CHECKS | EVERY_STEP)[name]()
    for words, cuts in ((False, CUTS), (True, WORD_CUTS)):
        assert (cut_for(1.0, words=words), cut_for(4096, words=words)) == (cuts[0], cuts[-1])
    print("checked", file=sys.stderr)


if __name__ == "__main__":
    main()
