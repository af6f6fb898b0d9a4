"""How far a kernel's answer may stand from the reference's: the bound of a case, from what its sums may lose.

A kernel and the reference multiply the same numbers, decoded weights and rows as their scheme rounds them.
Sums differ, since they are added in other orders and some kernels keep fewer bits (`Losses`). Inner rows that
differ by d before they are rounded differ after that by nothing, or, where a boundary between two codes lies
within d, by a whole step, which for E4M3 is up to an eighth of the value. One such step in the largest inner
value of a small case is several hundredths of the answer, and how likely it is depends on how near to a
boundary that value stands. A bound by scheme and shape alone must therefore allow for it in every case, and
lets most errors of a kernel through. This one looks at the case:

1. Sums of the first GEMM have independent errors of known standard deviation, relative to S, the root of the
   sum of squared products. The activation carries them on by its slopes, to `sigma` of each inner value; that
   of the largest of a block moves the block's scale, and with it all its boundaries.
2. An inner value takes the step to the next code with the probability that a normal error of `sigma` reaches
   the boundary. A block's scale, where it is a power of two or an E4M3 number, steps likewise, with values.
3. What steps cost in the answer, squared, is a sum of independent terms. It exceeds Chernoff's bound with a
   probability of at most `P_STEPS`; terms that are less likely than that together are left out before.
4. What is left is smooth: sums of the second GEMM, scales that moved, roundings of plain floats and of the
   answer. It is normal, and exceeds Laurent's and Massart's bound on sums of squares with at most `P_SMOOTH`.

Columns of random weights are nearly orthogonal: what several steps of a row cost together is within
1 + 5 sqrt(2 / H) of the sum of what each costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, sqrt

import torch
from torch import Tensor

from moeserve.experts.activation import Activation
from moeserve.experts.batch import ExpertWeights
from moeserve.experts.kernel import KernelEntry, KernelSpec
from moeserve.experts.kernels.triton.stored import ROUNDINGS, Rounding
from moeserve.quant.format import Format, Scheme
from moeserve.quant.formats.floats import BF16, FP16, FP32

P_STEPS = P_SMOOTH = 2e-7
"""Of a case: together less than one in a million."""

UNIT = {FP32: 2.0**-24, FP16: 2.0**-11, BF16: 2.0**-8}
"""Largest relative error of a rounding to a plain float."""

PLAIN_OF = {form.dtype: form for form in UNIT}

UNIFORM = 1 / sqrt(3)
"""Standard deviation of an error that is anywhere within 1."""


def f32_sum(k: int) -> float:
    """Standard deviation of a sum of `k` products in float32, relative to S.

    A tensor core adds 16 products to a sum and cuts that to float32: an error of at most 2^-23 of a partial
    sum, which is of S's size. All may be of one sign.
    """
    return 2.0**-23 * (1 + k / 16)


E4M3_SUM = 2.0**-13 * sqrt(4 * 33) * UNIFORM
"""The same of E4M3 products on Hopper, whose tensor cores shift what they add to the largest exponent of 32
products and the sum, cut it 13 bits below that, and hand over to float32 after 128: 132 errors of less than
2^-13 of the largest, which is within S.
"""


@dataclass(frozen=True)
class Losses:
    """What a kernel loses beside what its scheme rounds."""

    e4m3_sums: bool = False  # products are of E4M3, see `E4M3_SUM`
    products: float = 0.0  # standard deviation of each, relative to it
    sums: float = 0.0  # of the first GEMM's sums as they are stored, relative to them
    out: float = 2.0**-24 * UNIFORM  # of the answers, relative to them

    def of_sum(self, k: int) -> float:
        """Standard deviation of a sum of `k` products, relative to S; the reference's own included."""
        hardware = E4M3_SUM if self.e4m3_sums else 0.0
        return sqrt(hardware**2 + self.products**2 + 2 * f32_sum(k) ** 2)


def losses(entry: KernelEntry, scheme: Scheme, out_dtype: torch.dtype = torch.float32) -> Losses:
    """Returns what an entry's kernel loses with a scheme, as the entry declares it.

    A kernel of plain floats may keep what stands between the GEMMs, and its answers, in what it multiplies.
    """
    product = UNIT[entry.rounded_products[scheme]] if scheme in entry.rounded_products else 0.0
    kept = max(UNIT[scheme.activations], product) if scheme.activations in UNIT else 0.0
    if entry.bf16_sums:
        kept = max(kept, UNIT[BF16])
    return Losses(
        e4m3_sums=scheme in entry.e4m3_sums,
        products=product * UNIFORM * sqrt(2),  # of a scale, and of a code times it
        sums=kept * UNIFORM,
        out=max(kept, UNIT[BF16] if entry.bf16_answers else UNIT[PLAIN_OF[out_dtype]]) * UNIFORM,
    )


