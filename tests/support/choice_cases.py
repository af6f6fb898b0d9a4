"""The kernels of choices beside the torch code: on a GPU, or under Triton's interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from moeserve.experts.placement import EMPTY, Placement
from moeserve.experts.routing import address_kernels
from moeserve.experts.routing import device_splitter as replicas
from moeserve.experts.routing import gate as gates
from moeserve.experts.routing.address_book import AddressBook
from moeserve.experts.routing.choice_kernels import choose, count, merge
from moeserve.experts.routing.choices import Choices, StepAddressing, addressed, merge_duplicates, routed
from moeserve.experts.routing.gate import Gate
from moeserve.experts.routing.meter import LoadMeter
from moeserve.experts.routing.methods import ROUTINGS, choose_by_score

INF = float("inf")
SIMULATED = [name for name, entry in ROUTINGS.items() if entry.choose is not choose_by_score]


def every_gate() -> list[Gate]:
    """Each method with every setting that it takes."""
    made = []
    for name, entry in ROUTINGS.items():
        if name in SIMULATED:
            continue
        settings = (
            {"scoring": "softmax", "renormalize": True, "biased": False} if name == "Unspecified" else {}
        )
        if entry.renormalize is None:
            settings["renormalize"] = settings.get("renormalize", False)
        top = 1 if entry.largest_top_k == 1 else 3
        made.append(Gate(name, 16, top, **settings))
        made.append(Gate(name, 21, top, **settings))
        if entry.scaled:
            made.append(Gate(name, 16, top, scaling=2.5, **settings))
        if entry.grouped:
            made.append(Gate(name, 16, top, groups=4, topk_groups=2, **settings))
            made.append(Gate(name, 32, 8, groups=8, topk_groups=4, logits_dtype_weights=True, **settings))
    return made


@contextmanager
def kernels_everywhere() -> Iterator[None]:
    """Gates route, and address books resolve, as on a GPU."""
    seen = gates.kernels_serve
    gates.kernels_serve = replicas.kernels_serve = lambda device: True
    try:
        yield
    finally:
        gates.kernels_serve = replicas.kernels_serve = seen


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
    with kernels_everywhere():
        ids, weights = (found.cpu() for found in own.route(logits.to(device)))
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


def check_address(placement: Placement, choice: str, rows: int, top: int, device: str) -> None:
    """One launch gives what folding, resolving and counting do, one after another."""
    draw = torch.Generator().manual_seed(rows + top)
    experts = torch.randint(-1, placement.experts + 2, (rows, top), generator=draw, dtype=torch.int32)
    weights = torch.randint(-4, 5, (rows, top), generator=draw).float()
    weights = torch.where(experts < 0, float("nan"), weights)
    chosen, layer = Choices(experts, weights, torch.arange(rows) % 4 != 2), 1
    sizes, case = (*placement.slots.shape, placement.experts), (placement.slots.shape, choice, rows, top)
    meter, counted = (LoadMeter((sizes[0], sizes[2], sizes[1]), there) for there in (device, "cpu"))
    with kernels_everywhere():
        book = AddressBook(placement, device, choice, 1)
    given = Choices(*(column.to(device) for column in chosen))
    slots, summed = addressed(given, StepAddressing(layer, book, meter, rows))
    kept, wanted = merge_duplicates(*chosen)
    resolved = book.resolve(layer, kept.to(device), given.valid)
    counted.count(layer, kept, resolved.cpu(), rows)
    assert slots.dtype == torch.int32 and torch.equal(slots, resolved), (case, slots, resolved)
    assert summed.dtype == torch.float32 and torch.equal(summed.cpu(), wanted), (case, summed, wanted)
    held = torch.from_numpy(np.append(placement.slots[layer], EMPTY))[slots.cpu().long()]
    assert torch.equal(held, torch.where(kept < placement.experts, kept, EMPTY)), case
    found, load = (each.snapshot(0.0).read() for each in (meter, counted))
    assert (found.tokens == load.tokens).all() and (found.slots == load.slots).all(), case


def check_route(placement: Placement, choice: str, device: str) -> None:
    """Logits give what the gate's choice does, in another launch."""
    gate, rows = Gate("DeepSeekV3", placement.experts, 4, groups=4, topk_groups=2, scaling=2.5), 9
    gate = gate.with_bias(torch.linspace(-0.1, 0.1, placement.experts, device=device))
    logits = torch.randn(rows, placement.experts, device=device)
    valid = torch.arange(rows, device=device) % 4 != 2
    layers, slots = placement.slots.shape
    meters = [LoadMeter((layers, placement.experts, slots), device) for _ in range(2)]
    with kernels_everywhere():
        book = AddressBook(placement, device, choice, 1)
        assert gate.in_one_launch(logits)
        addressings = [StepAddressing(1, book, meter, rows) for meter in meters]
        found = routed(gate, logits, valid, addressings[0])
        wanted = addressed(Choices(*gate.route(logits), valid), addressings[1])
        with pytest.raises(ValueError, match="must be"):
            routed(gate, logits[:, 1:], valid, addressings[0])
    assert all(map(torch.equal, found, wanted)), (choice, found, wanted)
    assert int((found[0] == EMPTY).sum()) == 4 * int((~valid).sum())
    one, other = (meter.snapshot(0.0).read() for meter in meters)
    assert (one.tokens == other.tokens).all() and (one.slots == other.slots).all() and one.tokens.any()


def check_addresses(device: str) -> None:
    """Without and with room for replicas; where compiling takes no time, in all ranges of choices."""
    even, random = Placement.even(2, 16, 4), np.random.default_rng(0)
    slots = random.permuted([[*range(16), 3, 3, 7, EMPTY]] * 2, axis=1)
    replicated = Placement(slots.astype(np.int32), 4, 16)
    sizes = ((0, 8), (37, 8))
    usual = address_kernels.WHOLE, address_kernels.CHUNK
    if device == "cpu":
        address_kernels.WHOLE, address_kernels.CHUNK = ((64, 16, 4), (256, 16, 4), (512, 32, 8)), 256
        sizes = ((0, 4), (5, 3), (20, 8), (37, 8), (100, 6))
    books = ((even, "hash"), (even, "lp"), (replicated, "lp"), (replicated, "waterfill"))
    for placement, choice in books:
        for rows, top in sizes:
            check_address(placement, choice, rows, top, device)
        check_route(placement, choice, device)
    address_kernels.WHOLE, address_kernels.CHUNK = usual


def check_all(device: str) -> None:
    """Every case, on tensors of `device`."""
    for number, gate in enumerate(every_gate()):
        check_gate(gate, (torch.float32, torch.bfloat16)[number % 2], device)
    for rows, top in ((0, 4), (1, 1), (5, 2), (37, 8), (16, 3)):
        check_merge(rows, top, device)
    check_count(device)
    check_addresses(device)
    none = torch.empty(0, 16, device=device)
    empty_ids, empty_weights = choose(Gate("Default", 16, 3), none)
    assert empty_ids.shape == empty_weights.shape == (0, 3)
