"""Gates: worked examples of every routing method, laws of choosing and weighing, refusals."""

import pytest
import torch
from torch import Tensor

from moeserve.experts.routing.gate import Gate
from moeserve.experts.routing.methods import ROUTINGS, SCORES, method_of, top

Z = torch.tensor([[1.0, 2.0, 3.0, 0.0]])
GROUPED_Z = torch.tensor([[2, -1, 0.5, 0.4, 1, 1.2, -2, 3]])
GROUPED_BIAS = torch.tensor([0, 0, 0.3, 0.3, 0, 0, 0, -0.5])
SIMULATED = ("uniform_random", "normal_routing")
EXACT = [name for name in ROUTINGS if name not in SIMULATED]


def gate_of(method: str, experts: int = 16, top_k: int = 3, **settings: object) -> Gate:
    """A gate of `method` with everything it needs; K = 1 and no groups where it cannot have more."""
    entry = ROUTINGS[method]
    groups = {"groups": 4, "topk_groups": 2} if entry.grouped else {}
    free = {"scoring": "sigmoid"} if entry.scoring is None else {}
    free |= {"renormalize": False} if entry.renormalize is None else {}
    free |= {"biased": True} if entry.biased is None else {}
    gate = Gate(method, experts, entry.largest_top_k or top_k, **(groups | free | settings))  # type: ignore[arg-type]
    return gate.with_bias(torch.linspace(0.2, -0.2, experts)) if gate.biased else gate


def logits_of(rows: int = 64, experts: int = 16, seed: int = 0) -> Tensor:
    return torch.randn(rows, experts, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("Default", [0.6439, 0.2369]),
        ("Renormalize", [0.7311, 0.2689]),
        ("RenormalizeNaive", [0.7311, 0.2689]),
        ("Sigmoid", [0.9526, 0.8808]),
        ("SigmoidRenorm", [0.5196, 0.4804]),
        ("TopK", [3, 2]),
        ("DeepseekV4", [0.5449, 0.4551]),
        ("MiniMax2", [0.5196, 0.4804]),
    ],
)
def test_worked_examples(method: str, expected: list[float]) -> None:
    gate = Gate(method, experts=4, top_k=2)
    ids, weights = (gate.with_bias(torch.zeros(4)) if gate.biased else gate).route(Z)
    assert ids.tolist() == [[2, 1]]
    torch.testing.assert_close(weights, torch.tensor([expected], dtype=torch.float32), rtol=0, atol=5e-5)


def test_worked_example_llama4() -> None:
    ids, weights = Gate("Llama4", experts=4, top_k=1, weight_on_input=True).route(Z)
    assert ids.tolist() == [[2]]
    assert weights.item() == pytest.approx(0.9526, abs=5e-5)


def test_worked_example_deepseek_v3() -> None:
    gate = Gate("DeepSeekV3", 8, 3, groups=4, topk_groups=2, scaling=2.5).with_bias(GROUPED_BIAS)
    ids, weights = gate.route(GROUPED_Z)
    assert ids.tolist() == [[2, 3, 5]]  # expert 7 has the best score and is lost by its bias and its group
    torch.testing.assert_close(weights, torch.tensor([[0.7821, 0.7522, 0.9656]]), rtol=0, atol=6e-5)


def test_worked_example_deepseek_v2() -> None:
    gate = Gate("DeepSeekV2", 8, 3, groups=4, topk_groups=2, renormalize=False)
    ids, weights = gate.route(GROUPED_Z)
    assert ids.tolist() == [[7, 0, 1]]
    torch.testing.assert_close(weights, torch.tensor([[0.5406, 0.1989, 0.0099]]), rtol=0, atol=5e-5)


def one_by_one(gate: Gate, z: list[float]) -> list[tuple[int, float]]:
    """Routing of one token in plain Python, by sorting and scanning, for methods that choose by score."""
    scores = SCORES[str(gate.scoring)](torch.tensor(z)).tolist()
    bias = [0.0] * gate.experts if gate.bias is None else gate.bias.tolist()
    choice = torch.tensor([s + b for s, b in zip(scores, bias, strict=True)]).tolist()  # rounded to float32
    size = gate.experts // gate.groups
    members = [range(g * size, (g + 1) * size) for g in range(gate.groups)]
    best = [
        sum(sorted((choice[i] for i in m), reverse=True)[: 1 if gate.bias is None else 2]) for m in members
    ]
    kept = sorted(range(gate.groups), key=lambda g: (-best[g], g))[: gate.topk_groups]
    able = [i for g in kept for i in members[g]]
    chosen = sorted(able, key=lambda i: (-choice[i], i))[: gate.top_k]
    total = sum(scores[i] for i in chosen) if gate.renormalize else 1.0
    return [(i, scores[i] / total * gate.scaling) for i in chosen]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("groups", "topk_groups"), [(1, 1), (4, 1), (4, 3), (8, 2)])
