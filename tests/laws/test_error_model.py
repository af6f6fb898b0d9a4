"""The bounds of kernels' laws: kernels that compute right stay within them, and others are told."""

from dataclasses import dataclass, replace

import pytest
import torch
from error_model import (
    GRIDS,
    PLAIN,
    UNIFORM,
    UNIT,
    Cases,
    Losses,
    Terms,
    cases_of,
    chernoff,
    gaussian_energy,
    losses,
    rounded,
    settled,
)
from made_experts import activation_named, make_scheme
from torch import Tensor

from moeserve.experts.batch import ExpertShape
from moeserve.experts.kernels import KERNELS
from moeserve.experts.kernels.triton.stored import ROUNDINGS
from moeserve.quant.format import Format
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_GROUP
from moeserve.quant.schemes import scheme_named

pytestmark = pytest.mark.usefixtures("one_thread")

GIVEN = torch.tensor(0.013, dtype=torch.float64)


@pytest.mark.parametrize("form", [*ROUNDINGS, *PLAIN], ids=str)
def test_its_codes_are_the_formats(form: Format) -> None:
    """Values that differ stand at a boundary, to the last bits of a quotient."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 200, generator=generator) * torch.logspace(-3, 3, 60)[:, None]
    x[5] = 0
    x[6, 1:] = 0
    wanted = (form.given(GIVEN.float()) if form.given else form).quantize(x).dequantize().double()
    found = rounded(x.double(), torch.zeros_like(x, dtype=torch.float64), form, GIVEN)
    off = (found.values - wanted).abs() > 1e-5 * wanted.abs() + 1e-12
    assert int(off.sum()) <= 3
    assert bool((found.chance[off] > 1e-4).all())


@pytest.mark.parametrize("element", sorted(GRIDS))
def test_a_boundary_is_where_codes_change(element: str) -> None:
    grid = GRIDS[element]
    u = torch.linspace(-1.2 * grid.largest, 1.2 * grid.largest, 20011, dtype=torch.float64)
    away, step = grid.boundary(u)
    inside = step > 0
    assert bool((grid.nearest(u[~inside]).abs() >= grid.largest - 1e-9).all())
    for sign in (1, -1):
        assert torch.equal(grid.nearest(u + sign * 0.99 * away)[inside], grid.nearest(u)[inside])
    beyond = [(grid.nearest(u + sign * (1.01 * away + 1e-9)) - grid.nearest(u)).abs() for sign in (1, -1)]
    jumps = torch.isclose(beyond[0], step) | torch.isclose(beyond[1], step)
    assert bool(jumps[inside].all())


def test_sums_of_unlikely_terms_stay_below_chernoffs_bound() -> None:
    generator = torch.Generator().manual_seed(0)
    chance = torch.rand(1, 40, generator=generator).double() ** 6
    energy = torch.rand(1, 40, generator=generator).double().exp()
    bound = float(chernoff(Terms(chance, energy), 0.01))
    drawn = ((torch.rand(200_000, 40, generator=generator) < chance) * energy).sum(1)
    over = float((drawn > bound).double().mean())
    assert over <= 0.01
    assert bound <= 1.3 * float(drawn.quantile(0.99))
    assert float(chernoff(Terms(chance * 1e-12, energy), 0.01)) == 0


def test_sums_of_squares_stay_below_their_bound() -> None:
    generator = torch.Generator().manual_seed(0)
    variance = torch.rand(1, 30, generator=generator).double() ** 4
    drawn = (torch.randn(100_000, 30, generator=generator).double().square() * variance).sum(1)
    bound = float(gaussian_energy(variance, 0.01))
    assert float((drawn > bound).double().mean()) <= 0.01
    assert bound <= 2 * float(drawn.quantile(0.99))


def test_rows_that_fall_either_way_are_moved() -> None:
    """Half of the next code is a boundary; the scale's last bit would decide."""
    scheme = scheme_named("fp8_block128 x fp8_group128")
    x = torch.zeros(1, 1, 1, 256)
    x[..., 0] = 448
    x[..., 1:9] = torch.tensor([17.0, 19.0, 16.0, 8.5, 8.0, 100.0, 104.0, 1.0])
    moved = settled(x, scheme, BF16, None)
    assert (moved != x)[0, 0, 0, :9].tolist() == [False, True, True, False, True, False, True, False, False]
    assert torch.equal(settled(x, scheme, FP8_GROUP, None), x)


FLOAT32 = Losses()


