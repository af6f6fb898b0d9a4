"""Activations: the worked examples of every formula, and the laws of `Activation`."""

import math

import pytest
import torch
from torch import Tensor

from moeserve.experts.activation import ACTIVATIONS, ALIASES, Activation, halves

OAI = {"alpha": 1.702, "beta": 1.0}


def default(name: str) -> Activation:
    """`name` with a value for each parameter that it needs."""
    return Activation(name, **dict.fromkeys(ACTIVATIONS[name].needs, 3.0))


RUNNABLE = sorted(set(ACTIVATIONS) - {"relu2"})
GATED = [name for name in RUNNABLE if default(name).gated]
PLAIN = [name for name in RUNNABLE if not default(name).gated]


@pytest.mark.parametrize(
    ("activation", "row", "expected"),
    [
        (Activation("silu"), [1, 2], 1.46212),
        (Activation("gelu"), [1, 2], 1.68269),
        (Activation("gelu_tanh"), [1, 2], 1.68238),
        (Activation("swigluoai"), [1, 2], 2.53739),
        (Activation("swigluoai"), [9, -9], -41.9997),
        (Activation("swigluoai_uninterleave", limit=7, **OAI), [9, -9], -41.9997),
        (Activation("swigluoai_uninterleave", limit=7), [1, 2], 1.46212),
        (Activation("silu", limit=7), [8, -9], -48.9554),
        (Activation("swiglustep"), [8, -9], -49),
        (Activation("situ", beta=1e6), [1, 2], 1.46212),
        (
            Activation("situ", beta=0.5, linear_beta=1.5),
            [3, -4],
            0.5 * math.tanh(6) * -1.5 * math.tanh(8 / 3) * 0.952574,
        ),
        (Activation("silu_no_mul"), [1], 0.731059),
        (Activation("gelu_no_mul"), [1], 0.841345),
        (Activation("gelu_tanh_no_mul"), [1], 0.841192),
        (Activation("relu2_no_mul"), [3], 9),
        (Activation("relu2_no_mul"), [-3], 0),
    ],
    ids=str,
)
def test_worked_examples(activation: Activation, row: list[float], expected: float) -> None:
    out = activation.apply(torch.tensor([row], dtype=torch.float32))
    assert out.shape == (1, 1)
    assert out.item() == pytest.approx(expected, rel=4e-6, abs=1e-9)  # six digits are given


def in_float64(activation: Activation, row: list[float]) -> float:
    """The formula of a gated activation on one (gate, up), written with `math` alone."""
    g, u = row
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    limit, name = activation.limit, activation.name
    if name == "swiglustep":
        return min(g * sigmoid(g), limit) * max(-limit, min(u, limit))
    if limit is not None:
        g, u = min(g, limit), max(-limit, min(u, limit))
    if name.startswith("swigluoai"):
        return g * sigmoid(activation.alpha * g) * (u + activation.beta)
    if name == "situ":
        return activation.beta * math.tanh(g / activation.beta) * sigmoid(g) * u
    tanh = math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))
    return (
        u
        * {
            "silu": g * sigmoid(g),
            "gelu": g * (1 + math.erf(g / 2**0.5)) / 2,
            "gelu_tanh": g * (1 + tanh) / 2,
        }[name]
    )


