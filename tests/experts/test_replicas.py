"""Laws of every replica choice: a slot of the expert, the same each time, no fuller a rank than by hash."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.experts.placement import EMPTY, Placement
from moeserve.experts.routing.address_book import AddressBook
from moeserve.experts.routing.replicas import REPLICA_CHOICES, Crowd, choice_named

SPLITS = [name for name, entry in REPLICA_CHOICES.items() if entry.split is not None and not entry.least_rows]
SIZES = [  # experts, ranks, slots a rank
    (16, 4, 4),  # no spare slot
    (16, 4, 6),
    (10, 4, 5),
    (8, 4, 8),
    (3, 6, 4),  # up to 19 replicas
    (1, 3, 2),
    (64, 1, 70),
    (64, 16, 6),
    (256, 4, 66),
]

every = pytest.mark.parametrize("choice", REPLICA_CHOICES)
sizes = pytest.mark.parametrize("size", SIZES, ids=str)


def placed(size: tuple[int, int, int], seed: int = 0, layers: int = 2) -> Placement:
    """Every expert somewhere, hot ones in spare slots, a few of those empty, two of a kind on some ranks."""
    experts, ranks, width = size
    random, rows = np.random.default_rng(seed), []
    for _ in range(layers):
        spare = random.geometric(0.2, ranks * width - experts).clip(0, experts) - 1  # 0 becomes EMPTY
        rows.append(random.permutation(np.concatenate([np.arange(experts), spare])))
    return Placement(np.stack(rows), ranks, experts)


def chosen(experts: int, rows: int, seed: int = 0) -> Tensor:
    """Ids [rows, 4], small ones hot, a few of them none."""
    random = np.random.default_rng(seed)
    ids = random.geometric(min(0.9, 8 / experts), (rows, 4)) % experts
    return torch.from_numpy(np.where(random.random(ids.shape) < 0.05, EMPTY, ids).astype(np.int32))


def everything(rows: int) -> Tensor:
    return torch.ones(rows, dtype=torch.bool)


def fullest(slots: Tensor, placement: Placement) -> int:
    """Rows of the fullest rank."""
    owners = slots[slots != EMPTY].long() // placement.slots_per_owner
    return int(torch.bincount(owners, minlength=placement.owners).max())


def bound(placement: Placement, layer: int, experts: Tensor) -> float:
    """The least that the fullest rank can have: what must lie inside some set of ranks, over their number."""
    counts = np.bincount(experts[experts != EMPTY].numpy(), minlength=placement.experts)
    holders = np.zeros((placement.experts, placement.owners), dtype=bool)
    for slot, expert in enumerate(placement.slots[layer]):
        if expert != EMPTY:
            holders[expert, slot // placement.slots_per_owner] = True
    found = 0.0
    for subset in range(1, 1 << placement.owners):
        inside = np.array([bool(subset >> rank & 1) for rank in range(placement.owners)])
        found = max(found, counts[~(holders & ~inside).any(axis=1)].sum() / inside.sum())
    return found


@every
@sizes
def test_an_expert_gets_a_slot_that_holds_it_and_none_stays_none(
    choice: str, size: tuple[int, int, int]
) -> None:
    placement = placed(size)
    book = AddressBook(placement, choice=choice, lane=1)
    for rows in (0, 1, 7, 200):
        experts, valid = chosen(size[0], rows), torch.arange(rows) % 5 != 3
        for layer in range(placement.layers):
            slots = book.resolve(layer, experts, valid)
            assert (slots.dtype, slots.shape) == (torch.int32, experts.shape)
            held = torch.from_numpy(np.append(placement.slots[layer], EMPTY))[slots.long()]
            assert torch.equal(held, torch.where(valid[:, None], experts, EMPTY))
            assert torch.equal(slots, book.resolve(layer, experts, valid))


@every
def test_ids_out_of_range_resolve_to_none(choice: str) -> None:
    experts = torch.tensor([[0, 16, 99], [-7, 3, -1]])
    slots = AddressBook(placed((16, 4, 6)), choice=choice).resolve(0, experts, everything(2))
    assert (slots == EMPTY).tolist() == [[False, True, True], [True, False, True]]


@pytest.mark.parametrize("choice", SPLITS)
@sizes
def test_the_fullest_rank_is_no_fuller_than_by_hash_on_average(
    choice: str, size: tuple[int, int, int]
) -> None:
    placement = placed(size, layers=4)
    books = [AddressBook(placement, choice=name) for name in ("hash", choice)]
    most = np.zeros(2)
    for seed in range(8):
        experts = chosen(size[0], 100, seed)
        for layer in range(placement.layers):
            most += [fullest(book.resolve(layer, experts, everything(100)), placement) for book in books]
    assert most[1] <= most[0]
    if max(np.bincount(row[row >= 0]).max() for row in placement.slots) > 1 < size[1]:
        assert most[1] < most[0]


@pytest.mark.parametrize("size", [size for size in SIZES if size[1] <= 6], ids=str)
def test_lp_comes_within_a_row_or_two_of_the_best_split(size: tuple[int, int, int]) -> None:
    placement = placed(size, layers=4)
    book, beyond = AddressBook(placement, choice="lp"), []
    for seed in range(6):
        experts = chosen(size[0], 150, seed)
        for layer in range(placement.layers):
            most = fullest(book.resolve(layer, experts, everything(150)), placement)
            beyond.append(most - bound(placement, layer, experts))
    assert min(beyond) > -1e-9
    assert np.mean(beyond) < 1.0
    assert max(beyond) < 4.0


@pytest.mark.parametrize("choice", SPLITS)
def test_what_cannot_be_even_falls_to_another_rank_in_each_lane(choice: str) -> None:
    placement = Placement(np.array([[0, 0, 0, 0]]), 4, 1)  # one expert on four ranks, and 5 rows
    experts = torch.zeros(5, 1, dtype=torch.int32)
    fuller = []
    for lane in range(4):
        slots = AddressBook(placement, choice=choice, lane=lane).resolve(0, experts, everything(5))
        counts = torch.bincount(slots.flatten(), minlength=4)
        assert sorted(counts.tolist()) == [1, 1, 1, 2]
        fuller.append(int(counts.argmax()))
    assert sorted(fuller) == [0, 1, 2, 3]


@pytest.mark.parametrize("choice", SPLITS)
def test_a_split_is_of_whole_rows_among_holders(choice: str) -> None:
    split, random = choice_named(choice).split, torch.Generator().manual_seed(0)
    assert split is not None
    for ranks in (1, 2, 5, 64):
        holders = torch.rand(12, ranks, generator=random) < 0.4
        holders[:, 0] = True
        holders[-2:] = False  # entries that no expert takes
        shared = torch.randint(0, 90, (12,), generator=random) * holders.any(1)
        found = split(Crowd(shared, holders, torch.randint(0, 300, (ranks,), generator=random)))
        assert torch.equal(found.sum(1), shared)
        assert bool((found >= 0).all()) and not found[~holders].any()


@every
def test_a_book_that_is_updated_keeps_its_tensors_and_answers_as_a_new_one(choice: str) -> None:
    old, new = placed((16, 4, 6), seed=1), placed((16, 4, 6), seed=2)
    book, experts = AddressBook(old, choice=choice), chosen(16, 50)
    tensors = [value for part in (book, book._splitter) for value in vars(part or object).values()]
    places = [value.data_ptr() for value in tensors if isinstance(value, Tensor)]
    book.update_layer(1, new.slots[1])
    for layer, placement in ((0, old), (1, new)):
        fresh = AddressBook(placement, choice=choice).resolve(layer, experts, everything(50))
        assert torch.equal(book.resolve(layer, experts, everything(50)), fresh)
    tensors = [value for part in (book, book._splitter) for value in vars(part or object).values()]
    assert places == [value.data_ptr() for value in tensors if isinstance(value, Tensor)]


def test_an_unknown_choice_is_refused_with_those_known() -> None:
    with pytest.raises(ValueError, match="unknown replica choice 'best'; known: hash, waterfill, lp"):
        AddressBook(placed((16, 4, 6)), choice="best")


@pytest.mark.gpu(1)
@every
def test_on_a_gpu_a_choice_waits_for_nothing_and_a_graph_follows_a_new_placement(choice: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    old, new = placed((256, 4, 66), seed=1), placed((256, 4, 66), seed=2)
    book, experts = AddressBook(old, "cuda", choice, 2), chosen(256, 128).cuda()
    valid = everything(128).cuda()
    book.resolve(0, experts, valid)
    torch.cuda.set_sync_debug_mode("error")
    try:
        book.resolve(0, experts, valid)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        slots = book.resolve(0, experts, valid)
    for placement in (old, new):
        book.update(placement)
        graph.replay()
        there = "lp" if choice == "auto" else choice  # what auto is on a GPU
        cpu = AddressBook(placement, "cpu", there, 2).resolve(0, experts.cpu(), valid.cpu())
        held, wanted = (
            torch.from_numpy(np.append(placement.slots[0], EMPTY))[s.cpu().long()] for s in (slots, cpu)
        )
        assert torch.equal(held, wanted)
        assert abs(fullest(slots.cpu(), placement) - fullest(cpu, placement)) <= 2
