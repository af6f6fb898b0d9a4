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

import torch
import triton
import triton.language as tl
from made_experts import Arrival, activation_named, fresh_seed, make_scheme
from torch import Tensor

from moeserve.experts.batch import ExpertBatch, ExpertShape, Grouping
from moeserve.experts.kernel import KernelSpec
from moeserve.experts.kernels import triton_dequant
from moeserve.experts.kernels.device.dequant_gemm import weights_tile
from moeserve.experts.kernels.device.dequant_step import CUTS, FINE, Rows, Side, Step, cut_for
from moeserve.experts.kernels.stored import ROUNDINGS, Stored, product_dtype
from moeserve.experts.kernels.torch_reference import TorchReference
from moeserve.quant.bits import pack_nibbles, pack_sextets
from moeserve.quant.format import Format, Packed, Scheme
from moeserve.quant.formats import FORMATS
from moeserve.quant.formats.floats import BF16, FP16, FP32
from moeserve.quant.schemes import SCHEMES, scheme_named

COUNTS = (3, 0, 1)
N = K = 256


@triton.jit
def decode_kernel(
    codes, fine, zero, order, out, N, K, ELEMENT: tl.constexpr, FINE: tl.constexpr, ROWS: tl.constexpr,
    SPAN: tl.constexpr, ZERO: tl.constexpr, ORDERED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of weights, fine scales included, as float32."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k0 = tl.program_id(1) * BK
    tile = weights_tile(
        codes, fine, zero, order, n, k0, N, K, ELEMENT, FINE, ROWS, SPAN, ZERO, ORDERED, FINE != "none",
        BN, BK,
    )  # fmt: skip
    k = k0 + tl.arange(0, BK)
    tl.store(out + n[:, None] * K + k[None, :], tile.to(tl.float32), mask=(n < N)[:, None] & (k < K)[None, :])


def every_code(form: Format) -> Tensor:
    """Codes `[N, K]` of which each row has every one."""
    column = torch.arange(K)[None, :] + torch.arange(N)[:, None]
    if form.bits == 4:
        return pack_nibbles(column % 16)
    if form.bits == 6:
        return pack_sextets(column % 64)
    if form.bits == 8:
        return (column % 256).to(torch.uint8).view(form.dtype)
    return (torch.randn(N, K) * 8).to(form.dtype)


def every_scale(form: Format) -> Packed:
    """A matrix in which every code meets every byte that a scale can be; float32 scales are random."""
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
            parts.append(torch.randn(size).exp() * 1e-2)
        else:
            parts.append(rows.to(torch.uint8).contiguous().view(part.dtype))
    return Packed(form, torch.Size((N, K)), tuple(parts))


def same(found: Tensor, wanted: Tensor) -> bool:
    """Equal value by value, NaN where NaN."""
    return torch.equal(found.nan_to_num(nan=12345.0), wanted.nan_to_num(nan=12345.0))


def check_decode() -> None:
    """Every code of every format, with every scale, is what the format decodes it to; tiles by turns."""
    for at, form in enumerate(form for form in FORMATS.values() if form != FP32):
        packed, stored = every_scale(form), Stored.of(form)
        named = dict(zip((part.name for part in form.parts), packed.parts, strict=True))
        side, fine = Side(stored, named, None), stored.fine
        bn, bk = ((64, 128), (128, 64))[at % 2]
        out = torch.full((N, K), 7.0)
        decode_kernel[(N // bn, K // bk)](
            side.part("codes"), side.part(fine.name if fine else None),
            side.part("zero" if stored.zero else None), side.part("order" if stored.ordered else None),
            out, N, K, stored.element, FINE[fine.dtype] if fine else "none", fine.rows if fine else 1,
            stored.span, stored.zero, stored.ordered, bn, bk,
        )  # fmt: skip
        found = out if stored.outer is None else out * named[stored.outer.name]
        assert same(found, packed.dequantize()), (form, (found - packed.dequantize()).abs().max())


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
        rounded = Step(batch, 23, CUTS[0]).round(x, how, given if form.given else None, torch.float32)
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


def error_of_step(scheme: Scheme, shape: ExpertShape, grouping: Grouping, wire: Format) -> float:
    """RMS error against the reference, amid rows of NaN, relative to the reference's RMS."""
    generator = torch.Generator().manual_seed(fresh_seed())
    weights = make_scheme(shape, len(COUNTS), scheme, generator)
    arrival = Arrival(COUNTS, grouping, spare=3)
    batch = arrival.batch(arrival.rows(shape.hidden, generator), shape.hidden, wire)
    spec = KernelSpec(scheme, shape, torch.float32)
    found, wanted = (
        torch.cat(arrival.segments(kernel.apply(kernel.prepare(weights), batch), batch)).double()
        for kernel in (triton_dequant.TritonDequant(spec), TorchReference(spec))
    )
    return float((found - wanted).norm() / wanted.norm())


def interpreted_products(weights: Stored, activations: Format, fp8_products: frozenset[str]) -> torch.dtype:
    """The shipped choice with float32 for bf16, whose products the interpreter gets wrong."""
    dtype = product_dtype(weights, activations, fp8_products)
    return torch.float32 if dtype == torch.bfloat16 else dtype


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
    own = sorted(triton_dequant.ROW.schemes & set(SCHEMES.values()), key=str)
    check_whole(list(covering(own)))


def check_every_step() -> None:
    """Whole steps of every scheme, and of some with rows of fp16."""
    own, more = triton_dequant.ROW.schemes & set(SCHEMES.values()), triton_dequant.ROW.schemes
    check_whole(sorted(own, key=str) + sorted(more - own, key=str)[::6])


def check_whole(schemes: list[Scheme]) -> None:
    """Whole steps, groupings, biases and wires in turn; and over a block of an inner size without a gate."""
    triton_dequant.product_dtype = interpreted_products
    triton_dequant.fp8_products = lambda device: frozenset({"e4m3"})
    groupings = list(Grouping)
    for i, scheme in enumerate(schemes):
        shape = ExpertShape(133, 19, activation_named("silu"), bias=i % 3 == 0)
        wire = scheme.activations if scheme.activations.given is None and i % 4 < 2 else FP32
        bound = 1e-2 if scheme.activations in (BF16, FP16) else 2e-2
        error = error_of_step(scheme, shape, groupings[i % 2], wire)
        assert error <= bound, (scheme, error)
    for name in ("swigluoai", "relu2_no_mul"):
        shape = ExpertShape(32, 130, activation_named(name), bias=True)
        error = error_of_step(scheme_named("nvfp4 x bf16"), shape, Grouping.RAGGED, BF16)
        assert error <= 1e-2, (name, error)


def check_outside() -> None:
    """Rows outside the segments are not written, by any cut."""
    shape = ExpertShape(64, 32, activation_named("silu"))
    weights = make_scheme(shape, 2, Scheme(BF16, BF16), torch.Generator().manual_seed(0))
    for cut in CUTS:
        batch = replace(ragged(12, 64), counts=torch.tensor([4, 2], dtype=torch.int32))
        step = Step(batch, 12, cut)
        x = torch.ones(12, 64, dtype=torch.bfloat16)
        side = Side(Stored.of(BF16), {"codes": weights.gate_up.parts[0]}, None)
        torch.use_deterministic_algorithms(mode=True)  # torch.empty is NaN then
        out = step.gemm(Rows(x), side, 64, torch.float32)
        torch.use_deterministic_algorithms(mode=False)
        written = (~out.isnan()).any(1).tolist()
        assert written == [r < 4 or 7 <= r < 9 for r in range(12)], (cut, written)


CHECKS = {"decode": check_decode, "round": check_rounding, "steps": check_steps, "outside": check_outside}
EVERY_STEP = {"every_step": check_every_step}


def main() -> None:
    torch.manual_seed(fresh_seed())
    for name in sys.argv[1:] or CHECKS:
        (CHECKS | EVERY_STEP)[name]()
    assert cut_for(1.0) is CUTS[0]
    assert cut_for(4096) is CUTS[-1]
    print("checked", file=sys.stderr)


if __name__ == "__main__":
    main()