# ---- how values become codes -----------------------------------------------------------------------------


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float64, exactly."""
    return (exponent.long() + 1023 << 52).view(torch.float64)


@dataclass(frozen=True)
class Grid:
    """Small floats of `mantissa` bits from 2^`lowest`, or whole numbers (`mantissa` 0), up to `largest`."""

    mantissa: int
    lowest: int
    largest: float

    def step(self, u: Tensor) -> Tensor:
        """Distance of the two codes around |u|."""
        if self.mantissa == 0:
            return torch.ones_like(u)
        exponent = torch.frexp(u.abs().clamp_max(self.largest)).exponent - 1
        return power_of_two(exponent.clamp_min(self.lowest) - self.mantissa)

    def nearest(self, u: Tensor) -> Tensor:
        """`u` rounded."""
        step = self.step(u)
        return ((u / step).round() * step).clamp(-self.largest - (self.mantissa == 0), self.largest)

    def boundary(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """How far off the boundary between the codes around u is; how far these are apart, 0 beyond all."""
        step, size = self.step(u), u.abs()
        cell = (size / step).floor()
        away = (size - (cell + 0.5) * step).abs()
        step = torch.where((cell + 0.5) * step < self.largest, step, 0.0)
        if self.mantissa:  # below a power of two codes are twice as near
            below = size - cell * step + step / 4
            nearer = (cell == 2**self.mantissa) & (size > 2.0 * 2.0**self.lowest) & (below < away)
            away, step = torch.where(nearer, below, away), torch.where(nearer, step / 2, step)
        return away, step


GRIDS = {
    "e4m3": Grid(3, -6, 448.0),
    "e2m1": Grid(1, 0, 6.0),
    "e3m2": Grid(2, -2, 28.0),
    "e2m3": Grid(3, 0, 7.5),
    "int8": Grid(0, 0, 127.0),
}
PLAIN = {FP32: Grid(23, -126, 3e38), FP16: Grid(10, -14, 65504.0), BF16: Grid(7, -126, 3e38)}
WHOLE = Grid(0, 0, 256.0)
"""Of values with a zero point, before that is added."""

MOVING = frozenset({"amax", "range"})
"""Rules whose scale moves with the largest value; others have steps, or are constant."""

TOP = {"e2m1": 2, "e3m2": 4, "e2m3": 2, "e4m3": 8}


def scale_of(how: Rounding, amax: Tensor, given: Tensor) -> Tensor:
    """The scale of blocks with largest magnitude (of `range`: spread) `amax`; `given`: of static formats."""
    grid = GRIDS[how.element]
    tiny = torch.full_like(amax, 1e-10)
    if how.rule == "static":
        return given.expand_as(amax)
    if how.rule == "nvfp4":
        ratio = GRIDS["e4m3"].nearest(amax / (6 * given))
        return torch.where(ratio == 0, tiny, ratio) * given
    if how.rule == "even":
        rounded = amax + power_of_two(torch.frexp(amax).exponent - 2 - grid.mantissa)
        return power_of_two(torch.frexp(rounded).exponent - 1 - TOP[how.element])
    if how.rule == "range":
        return torch.maximum(amax / 255, tiny)
    scale = torch.maximum(amax, tiny) / grid.largest
    if how.rule == "amax":
        return scale
    return power_of_two(torch.frexp(scale * (1 - 1e-15)).exponent)  # rounded up


@dataclass(frozen=True)
class Rounded:
    """Inner rows `[..., I]` rounded, and what errors before that may change of them."""

    values: Tensor
    smooth: Tensor  # variance of each value that is no step
    chance: Tensor  # of a value's step
    step: Tensor
    scale_moves: Tensor  # of each block's scale, relative, standard deviation, `[..., blocks]`
    other: Tensor  # values if the block's scale stepped
    other_chance: Tensor  # `[..., blocks]`
    span: int


def normal_tail(z: Tensor) -> Tensor:
    """Probability that a standard normal variable is above z."""
    return 0.5 * torch.erfc(z / sqrt(2))


def rounded(y: Tensor, sigma: Tensor, form: Format, given: Tensor) -> Rounded:
    """What an activation format makes of inner rows `y [..., I]`, with errors of `sigma`."""
    if form in PLAIN:
        grid = PLAIN[form]
        step = grid.step(y) * (y != 0)
        none = y.new_zeros((*y.shape[:-1], 1))
        smooth = sigma**2 + 0.8 * sigma * step
        return Rounded(grid.nearest(y), smooth, 0 * y, step, none, grid.nearest(y), none, y.shape[-1])
    how = ROUNDINGS[form]
    grid, width = WHOLE if how.rule == "range" else GRIDS[how.element], y.shape[-1]
    span = how.span or width
    pad = -width % span
    blocks, errors = (torch.nn.functional.pad(t, (0, pad)).unflatten(-1, (-1, span)) for t in (y, sigma))
    if how.rule == "range":
        inside = torch.arange(width + pad, device=y.device).view(-1, span) < width
        high, low = (
            blocks.masked_fill(~inside, -torch.inf).amax(-1),
            blocks.masked_fill(~inside, torch.inf).amin(-1),
        )
        amax = high - low
    else:
        amax = blocks.abs().amax(-1)
        low = -amax
    top = errors.gather(-1, blocks.abs().argmax(-1, keepdim=True)).squeeze(-1)
    relative = torch.where(amax > 0, top / amax, 0.0) * (sqrt(2) if how.rule == "range" else 1.0) + 2.0**-23
    given = given.expand(amax.shape)
    scale = scale_of(how, amax, given)

    def values(scale: Tensor, shift: Tensor | float = 0.0) -> Tensor:
        u = blocks / scale[..., None]
        if how.rule != "range":
            return grid.nearest(u) * scale[..., None]
        zero = ((-128 - low / scale).round() + shift)[..., None]
        return ((u.round() + zero).clamp(-128, 127) - zero) * scale[..., None]

    moves = relative if how.rule in MOVING else torch.full_like(relative, 2.0**-23)
    away, step = grid.boundary(blocks / scale[..., None])
    effective = (errors**2 + (blocks * moves[..., None]) ** 2).sqrt() / scale[..., None]
    chance = normal_tail(away / effective.clamp_min(1e-300))
    if how.rule == "range":
        place = -128 - low / scale
        off = (place - place.floor() - 0.5).abs()
        other = values(scale, torch.where(place.round() > place, -1.0, 1.0))
        other_chance = normal_tail(off / ((low / scale).abs() * relative * sqrt(2) + 128 * 2.0**-23))
    else:
        other, other_chance = _stepped(values, how, amax, relative, given)
    stays = (*y.shape[:-1], width + pad)
    cut = slice(0, width)

    def flat(t: Tensor) -> Tensor:
        return t.reshape(stays)[..., cut]

    return Rounded(
        flat(values(scale)),
        0 * y,
        flat(chance),
        flat(step * scale[..., None]),
        moves,
        flat(other),
        other_chance,
        span,
    )


def _stepped(
    values: object, how: Rounding, amax: Tensor, relative: Tensor, given: Tensor
) -> tuple[Tensor, Tensor]:
    """Values under the scale that the smallest likely error of the largest value leads to, and its chance."""
    scale = scale_of(how, amax, given)
    found, chance = scale, torch.zeros_like(amax)
    if how.rule not in MOVING and how.rule != "static":
        for sigmas in (8, 7, 6, 5, 4, 3, 2, 1):
            for sign in (1, -1):
                moved = scale_of(how, amax * (1 + sign * sigmas * relative), given)
                differs = moved != scale
                found = torch.where(differs, moved, found)
                chance = torch.where(differs, normal_tail(torch.full_like(amax, sigmas - 1.0)), chance)
    return values(found), chance  # type: ignore[operator]


# ---- a case ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cases:
    """Cases of one scheme and shape side by side, float64 `[n, e, ...]`; `there [n, e, R]`: rows that are."""

    scheme: Scheme
    activation: Activation
    x: Tensor  # [n, e, R, H] as they are multiplied
    x_off: Tensor | None  # [n, e, R, H]: the step of values that stand at a boundary, else 0
    there: Tensor
    gate_up: Tensor  # [n, e, 2I, H]
    down: Tensor  # [n, e, H, I]
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    inner_scale: Tensor  # [n, e]; anything where the format is not static

    def answers_and_bounds(self, lost: Losses) -> tuple[Tensor, Tensor]:
        """The answers `[n, e, R, H]`, and the bounds `[n]` of RMS errors relative to the answers' RMS."""
        hidden, inner = self.down.shape[-2:]
        between, sigma = self._first(lost)
        y, slopes = self._activated(between)
        spread = (slopes * sigma).square().unflatten(-1, (-1, inner)).sum(-2)
        gate, up = between.abs().unflatten(-1, (-1, inner))[..., 0, :], between.abs()[..., -inner:]
        approximate = 2.0**-20 * y.abs() + 2.0**-22 * gate.clamp_min(1) * up.clamp_min(1)
        sigma = (spread + approximate.square()).sqrt()
        given = self.inner_scale[..., None, None]
        q = rounded(y, sigma, self.scheme.activations, given)
        down = self.down
        answers = q.values @ down.mT
        if self.down_bias is not None:
            answers = answers + self.down_bias[..., None, :]
        there = self.there[..., None]
        columns = down.square().sum(-2)[..., None, :]  # what a change of 1 costs, squared
        steps = Terms((q.chance * there).flatten(1), (q.step.square() * columns).flatten(1))
        scales = Terms(
            (q.other_chance * there).flatten(1), self._block_energy(q, q.other - q.values).flatten(1)
        )
        together = 1 + 5 * sqrt(2 / hidden)
        stepped = (chernoff(steps.beside(scales)) * together).sqrt()
        moves = (q.scale_moves.square() * self._block_energy(q, q.values) * there).flatten(1)
        products = q.values.square() @ down.square().mT
        final = (
            products * lost.of_sum(inner) ** 2 + answers.square() * lost.out**2 + q.smooth @ down.square().mT
        )
        smooth = gaussian_energy(torch.cat(((final * there).flatten(1), moves), 1)).sqrt()
        norm = (answers * there).flatten(1).norm(dim=1)
        return answers, torch.where(norm > 0, (stepped + smooth) / norm, 0.0)

    def _first(self, lost: Losses) -> tuple[Tensor, Tensor]:
        """Sums of the first GEMM with their biases, and the standard deviations of their errors."""
        between = self.x @ self.gate_up.mT
        squares = self.x.square()
        variance = (squares @ self.gate_up.square().mT) * lost.of_sum(self.x.shape[-1]) ** 2
        if self.x_off is not None:
            variance = variance + self.x_off.square() @ self.gate_up.square().mT
        if self.gate_up_bias is not None:
            between = between + self.gate_up_bias[..., None, :]
        return between, (variance + between.square() * (lost.sums**2 + 2.0**-48)).sqrt()

    def _activated(self, between: Tensor) -> tuple[Tensor, Tensor]:
        """Inner rows, and their slopes by each sum."""
        with torch.enable_grad():
            sums = between.detach().requires_grad_()
            y = self.activation.apply(sums)
            (slopes,) = torch.autograd.grad(y.sum(), sums)
        return y.detach().double(), slopes

    def _block_energy(self, q: Rounded, change: Tensor) -> Tensor:
        """What a change of inner values costs by block of a scale: `[n, e, R, blocks]`."""
        width = change.shape[-1]
        parts = []
        for start in range(0, width, q.span):
            own = slice(start, min(start + q.span, width))
            parts.append((change[..., own] @ self.down[..., own].mT).square().sum(-1))
        return torch.stack(parts, -1)