def test_every_setting_against_plain_python(
    scoring: str, biased: bool, renormalize: bool, groups: int, topk_groups: int
) -> None:
    settings = {"scoring": scoring, "renormalize": renormalize, "biased": biased, "groups": groups}
    gate = Gate("Unspecified", 32, 4, topk_groups=topk_groups, scaling=1.5, **settings)  # type: ignore[arg-type]
    gate = gate.with_bias(torch.linspace(-0.3, 0.3, 32).roll(5)) if biased else gate
    logits = logits_of(40, 32)
    for row, ids, weights in zip(logits.tolist(), *gate.route(logits), strict=True):
        expected = one_by_one(gate, row)
        assert ids.tolist() == [i for i, _ in expected]
        assert weights.tolist() == pytest.approx([w for _, w in expected], rel=1e-6)


@pytest.mark.parametrize("method", ROUTINGS)
def test_types_and_ranges(method: str) -> None:
    gate = gate_of(method)
    ids, weights = gate.route(logits_of().bfloat16())
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    assert ids.shape == weights.shape == (64, gate.top_k)
    assert ids.min() >= 0
    assert ids.max() < gate.experts
    assert weights.isfinite().all()


@pytest.mark.parametrize("method", EXACT)
def test_experts_of_a_token_differ(method: str) -> None:
    ids, _ = gate_of(method).route(logits_of())
    assert all(len(set(row)) == len(row) for row in ids.tolist())


@pytest.mark.parametrize("method", ROUTINGS)
def test_no_tokens(method: str) -> None:
    gate = gate_of(method)
    ids, weights = gate.route(torch.empty(0, 16))
    assert ids.shape == weights.shape == (0, gate.top_k)


@pytest.mark.parametrize("method", EXACT)
def test_equal_logits_go_to_lower_ids(method: str) -> None:
    gate = gate_of(method, experts=64, top_k=4)
    gate = gate.with_bias(torch.zeros(64)) if gate.biased else gate
    ids, _ = gate.route(torch.zeros(33, 64))
    assert ids.tolist() == [list(range(gate.top_k))] * 33


@pytest.mark.parametrize("method", EXACT)
def test_a_token_routes_alone_as_in_a_batch(method: str) -> None:
    gate, logits = gate_of(method), logits_of()
    together, alone = gate.route(logits), [gate.route(row[None]) for row in logits]
    assert torch.equal(together[0], torch.cat([ids for ids, _ in alone]))
    torch.testing.assert_close(together[1], torch.cat([w for _, w in alone]), rtol=3e-7, atol=0)


@pytest.mark.parametrize("method", [name for name in EXACT if gate_of(name).renormalize])
@pytest.mark.parametrize("scaling", [1.0, 2.5])
def test_renormalized_weights_sum_to_the_scaling(method: str, scaling: float) -> None:
    if not ROUTINGS[method].scaled and scaling != 1.0:
        with pytest.raises(
            ValueError, match=rf"routing {method} does not scale its weights, got scaling=2\.5"
        ):
            gate_of(method, scaling=scaling)
        return
    _, weights = gate_of(method, scaling=scaling).route(logits_of())
    torch.testing.assert_close(weights.sum(-1), torch.full((64,), scaling))


def test_renormalize_equals_its_naive_form() -> None:
    (ids, weights), naive = (gate_of(name).route(logits_of()) for name in ("Renormalize", "RenormalizeNaive"))
    assert torch.equal(ids, naive[0])
    torch.testing.assert_close(weights, naive[1])


@pytest.mark.parametrize("method", EXACT)
def test_nan_counts_as_lowest(method: str) -> None:
    gate, logits = gate_of(method), logits_of()
    logits[:, 5] = float("-inf")
    expected = gate.route(logits)
    logits[:, 5] = float("nan")
    assert all(torch.equal(a, b) for a, b in zip(gate.route(logits), expected, strict=True))


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_row_gets_finite_weights_and_disturbs_no_other(method: str, value: float) -> None:
    gate, logits = gate_of(method), logits_of()
    clean = gate.route(logits)
    logits[7] = value
    ids, weights = gate.route(logits)
    assert weights.isfinite().all()
    assert ids.min() >= 0
    others = torch.arange(64) != 7
    assert torch.equal(ids[others], clean[0][others])
    torch.testing.assert_close(weights[others], clean[1][others], rtol=3e-7, atol=0)


