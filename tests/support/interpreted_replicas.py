"""Runs the replica kernels under Triton's interpreter beside the torch splits, in a process of its own."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import sys

import language_once  # noqa: F401
import numpy as np
import torch
from torch import Tensor

from moeserve.experts.placement import EMPTY, Placement
from moeserve.experts.routing import address_kernels as kernels
from moeserve.experts.routing.address_book import AddressBook
from moeserve.experts.routing.device_splitter import DeviceSplitter
from moeserve.experts.routing.replicas import Size, choice_named

SIZES = [  # experts, ranks, slots a rank
    (16, 4, 4),  # no replicas at all
    (16, 4, 6),
    (10, 4, 5),  # experts that do not divide by the ranks
    (3, 6, 4),  # up to 19 replicas, some on one rank
    (1, 3, 2),
    (20, 1, 24),
    (64, 16, 6),
    (256, 4, 66),
]
REPLICATED = {(16, 4, 6), (3, 6, 4)}
FEW, MANY = 7, 32


def placed(size: tuple[int, int, int], seed: int) -> Placement:
    """Hot experts in spare slots, a few of those empty, two layers."""
    experts, ranks, width = size
    random = np.random.default_rng(seed)
    spare = random.geometric(0.2, (2, ranks * width - experts)).clip(0, experts) - 1
    slots = np.concatenate([np.tile(np.arange(experts), (2, 1)), spare], axis=1)
    return Placement(random.permuted(slots, axis=1), ranks, experts)


def chosen(experts: int, rows: int, seed: int) -> Tensor:
    """Ids [rows, 4], small ones hot, some of them none or out of range."""
    random = np.random.default_rng(seed)
    ids = random.geometric(min(0.9, 8 / experts), (rows, 4)) % experts
    ids = np.where(random.random(ids.shape) < 0.05, EMPTY, ids)
    return torch.from_numpy(np.where(random.random(ids.shape) < 0.02, experts + 3, ids).astype(np.int64))


def on_device(placement: Placement, choice: str, lane: int) -> DeviceSplitter:
    layers, slots = placement.slots.shape
    split = choice_named(choice).split
    assert split is not None
    found = DeviceSplitter(Size(layers, placement.experts, slots, placement.owners), split, lane, "cpu")
    for layer, row in enumerate(placement.slots):
        found.update_layer(layer, row)
    return found


def loads(slots: Tensor, placement: Placement) -> Tensor:
    owners = slots[slots != EMPTY].long() // placement.slots_per_owner
    return torch.bincount(owners, minlength=placement.owners)


def check(placement: Placement, choice: str, experts: Tensor, lane: int) -> int:
    """Rows of the fullest rank beyond those of the torch path."""
    rows, case = len(experts), (placement.slots.shape, placement.owners, choice, len(experts), lane)
    splitter, valid = on_device(placement, choice, lane), torch.arange(rows) % 5 != 3
    book, layer = AddressBook(placement, choice=choice, lane=lane), lane % 2
    slots = splitter.choose(layer, experts, valid)
    assert (slots.dtype, slots.shape) == (torch.int32, experts.shape), case
    known = (experts >= 0) & (experts < placement.experts) & valid[:, None]
    held = torch.from_numpy(np.append(placement.slots[layer], EMPTY))[slots.long()]
    assert torch.equal(held.long(), torch.where(known, experts, EMPTY)), case
    if rows == FEW:
        assert torch.equal(slots, splitter.choose(layer, experts.int(), valid)), case
    found, wanted = (loads(s, placement) for s in (slots, book.resolve(layer, experts, valid)))
    if choice == "waterfill":
        assert torch.equal(found, wanted), (case, found, wanted)
    beyond = int(found.max()) - int(wanted.max())
    assert beyond <= 1, (case, found, wanted)
    return beyond


def check_an_expert_with_four_replicas() -> None:
    placement = Placement(np.array([[0, 0, 0, 0]]), 4, 1)
    experts, fuller = torch.zeros(5, 1, dtype=torch.int32), []
    for choice in ("lp", "waterfill"):
        for lane in range(4):
            slots = on_device(placement, choice, lane).choose(0, experts, torch.ones(5, dtype=torch.bool))
            assert sorted(loads(slots, placement).tolist()) == [1, 1, 1, 2], choice
            fuller.append(int(loads(slots, placement).argmax()))
    assert sorted(fuller[:4]) == sorted(fuller[4:]) == [0, 1, 2, 3]


def check_rewritten_tables() -> None:
    old, new = (placed((16, 4, 6), seed) for seed in (1, 2))
    splitter, experts, valid = on_device(old, "lp", 1), chosen(16, 50, 0), torch.ones(50, dtype=torch.bool)
    places = (splitter.home.data_ptr(), splitter.cells.data_ptr())
    splitter.update_layer(1, new.slots[1])
    assert places == (splitter.home.data_ptr(), splitter.cells.data_ptr())
    for layer, placement in ((0, old), (1, new)):
        fresh = on_device(placement, "lp", 1).choose(layer, experts, valid)
        assert torch.equal(splitter.choose(layer, experts, valid), fresh)


def main() -> None:
    beyond = []
    for number, size in enumerate(SIZES):
        for rows in (0, FEW, MANY) if size in REPLICATED else (FEW,):
            for choice in ("lp", "waterfill"):
                experts = chosen(size[0], rows, number + rows)
                beyond.append(check(placed(size, number), choice, experts, number % size[1]))
    check_an_expert_with_four_replicas()
    check_rewritten_tables()
    kernels.WHOLE, kernels.CHUNK = ((256, 16, 4), (512, 32, 4)), 256  # smaller than they are
    for rows in (60, 100, 280):  # counted by every program at once, in wider ones, in a launch before
        beyond.append(check(placed((16, 4, 6), 3), "lp", chosen(16, rows, rows), 1))
    print(f"checked: on average {np.mean(beyond):.3f} rows beyond the torch path", file=sys.stderr)


if __name__ == "__main__":
    main()