@dataclass(frozen=True)
class Terms:
    """Independent terms `[n, N]`: each is `energy` with probability `chance`, else nothing."""

    chance: Tensor
    energy: Tensor

    def beside(self, other: Terms) -> Terms:
        """These and others."""
        return Terms(torch.cat((self.chance, other.chance), 1), torch.cat((self.energy, other.energy), 1))


def chernoff(terms: Terms, p: float = P_STEPS) -> Tensor:
    """What the sum of terms exceeds with a probability of at most `p`: `[n]`."""
    chance, order = (terms.chance * (terms.energy > 0)).sort(1)
    kept = chance.cumsum(1) > p / 2  # the others together are as unlikely as that
    most = int(kept.sum(1).max()) if kept.numel() else 0
    if most == 0:
        return terms.energy.new_zeros(terms.energy.shape[0])
    energy = terms.energy.gather(1, order)
    kept, chance, energy = (t[:, -most:] for t in (kept, chance, energy))
    chance, energy = (chance * kept).clamp_max(1 - 1e-12), energy * kept
    largest = energy.amax(1).clamp_min(1e-300)
    best = torch.full_like(largest, torch.inf)
    for power in torch.linspace(-3, 9, 61).tolist():
        theta = 2.0**power / largest
        grown = torch.logaddexp(torch.log1p(-chance), torch.log(chance) + theta[:, None] * energy)
        best = torch.minimum(best, (grown.sum(1) + log(2 / p)) / theta)
    all_of_them = energy.sum(1)
    return torch.where(kept.any(1), torch.minimum(best, all_of_them), 0.0)