@dataclass(frozen=True)
class Kernel:
    """A kernel written down: what it loses as its entry says it, and what else it does."""

    lost: Losses = FLOAT32
    noise: float = 0.0  # standard deviation of sums relative to S
    sums: bool = False  # in bf16
    weights: bool = False  # in bf16
    twice: bool = False  # inner rows are bf16 before they are rounded
    scale: float = 1.0  # of inner rows, beside their own
    one_scale: float = 1.0  # likewise, of the first 32 columns of one row
    swapped: bool = False  # two blocks of 16 columns of the second GEMM's weights

    def answers(self, cases: Cases) -> Tensor:
        """What it computes, in float32 where it is right."""
        gate_up, down = (bf16(w) if self.weights else w for w in (cases.gate_up, cases.down))
        between = self._noisy((cases.x.float() @ gate_up.float().mT).double(), cases.x, gate_up)
        between = bf16(between) if self.sums else between
        inner = cases.activation.apply(between).double()
        inner = bf16(inner) if self.twice else inner
        values = rounded(
            inner, 0 * inner, cases.scheme.activations, cases.inner_scale[..., None, None]
        ).values
        values = values * self.scale
        values[:, 3, 0, :32] *= self.one_scale
        if self.swapped:
            down = torch.cat((down[..., 16:32], down[..., :16], down[..., 32:]), -1)
        return self._noisy(values @ down.mT, values, down)

    def _noisy(self, sums: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        if not self.noise:
            return sums
        size = (rows.square() @ weights.square().mT).sqrt()
        generator = torch.Generator().manual_seed(1)
        return sums + self.noise * size * torch.randn(size.shape, generator=generator)


def bf16(t: Tensor) -> Tensor:
    return t.bfloat16().double()


def drawn(scheme: str, samples: int, seed: int) -> Cases:
    """Cases of the laws' shape."""
    generator = torch.Generator().manual_seed(seed)
    shape, counts = ExpertShape(160, 64, activation_named("silu")), torch.tensor([3, 0, 1, 9, 0])
    weights = make_scheme(shape, samples * len(counts), scheme_named(scheme), generator)
    x = torch.randn(samples, len(counts), 9, shape.hidden, generator=generator)
    there = (torch.arange(9) < counts[:, None]).expand(samples, len(counts), 9)
    form = scheme_named(scheme).activations
    came = form.given is None
    values = form.quantize(x).dequantize() if came else x
    return cases_of(scheme_named(scheme), shape.activation, weights, values, there, came=came)


def of_bounds(kernel: Kernel, scheme: str, samples: int = 24) -> Tensor:
    """Errors of a kernel over their bounds."""
    cases = drawn(scheme, samples, seed=3)
    wanted, bounds = cases.answers_and_bounds(kernel.lost)
    there = cases.there[..., None]
    off, size = ((t * there).flatten(1).norm(dim=1) for t in (kernel.answers(cases) - wanted, wanted))
    return off / size / bounds


EXACT = ["nvfp4 x fp8_group128", "int4_group128 x fp8_token", "int8_channel x int8_token", "mxfp4"]
ROUNDS_BF16 = UNIT[BF16] * UNIFORM


@pytest.mark.parametrize(
    "scheme", [*EXACT, "nvfp4 x nvfp4_static", "int8_channel x int8_token_asym", "mxfp8"]
)
@pytest.mark.parametrize(
    "kernel",
    [
        Kernel(),
        Kernel(Losses(e4m3_sums=True), noise=4e-4),
        Kernel(Losses(sums=ROUNDS_BF16), sums=True),
        Kernel(Losses(products=ROUNDS_BF16), weights=True),
    ],
    ids=["float32", "e4m3_sums", "bf16_sums", "bf16_weights"],
)
def test_kernels_that_say_what_they_lose_stay_within(kernel: Kernel, scheme: str) -> None:
    assert float(of_bounds(kernel, scheme).max()) <= 1


@pytest.mark.parametrize("scheme", EXACT)
@pytest.mark.parametrize(
    ("kernel", "told"),
    [
        (Kernel(twice=True), 0.6),
        (Kernel(sums=True), 0.6),
        (Kernel(scale=1 + 2.0**-6), 0.9),
        (Kernel(one_scale=1 + 2.0**-6), 0.8),
        (Kernel(swapped=True), 1.0),
    ],
    ids=["rounded twice", "bf16 sums", "scale", "scale of one block", "swapped"],
)
def test_kernels_that_lose_what_they_do_not_say_are_told(kernel: Kernel, told: float, scheme: str) -> None:
    """In most cases; in the others a value stands so near to a boundary that a right one may err as much."""
    assert float((of_bounds(kernel, scheme) > 1).double().mean()) >= told


@pytest.mark.parametrize(
    ("lost", "least"), [(Losses(e4m3_sums=True), 2.0**-4), (Losses(sums=ROUNDS_BF16), 2.0**-3)], ids=str
)
@pytest.mark.parametrize("scheme", EXACT[:3])
def test_what_kernels_that_lose_more_are_told_of(lost: Losses, least: float, scheme: str) -> None:
    """A scale's error where their own are several hundredths; swapped blocks always."""
    assert bool((of_bounds(Kernel(lost, scale=1 + least), scheme) > 1).all())
    assert bool((of_bounds(Kernel(lost, swapped=True), scheme) > 1).all())


def test_entries_of_the_table_say_what_they_lose() -> None:
    found = {
        (name, scheme): losses(KERNELS[name], scheme_named(scheme))
        for name, scheme in (
            ("cuda_fp4_many", "nvfp4 x fp8_group128"),
            ("triton_dequant", "int4_group128 x fp8_token"),
            ("triton_dequant", "int4_group32 x fp8_token"),
            ("triton_dequant", "fp8_channel x fp8_token"),
            ("triton_dequant", "int4_group128 x bf16"),
            ("torch_scaled_grouped_mm", "fp8_channel x fp8_token"),
            ("cuda_fp8_many", "fp8_block128 x fp8_group128"),
        )
    }
    products = {case: lost.products > 0 for case, lost in found.items()}
    assert [case for case, lossy in products.items() if lossy] == [
        ("triton_dequant", "int4_group32 x fp8_token"),
        ("triton_dequant", "int4_group128 x bf16"),
    ]
    assert {name for (name, scheme), lost in found.items() if lost.e4m3_sums} == {
        "triton_dequant",
        "torch_scaled_grouped_mm",
        "cuda_fp8_many",
    }
    sums = found["torch_scaled_grouped_mm", "fp8_channel x fp8_token"].sums
    assert sums == ROUNDS_BF16
    assert replace(found["cuda_fp4_many", "nvfp4 x fp8_group128"], out=0.0) == Losses(out=0.0)