@pytest.mark.parametrize("name", GATED)
def test_formula_over_a_range(name: str) -> None:
    gate, up = torch.linspace(-12, 12, 49), torch.linspace(11, -13, 49)
    out = default(name).apply(torch.stack((gate, up), dim=-1))[:, 0]
    expected = [in_float64(default(name), pair) for pair in zip(gate.tolist(), up.tolist(), strict=True)]
    torch.testing.assert_close(out, torch.tensor(expected), rtol=3e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", RUNNABLE)
def test_float32_out_and_rows_untouched(name: str, dtype: torch.dtype) -> None:
    rows = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    before, out = rows.clone(), default(name).apply(rows)
    assert out.dtype == torch.float32
    assert out.shape == (2, 3, 4 if default(name).gated else 8)
    assert torch.equal(rows, before)
    torch.testing.assert_close(out, default(name).apply(rows.float()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", RUNNABLE)
def test_no_rows(name: str) -> None:
    assert default(name).apply(torch.empty(0, 6)).shape == (0, 3 if default(name).gated else 6)


@pytest.mark.parametrize("name", GATED)
def test_first_half_is_the_gate(name: str) -> None:
    rows = torch.tensor([[1.0, 2.0, 0.5, -0.25]])  # gates 1, 2; ups 0.5, -0.25
    out = default(name).apply(rows)
    for i in range(2):
        assert out[0, i].item() == pytest.approx(
            in_float64(default(name), [rows[0, i].item(), rows[0, i + 2].item()])
        )


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_gated_by_name(name: str) -> None:
    assert default(name).gated is not name.endswith("_no_mul")


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu2"])
def test_without_mul(name: str) -> None:
    twin = Activation(name).without_mul()
    assert twin == Activation(f"{name}_no_mul")
    assert twin.without_mul() == twin


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
def test_without_mul_is_the_gate_times_one(name: str) -> None:
    gate = torch.linspace(-5, 5, 21)
    gated = Activation(name).apply(torch.cat((gate, torch.ones(21))))
    assert torch.equal(gated, Activation(name).without_mul().apply(gate))


def test_without_mul_refused() -> None:
    with pytest.raises(
        ValueError, match=r"swiglustep has no form without an up half; .*gelu, gelu_tanh, relu, relu2, silu"
    ):
        Activation("swiglustep").without_mul()
    with pytest.raises(ValueError, match=r"silu_no_mul takes no limit, and limit=7 may not be dropped"):
        Activation("silu", limit=7).without_mul()


def test_relu2_refuses_to_run() -> None:
    with pytest.raises(ValueError, match="relu2 has no gated implementation; use relu2_no_mul"):
        Activation("relu2").apply(torch.ones(1, 2))


@pytest.mark.parametrize("name", GATED)
def test_odd_width(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} is gated: its row width 7 must be even"):
        default(name).apply(torch.ones(2, 7))


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_aliases(alias: str, name: str) -> None:
    assert Activation(alias) == Activation(name)
    assert Activation(alias).name == name


def test_values_are_compared_with_their_defaults() -> None:
    assert Activation("swigluoai") == Activation("swigluoai", limit=7.0, alpha=1.702, beta=1.0)
    assert hash(Activation("swiglustep")) == hash(Activation("swiglustep", limit=7.0))
    assert Activation("silu") != Activation("silu", limit=7.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "tanh"}, r"unknown activation 'tanh'; known: gelu, gelu_no_mul, .*swiglustep"),
        ({"name": "gelu", "limit": 7}, "activation gelu takes no parameter, got limit=7"),
        ({"name": "silu", "alpha": 1}, "activation silu takes limit, got alpha=1"),
        ({"name": "swigluoai_uninterleave"}, "activation swigluoai_uninterleave needs limit"),
        ({"name": "situ"}, "activation situ needs beta"),
        ({"name": "situ", "beta": 0}, "situ: beta=0 must be positive and finite"),
        ({"name": "situ", "beta": 1, "linear_beta": -1}, "situ: linear_beta=-1 must be positive and finite"),
        ({"name": "silu", "limit": float("nan")}, "silu: limit=nan must be positive and finite"),
        ({"name": "swiglustep", "limit": float("inf")}, "swiglustep: limit=inf must be positive and finite"),
    ],
)
def test_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Activation(**settings)


@pytest.mark.parametrize(
    ("shape", "dim"), [((6,), 0), ((2, 8, 3), 1), ((2, 3, 4), -1), ((0, 4), 1), ((2, 0), -1)]
)
def test_halves(shape: tuple[int, ...], dim: int) -> None:
    pairs = torch.arange(math.prod(shape)).reshape(shape)
    gates, ups = halves(pairs, dim).movedim(dim, 0).chunk(2) if shape[dim] else (pairs.movedim(dim, 0),) * 2
    assert torch.equal(gates, pairs.movedim(dim, 0)[0::2])
    assert torch.equal(ups, pairs.movedim(dim, 0)[1::2])


def test_halves_of_bytes_and_odd_sizes() -> None:
    codes: Tensor = torch.arange(4, dtype=torch.uint8)
    assert halves(codes).tolist() == [0, 2, 1, 3]
    with pytest.raises(ValueError, match=r"dimension 1 of shape \[2, 5\] is 5: pairs need an even size"):
        halves(torch.ones(2, 5), 1)


def test_interleaved_rows_become_what_apply_expects() -> None:
    interleaved = torch.tensor([[1.0, 2.0, 9.0, -9.0]])  # g0, u0, g1, u1
    out = Activation("swigluoai").apply(halves(interleaved))
    torch.testing.assert_close(out, torch.tensor([[2.53739, -41.9997]]), rtol=2e-6, atol=0)
