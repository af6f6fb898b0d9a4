"""A step of many rows on four-bit weights on Hopper, launched: the two GEMMs of `text/prefill_codes`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf

import torch
from torch import Tensor

from moeserve.device.arguments import Argument, Arguments
from moeserve.device.nvrtc import Function, Program, tensor_map
from moeserve.device.source import Part
from moeserve.experts.activation import Activation
from moeserve.experts.batch import ExpertBatch
from moeserve.experts.kernels.cuda import rounded, steps
from moeserve.experts.kernels.cuda.steps import (
    EXTENT,
    NO_NUMBERS,
    NUMBERS,
    OUTS,
    Block,
    Groups,
    defined,
    numbers,
)

PARTS = ("task", "copies", "operands", "sums", "outputs", "gemm")
ARGUMENTS = Arguments(
    "CodesArguments",
    x="TensorMap",  # rows, in bf16 or E4M3
    x_scale="const float*?",  # SCALED: [groups, K / 128, MOST], by row of a group
    codes="const u8*",  # EIGHT: [e, rows / 64, K / 128, BLOCK_BYTES], scales after the codes
    scales="const u8*?",  # else [e, rows / 64, K / 256, 2 SCALE_BYTES], and codes likewise
    row_scale="const float*",  # [e, rows]
    bias="const float*?",  # [e, rows]
    out="void*",
    out_scale="float*?",  # ROUNDED: as x_scale, of the next GEMM
    tiles="const int*",  # as `rows.cu` lists them
    n="int",  # columns of the output
    k_blocks="int",  # blocks of 128 of K
    **EXTENT,
    **NUMBERS,
)

SOURCES: tuple[Part, ...] = (ARGUMENTS, *(f"prefill_codes/{part}.cu" for part in PARTS))

DEPTH = 128
BOX = 64
"""Rows of a group are copied in multiples of it."""

THREADS = 384


@dataclass(frozen=True)
class CodesPlan:
    """The sizes that the GEMMs are compiled with."""

    eight: bool
    """Whether products are of E4M3, and not of bf16."""
    scaled: bool
    """Whether rows are E4M3 codes with a scale for every 128; those that meet bf16 are bf16 themselves."""
    span: int
    """Columns of the weights that share a scale: 16, or 32 where products are of E4M3."""
    most: int
    """Most rows of one slot that a cluster works on at once: a multiple of `BOX`."""
    x_stages: int
    w_stages: int

    def __post_init__(self) -> None:
        if self.most <= 0 or self.most % BOX:
            raise ValueError(
                f"a group has at most {self.most} rows: give a multiple of {BOX}, as copies have"
            )

    @property
    def codes(self) -> torch.dtype:
        """The dtype in which rows are multiplied."""
        return torch.float8_e4m3fn if self.eight else torch.bfloat16

    @property
    def grain(self) -> int:
        """Rows of a group are computed in multiples of it."""
        return 8 if self.eight else 16

    @property
    def shared(self) -> int:
        """How many bytes of shared memory a block needs."""
        x = -(-self.most // BOX) * BOX * 128 + 4 * self.most * self.scaled
        w = 2 * 2 * (64 * DEPTH // 2 + 64 * DEPTH // self.span)
        peaks = (3 * 4 * self.most + 8) * self.scaled
        return self.x_stages * (x + 16) + self.w_stages * (w + 16) + 8192 + peaks


BF16_64 = CodesPlan(eight=False, scaled=False, span=16, most=64, x_stages=12, w_stages=5)
E4M3_64 = CodesPlan(eight=True, scaled=True, span=16, most=64, x_stages=10, w_stages=6)

PLANS = {
    "bf16": (
        (64.0, BF16_64),
        (inf, replace(BF16_64, most=256, x_stages=5, w_stages=2)),
    ),
    "scaled": (
        (48.0, replace(BF16_64, scaled=True)),
        (96.0, replace(BF16_64, scaled=True, most=128, x_stages=8, w_stages=3)),
        (inf, replace(BF16_64, scaled=True, most=256, x_stages=5, w_stages=2)),
    ),
    **{
        f"fp8_{span}": (
            (48.0, replace(E4M3_64, span=span)),
            (96.0, replace(E4M3_64, span=span, most=128, x_stages=8, w_stages=4)),
            (inf, replace(E4M3_64, span=span, most=192, x_stages=6, w_stages=2)),
        )
        for span in (16, 32)
    },
}
"""By what rows are: the likely rows of a slot up to which a plan is the fastest on an H200, and the plan.