def gaussian_energy(variance: Tensor, p: float = P_SMOOTH) -> Tensor:
    """What a sum of squares of normal variables of `variance [n, N]` exceeds with probability `p` at most."""
    if not variance.shape[1]:
        return variance.sum(1)  # of no values
    level = log(1 / p)
    spread = 2 * variance.norm(dim=1) * sqrt(level) + 2 * variance.amax(1) * level
    return variance.sum(1) + spread


# ---- from what laws have ---------------------------------------------------------------------------------


def rows_of(values: Tensor, form: Format, given: Tensor, *, came: bool) -> tuple[Tensor, Tensor | None]:
    """Rows `[..., H]` as a kernel multiplies them, and the steps of those at a boundary between two codes.

    Rows that `came` in the scheme's format are codes already. Others are rounded by kernel and reference,
    whose quotients may differ in the last bits.
    """
    if came or form in PLAIN:
        return values if came else PLAIN[form].nearest(values), None
    none = torch.zeros_like(values)
    q = rounded(values, none, form, given)
    least = normal_tail(torch.tensor(8.0).double())
    blocks = (q.other_chance > least).repeat_interleave(q.span, -1)[..., : values.shape[-1]]
    step = torch.where(q.chance > least, q.step, none)
    return q.values, torch.maximum(step, torch.where(blocks, (q.other - q.values).abs(), none))


