"""The kernels of choices beside the torch code: on a GPU, or under Triton's interpreter."""

import torch
from torch import Tensor

from moeserve.dispatch.routing import merge_duplicates
from moeserve.experts import gate as gates
from moeserve.experts.choice_kernels import choose, count, merge
from moeserve.experts.gate import Gate
from moeserve.experts.meter import LoadMeter
from moeserve.experts.routing_methods import ROUTINGS, choose_by_score

INF = float("inf")
SIMULATED = [name for name, row in ROUTINGS.items() if row.choose is not choose_by_score]


def every_gate() -> list[Gate]:
    """Each method with every setting that it takes."""
    made = []
    for name, row in ROUTINGS.items():
        if name in SIMULATED:
            continue
        settings = (
            {"scoring": "softmax", "renormalize": True, "biased": False} if name == "Unspecified" else {}
        )
        if row.renormalize is None:
            settings["renormalize"] = settings.get("renormalize", False)
        top = 1 if row.largest_top_k == 1 else 3
        made.append(Gate(name, 16, top, **settings))
        made.append(Gate(name, 21, top, **settings))
        if row.scaled:
            made.append(Gate(name, 16, top, scaling=2.5, **settings))
        if row.grouped:
            made.append(Gate(name, 16, top, groups=4, topk_groups=2, **settings))
            made.append(Gate(name, 32, 8, groups=8, topk_groups=4, logits_dtype_weights=True, **settings))
    return made


def on_device(gate: Gate, logits: Tensor) -> tuple[Tensor, Tensor]:
    """`Gate.route` as it goes on a GPU."""
    seen, gates.kernels_serve = gates.kernels_serve, lambda device: True
    try:
        return gate.route(logits)
    finally:
        gates.kernels_serve = seen


def check_gate(gate: Gate, dtype: torch.dtype, device: str) -> None:
    draw = torch.Generator().manual_seed(gate.experts + gate.groups)
    logits = torch.randn(9, gate.experts, generator=draw)
    logits[1] = 0.25  # all equal: by rising id
    logits[2, ::2] = logits[2, 0]
    logits[3, 5], logits[4, 2], logits[5, 7] = float("nan"), INF, -INF
    logits[6] = float("nan")
    logits[7] = -INF
    logits[8] *= 40
    logits = logits.to(dtype)
    if gate.biased:
        gate = gate.with_bias(torch.randn(gate.experts, generator=draw) / 4)
    wanted_ids, wanted = gate.route(logits)
    own = gate if gate.bias is None else gate.with_bias(gate.bias.to(device))
    ids, weights = (found.cpu() for found in on_device(own, logits.to(device)))
    case = (gate.method, gate.experts, gate.groups, gate.scaling, dtype)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32, case
    assert torch.equal(ids, wanted_ids), (case, ids, wanted_ids)
    close = dtype if gate.logits_dtype_weights else torch.float32
    error = 2 * torch.finfo(close).eps
    assert torch.allclose(weights, wanted, rtol=max(error, 1e-6), atol=1e-7), (case, weights, wanted)


def check_merge(rows: int, top: int, device: str) -> None:
    draw = torch.Generator().manual_seed(rows + top)
    experts = torch.randint(-1, 5, (rows, top), generator=draw, dtype=torch.int32)
    weights = torch.randint(-4, 5, (rows, top), generator=draw).float()  # whole: sums are exact in any order
    weights = torch.where(experts < 0, float("nan"), weights)
    valid = torch.arange(rows) % 4 != 2
    merged = merge(*(given.to(device) for given in (experts, weights, valid)))
    for found, wanted in zip(merged, merge_duplicates(experts, weights, valid), strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found.cpu(), wanted), (rows, top, found, wanted)


def check_count(device: str) -> None:
    experts = torch.randint(-2, 13, (70, 5), dtype=torch.int32)  # some below 0, some past 9
    slots = torch.randint(-1, 14, (70, 5), dtype=torch.int32)
    meter = LoadMeter((2, 10, 12))
    meter.count(1, experts, slots, 1)
    wanted = meter.snapshot(0.0).read()
    by_expert, by_slot = (torch.zeros(size, dtype=torch.int64, device=device) for size in (10, 12))
    count(experts.to(device), slots.to(device), by_expert, by_slot)
    assert by_expert.tolist() == wanted.tokens[0, 1].tolist()
    assert by_slot.tolist() == wanted.slots[0, 1].tolist()
    assert int(by_expert.sum()) > 0


def check_all(device: str) -> None:
    """Every case, on tensors of `device`."""
    for number, gate in enumerate(every_gate()):
        check_gate(gate, (torch.float32, torch.bfloat16)[number % 2], device)
    for rows, top in ((0, 4), (1, 1), (5, 2), (37, 8), (16, 3)):
        check_merge(rows, top, device)
    check_count(device)
    none = torch.empty(0, 16, device=device)
    empty_ids, empty_weights = choose(Gate("Default", 16, 3), none, "softmax", "score", 1e-20)
    assert empty_ids.shape == empty_weights.shape == (0, 3)