Each range but the first and the last ends at twice where it begins, or later, so that warming by doubled
rooms compiles every plan before a step needs it. Rows of `scaled` and of `fp8_<span>` are E4M3 codes with
scales, multiplied as bf16 and as they are.
"""


def plan_for(kind: str, batch: ExpertBatch) -> CodesPlan:
    """The plan of `PLANS[kind]` that suits the batch; every one computes any number of rows."""
    return next(plan for most, plan in PLANS[kind] if batch.rows_a_slot <= most)


@dataclass(frozen=True)
class PrefillCodesRows:
    """Rows `[R, K]` bf16; or E4M3 codes, as what is multiplied, and their scales.

    Scales are `[groups, K / 128, most]`, by row of a group.
    """

    values: Tensor
    scale: Tensor | None = None


@dataclass(frozen=True)
class PrefillCodesWeights:
    """One side's codes and scales in the plan's order, with a float32 a row `[e, N]`."""

    codes: Tensor
    scale: Tensor | None  # for E4M3 rows the codes hold them
    row_scale: Tensor
    bias: Tensor | None


def weights_of(slot: Mapping[str, Tensor], side: str) -> PrefillCodesWeights:
    """The weights of `side` among tensors named `<side>.codes`, and so on."""
    names = (f"{side}.codes", f"{side}.scale", f"{side}.row_scale", f"{side}_bias")
    codes, scale, row_scale, bias = (slot.get(name) for name in names)
    assert codes is not None and row_scale is not None
    return PrefillCodesWeights(codes, scale, row_scale, bias)


@dataclass(frozen=True)
class PrefillCodesForm(steps.GemmForm):
    """One compiled form of the GEMM."""

    plan: CodesPlan = field(kw_only=True)

    @property
    def options(self) -> tuple[str, ...]:
        """The compiler's options for this form."""
        plan = self.plan
        kind = {"EIGHT": plan.eight, "SCALED": plan.scaled}
        sizes = {"SPAN": plan.span, "MOST": plan.most, "GRAIN": plan.grain, "BOX": BOX}
        stages = {"X_STAGES": plan.x_stages, "W_STAGES": plan.w_stages}
        return super().options + defined(kind | sizes | stages)