@pytest.mark.parametrize("method", ["Default", "Renormalize", "RenormalizeNaive"])
def test_an_infinite_logit_wins(method: str) -> None:
    logits = logits_of(1)
    logits[0, 9] = float("inf")
    ids, weights = gate_of(method).route(logits)
    assert ids[0, 0] == 9
    assert weights.tolist() == [[1.0, 0.0, 0.0]]


def test_bias_chooses_and_does_not_weigh() -> None:
    bias = torch.tensor([0.0, 0.0, 0.0, 10.0])
    ids, weights = Gate("MiniMax2", 4, 1).with_bias(bias).route(Z)
    assert (ids.item(), weights.item()) == (3, 1.0)
    gate = Gate("Unspecified", 4, 1, scoring="sigmoid", renormalize=False, biased=True)
    assert gate.with_bias(bias).route(Z)[1].item() == 0.5


def test_weights_round_to_the_dtype_of_the_logits() -> None:
    logits = logits_of().bfloat16()
    exact = Gate("Renormalize", 16, 3).route(logits)[1]
    rounded = Gate("Renormalize", 16, 3, logits_dtype_weights=True).route(logits)[1]
    assert rounded.dtype == torch.float32
    assert torch.equal(rounded, exact.bfloat16().float())
    assert not torch.equal(rounded, exact)


def test_weigh_experts_of_a_hash_table() -> None:
    gate = Gate("DeepseekV4", 16, 3, scaling=1.5)
    table = torch.randint(16, (100, 3), generator=torch.Generator().manual_seed(1))  # token id -> experts
    tokens, logits = torch.arange(0, 64), logits_of()
    scores = torch.log1p(logits.double().exp()).sqrt().gather(1, table[tokens])
    expected = scores / scores.sum(-1, keepdim=True) * 1.5
    torch.testing.assert_close(gate.weigh(logits, table[tokens]), expected.float())


@pytest.mark.parametrize("method", EXACT)
def test_weigh_agrees_with_route(method: str) -> None:
    gate, logits = gate_of(method), logits_of()
    ids, weights = gate.route(logits)
    assert torch.equal(gate.weigh(logits, ids), weights)


def test_uniform_simulation() -> None:
    torch.manual_seed(0)
    ids, weights = gate_of("uniform_random", experts=8, top_k=4).route(torch.zeros(2000, 8))
    assert torch.equal(weights, torch.ones(2000, 4))
    shares = torch.bincount(ids.flatten().long(), minlength=8) / 8000
    assert (shares - 1 / 8).abs().max() < 0.02
    assert any(len(set(row)) < 4 for row in ids.tolist())


def test_normal_simulation() -> None:
    torch.manual_seed(0)
    ids, weights = gate_of("normal_routing", experts=8, top_k=4).route(torch.zeros(2000, 8))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2000))
    assert (weights >= 0).all()
    counts = torch.bincount(ids.flatten().long(), minlength=8)
    assert counts[3:5].sum() > 3 * counts[[0, 7]].sum()  # the middle is hot