def settled(rows: Tensor, scheme: Scheme, wire: Format, input_scale: Tensor | None) -> Tensor:
    """Rows `[..., e, R, H]` without those values that `wire` brings halfway between two codes of the scheme.

    A hundredth of bf16 rows stand there, to the last bit, and the last bit of a quotient decides: either code
    is right, and what follows differs by far more than what a law looks for. They are moved by 2^-7.
    """
    if wire == scheme.activations:
        return rows
    given = rows.new_ones(()).double() if input_scale is None else input_scale.double()[..., None, None]
    for _ in range(4):
        carried = wire.quantize(rows).dequantize().double()
        _, off = rows_of(carried, scheme.activations, given, came=False)
        if off is None or not bool(off.any()):
            break
        rows = torch.where(off != 0, rows * (1 + 2.0**-7), rows)
    return rows


def cases_of(
    scheme: Scheme, activation: Activation, weights: ExpertWeights, x: Tensor, there: Tensor, *, came: bool
) -> Cases:
    """Cases side by side: `x [n, e, R, H]`, weights of n e experts."""
    lead = x.shape[:2]

    def wide(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.double().unflatten(0, lead).to(x.device)

    ones = torch.ones(lead, dtype=torch.float64, device=x.device)
    before, inside = (wide(s) if s is not None else ones for s in (weights.input_scale, weights.inner_scale))
    assert before is not None and inside is not None
    values, off = rows_of(x.double(), scheme.activations, before[..., None, None], came=came)
    gate_up, down = wide(weights.gate_up.dequantize()), wide(weights.down.dequantize())
    assert gate_up is not None and down is not None
    biases = wide(weights.gate_up_bias), wide(weights.down_bias)
    return Cases(scheme, activation, values, off, there.to(x.device), gate_up, down, *biases, inside)


def settled_rows(rows: list[Tensor], scheme: Scheme, wire: Format, weights: ExpertWeights) -> list[Tensor]:
    """Rows of each slot, `settled`."""
    scales = weights.input_scale
    given = [None if scales is None else scales[slot : slot + 1].cpu() for slot in range(len(rows))]
    return [settled(own[None], scheme, wire, scale)[0] for own, scale in zip(rows, given, strict=True)]


def bound_of(
    entry: KernelEntry, spec: KernelSpec, weights: ExpertWeights, rows: list[Tensor], wire: Format
) -> float:
    """Returns how large the error of an entry's kernel may be; `rows` of each slot are what `wire` made."""
    most = max((len(own) for own in rows), default=0)
    padded = torch.stack([torch.nn.functional.pad(own.double(), (0, 0, 0, most - len(own))) for own in rows])
    there = torch.tensor([[i < len(own) for i in range(most)] for own in rows])
    scheme = spec.scheme
    came = wire == scheme.activations
    cases = cases_of(scheme, spec.shape.activation, weights, padded[None], there[None], came=came)
    return float(cases.answers_and_bounds(losses(entry, scheme, spec.out_dtype))[1])