@dataclass(frozen=True)
class CodesStep(Groups):
    """A batch cut into groups of at most `plan.most` rows of one slot; nothing is read on the host."""

    plan: CodesPlan

    @property
    def cut(self) -> tuple[int, int]:
        """The rows by which a group grows, and the most it has."""
        return self.plan.grain, self.plan.most

    def rows(self, codes: Tensor, scale: Tensor) -> PrefillCodesRows:
        """Rows `codes [R, K]` E4M3 and `scale [R, K / 128]`, of any strides, as the GEMM reads them."""
        return PrefillCodesRows(codes.to(self.plan.codes), self.grouped(scale))

    def round(self, x: Tensor) -> PrefillCodesRows:
        """Rows of `x [R, K]` bf16 in E4M3 with a scale for every 128."""
        width = x.shape[1]
        blocks = -(-width // DEPTH)
        grouped = self.scale_storage(blocks)
        codes = torch.empty(x.shape, dtype=self.plan.codes, device=x.device)
        grid = (self.limit, -(-blocks // 2), 1)
        function = rounded.function("round_groups", rounded.ROUND, self.plan.most, wide=not self.plan.eight)
        given: dict[str, Argument] = {
            "x": x,
            "codes": codes,
            "scale": grouped,
            "tiles": self.tiles,
            "width": width,
            "blocks": blocks,
        }
        function.launch(grid, rounded.THREADS, given)
        return PrefillCodesRows(codes, grouped)

    def gate_up(
        self, x: PrefillCodesRows, weights: PrefillCodesWeights, activation: Activation, inner: int
    ) -> PrefillCodesRows:
        """Rows `[R, inner]` after the first GEMM and one of `FUSED_ACTIVATIONS`, rounded again as `x` is."""
        plan = self.plan
        values = torch.empty((self.capacity, inner), dtype=plan.codes, device=x.values.device)
        rows = PrefillCodesRows(values, self.scale_storage(-(-inner // DEPTH)) if plan.scaled else None)
        bias, limited = weights.bias is not None, activation.limit is not None
        form = PrefillCodesForm(bias, fused=True, limited=limited, out=OUTS[torch.bfloat16], plan=plan)
        self._run(form, (x, weights), rows, numbers(activation))
        return rows

    def down(
        self, x: PrefillCodesRows, weights: PrefillCodesWeights, hidden: int, out_dtype: torch.dtype
    ) -> Tensor:
        """`[R, hidden]`: rows times their slot's weights, plus the bias; other rows are not written."""
        out = torch.empty((self.capacity, hidden), dtype=out_dtype, device=x.values.device)
        form = PrefillCodesForm(weights.bias is not None, out=OUTS[out_dtype], plan=self.plan)
        self._run(form, (x, weights), PrefillCodesRows(out), NO_NUMBERS)
        return out

    def _run(
        self,
        form: PrefillCodesForm,
        given: tuple[PrefillCodesRows, PrefillCodesWeights],
        out: PrefillCodesRows,
        numbers: Mapping[str, float],
    ) -> None:
        (x, weights), plan, n = given, self.plan, out.values.shape[1]
        values = x.values.view(torch.uint8) if plan.eight else x.values
        arguments: dict[str, Argument] = {
            "x": tensor_map(values, (BOX, 128 // values.itemsize)),
            "x_scale": x.scale,
            "codes": weights.codes,
            "scales": weights.scale,
            "row_scale": weights.row_scale,
            "bias": weights.bias,
            "out": out.values,
            "out_scale": out.scale,
            "tiles": self.tiles,
            "n": n,
            "k_blocks": -(-values.shape[1] // DEPTH),
            **numbers,
        }
        block = Block(THREADS, plan.shared)
        self.launch(_function(form), block, arguments, (form.tiles_across(n), values.shape[1]))


def source(plan: CodesPlan) -> str:
    """The GEMM's text, behind the products that `plan` needs."""
    products = "".join(product(plan, n) for n in range(plan.grain, plan.most + 1, plan.grain))
    return steps.source(*SOURCES, before="template <int N>\nstruct Product;\n" + products)


def product(plan: CodesPlan, n: int) -> str:
    """`Product<n>::add(d, a, b, more)`: d [64 x n] (+)= a b^T, a of 64 rows from registers, b of n rows."""
    sums = n // 2
    shape, ends = ("k32.f32.e4m3.e4m3", "1, 1") if plan.eight else ("k16.f32.bf16.bf16", "1, 1, 0")
    names = ", ".join(f"%{i}" for i in range(sums))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(sums))
    held = sums if plan.eight else plan.most // 2
    return f"""
template <>
struct Product<{n}> {{
  DEVICE static void add(float (&d)[{held}], const u32 (&a)[4], u64 b, int more) {{
    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{sums + 5}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}{shape} {{{names}}}, "
        "{{%{sums}, %{sums + 1}, %{sums + 2}, %{sums + 3}}}, %{sums + 4}, p, {ends};\\n}}"
        : {outputs}
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(more));
  }}
}};
"""


@cache
def _function(form: PrefillCodesForm) -> Function:
    return Program(source(form.plan), form.options).function("prefill_codes", ARGUMENTS)