def test_top_is_stable() -> None:
    assert top(torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0]]), 4).tolist() == [[1, 2, 4, 3]]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("sigmoid", True, True, 8, 2.5), "DeepSeekV3"),
        (("sigmoid", True, True, 1, 2.5), "DeepSeekV3"),
        (("sigmoid", False, True, 8, 2.5), "Unspecified"),
        (("sigmoid", True, True, None, None), "MiniMax2"),
        (("sigmoid", True, True, 0, 1.0), "MiniMax2"),
        (("sigmoid", True, True, None, 2.0), "Unspecified"),
        (("sigmoid", False, True, None, 1.0), "Unspecified"),
        (("softmax", True, True, None, 1.0), "Unspecified"),
        (("sigmoid", True, False, None, 1.0), "SigmoidRenorm"),
        (("sigmoid", False, False, None, 1.0), "Sigmoid"),
        (("softmax", True, False, None, 1.0), "RenormalizeNaive"),
        (("softmax", False, False, None, 16.0), "Default"),
        (("softmax", False, False, 8, 16.0), "DeepSeekV2"),
        (("sigmoid", False, False, 8, 1.0), "Unspecified"),
        (("sqrtsoftplus", True, True, None, 1.5), "DeepseekV4"),
        (("sqrtsoftplus", False, True, None, 1.5), "Unspecified"),
        (("relu", True, False, None, 1.0), "Unspecified"),
    ],
)
def test_method_of_settings(
    settings: tuple[str, bool, bool, int | None, float | None], expected: str
) -> None:
    scoring, renormalize, biased, groups, scaling = settings
    named = {"renormalize": renormalize, "biased": biased, "groups": groups, "scaling": scaling}
    assert method_of(scoring, **named) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("scoring", sorted(SCORES))
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("groups", [None, 1, 4])
@pytest.mark.parametrize("scaling", [None, 1.0, 2.5])
def test_a_gate_has_the_settings_its_method_was_named_for(
    scoring: str, renormalize: bool, biased: bool, groups: int | None, scaling: float | None
) -> None:
    method = method_of(scoring, renormalize=renormalize, biased=biased, groups=groups, scaling=scaling)
    if method == "DeepseekV4":
        biased = True  # without bias such a layer is hash-routed, and its gate only weighs
    gate = Gate(
        method, 16, 2, groups or 1, 1, scaling or 1.0, scoring=scoring, renormalize=renormalize, biased=biased
    )
    assert (gate.scoring, gate.renormalize, gate.biased) == (scoring, renormalize, biased)


SIGMOID = {"scoring": "sigmoid", "renormalize": True, "biased": True}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "Best"}, r"unknown routing method 'Best'; known: DeepSeekV2, .*uniform_random"),
        ({"scoring": "sigmoid"}, "routing Default has scoring=softmax, got scoring=sigmoid"),
        ({"renormalize": True}, "routing Default has renormalize=False, got renormalize=True"),
        ({"biased": True}, "routing Default has biased=False, got biased=True"),
        ({"method": "Unspecified"}, "routing Unspecified needs scoring to be given"),
        (
            {"method": "Unspecified", **SIGMOID, "scoring": "relu"},
            "unsupported scoring function 'relu'; known: logits",
        ),
        ({"method": "DeepSeekV2"}, "routing DeepSeekV2 needs renormalize to be given"),
        ({"top_k": 0}, "top_k=0 must be between 1 and experts=8"),
        ({"top_k": 9}, "top_k=9 must be between 1 and experts=8"),
        ({"method": "Llama4"}, "routing Llama4 needs top_k=1, got top_k=2"),
        ({"weight_on_input": True}, "a weight on the input needs top_k=1, got top_k=2"),
        ({"groups": 2}, "routing Default has no groups, got groups=2"),
        (
            {"method": "DeepSeekV3", "groups": 3},
            "experts=8 must be a multiple of groups=3, two or more in each",
        ),
        (
            {"method": "DeepSeekV3", "groups": 8},
            "experts=8 must be a multiple of groups=8, two or more in each",
        ),
        (
            {"method": "DeepSeekV3", "groups": 4, "topk_groups": 5},
            "topk_groups=5 must be between 1 and groups=4",
        ),
        (
            {"method": "DeepSeekV3", "groups": 4, "topk_groups": 0},
            "topk_groups=0 must be between 1 and groups=4",
        ),
        (
            {"method": "DeepSeekV3", "groups": 4, "top_k": 3},
            "top_k=3 is more than the 1 groups of 2 experts a token",
        ),
        (
            {"method": "MiniMax2", "scaling": 2.0},
            "routing MiniMax2 does not scale its weights, got scaling=2.0",
        ),
        ({"bias": torch.zeros(8)}, r"routing Default has no correction bias, got one of \[8\]"),
        (
            {"method": "MiniMax2", "bias": torch.zeros(7)},
            r"a correction bias must be \[8\] torch.float32, got \[7\]",
        ),
        ({"method": "MiniMax2", "bias": torch.full((8,), float("nan"))}, "a correction bias must be finite"),
    ],
)
def test_refused(settings: dict[str, object], message: str) -> None:
    given = {"method": "Default", "experts": 8, "top_k": 2} | settings
    with pytest.raises(ValueError, match=message):
        Gate(**given)  # type: ignore[arg-type]


def test_route_refuses() -> None:
    with pytest.raises(ValueError, match=r"router logits must be \[T, 8\], got \[3, 9\]"):
        Gate("Default", 8, 2).route(torch.zeros(3, 9))
    with pytest.raises(
        ValueError, match=r"routing DeepSeekV3 needs its correction bias \[8\]: see with_bias"
    ):
        Gate("DeepSeekV3", 8, 2).route(torch.zeros(3, 8))
