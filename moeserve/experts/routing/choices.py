"""A lane's choices of one step: repeats are folded, slots found and load counted, on a GPU in one launch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moeserve.device.machine import kernels_serve
from moeserve.experts.placement import EMPTY
from moeserve.experts.routing.address_book import AddressBook
from moeserve.experts.routing.gate import Gate
from moeserve.experts.routing.meter import LoadMeter


class Choices(NamedTuple):
    """What a lane's rows chose, before it is known where that lies."""

    experts: Tensor  # [T, K] int32, EMPTY = none
    weights: Tensor  # [T, K] float32
    valid: Tensor  # [T] bool, False for padding rows


class StepAddressing(NamedTuple):
    """Finds the slots of a lane's choices in one step, and counts them."""

    layer: int  # position among the served layers
    book: AddressBook
    meter: LoadMeter
    fullest: int  # rows of the fullest lane


def addressed(choices: Choices, addressing: StepAddressing) -> tuple[Tensor, Tensor]:
    """Slots `[T, K]` int32 and final weights `[T, K]` float32 of `choices`, which are counted as load.

    It is `merge_duplicates`, `AddressBook.resolve` and `LoadMeter.count`, and on a GPU one launch.
    """
    splitter = addressing.book.on_device(choices.experts.shape)
    if splitter is None:
        experts, weights = merge_duplicates(*choices)
        slots = addressing.book.resolve(addressing.layer, experts, choices.valid)
        addressing.meter.count(addressing.layer, experts, slots, addressing.fullest)
        return slots, weights
    from moeserve.experts.routing.address_kernels import address

    given = tuple(column.contiguous() for column in choices)
    counts = addressing.meter.tables(addressing.layer, addressing.fullest)
    found: tuple[Tensor, Tensor] = address(splitter, addressing.layer, given, counts)  # type: ignore[no-untyped-call]
    return found


def routed(gate: Gate, logits: Tensor, valid: Tensor, addressing: StepAddressing) -> tuple[Tensor, Tensor]:
    """`addressed` of what `gate` chooses by `logits [T, E]`; rows that are not `valid [T]` choose none.

    On a GPU that is one launch where no expert can have a replica. Raises ValueError as `Gate.route` does.
    """
    splitter = addressing.book.on_device((len(logits), gate.top_k))
    plain = splitter is not None and not splitter.splits and gate.experts == addressing.book.experts
    if not plain or not gate.in_one_launch(logits):
        return addressed(Choices(*gate.route(logits), valid), addressing)
    from moeserve.experts.routing.address_kernels import route

    gate.check(logits)
    given = (logits.contiguous(), valid.contiguous())
    counts = addressing.meter.tables(addressing.layer, addressing.fullest)
    found: tuple[Tensor, Tensor] = route(gate, splitter, addressing.layer, given, counts)  # type: ignore[no-untyped-call]
    return found


def merge_duplicates(experts: Tensor, weights: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Folds repeated experts of a row into their first place, weights summed; later places become EMPTY.

    `experts [T, K]` int32, `weights [T, K]` float32, `valid [T]` bool: other rows choose none. The weight of
    an EMPTY place is dropped, even NaN. Returns new tensors of the same shapes. Only so does a token travel
    to a slot at most once.
    """
    if kernels_serve(experts.device):
        from moeserve.experts.routing.choice_kernels import merge

        merged: tuple[Tensor, Tensor] = merge(experts.contiguous(), weights.contiguous(), valid)  # type: ignore[no-untyped-call]
        return merged
    if experts.is_cpu and (alone := _without_duplicates(experts, weights, valid)) is not None:
        return alone
    return merge_by_operations(experts, weights, valid)


def _without_duplicates(experts: Tensor, weights: Tensor, valid: Tensor) -> tuple[Tensor, Tensor] | None:
    """`merge_duplicates` on the host, where no row has an expert twice, as routers choose; else None.

    NumPy's operations on small arrays take a fraction of torch's time, and a step of few rows has many.
    """
    ids = np.where(valid.numpy()[:, None], experts.numpy(), EMPTY)
    if ids.shape[1] > 1:
        ordered = np.sort(ids, axis=1)
        if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any():
            return None
    given = weights.float().numpy()
    return torch.from_numpy(ids), torch.from_numpy(np.where(ids < 0, np.float32(0), given))


def merge_by_operations(experts: Tensor, weights: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """`merge_duplicates` by torch's operations, on any device."""
    experts = torch.where(valid[:, None], experts, EMPTY)
    weights = torch.where(experts < 0, 0.0, weights.float())
    same = experts[:, :, None] == experts[:, None, :]  # [T, K, K]
    first = same.new_ones(same.shape[1:]).tril(-1)  # strictly earlier places
    repeated = (same & first).any(dim=2)
    summed = torch.where(same, weights[:, None, :], 0.0).sum(dim=2)  # a NaN stays with its own expert
    return torch.where(repeated, EMPTY, experts), torch.where(repeated | (experts < 0), 0.0, summed)
