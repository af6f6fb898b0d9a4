"""What a budget of moves is spent on, over all layers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moeserve.experts.load import Load
from moeserve.experts.placement import EMPTY, Placement


def layers_within(budget: int, now: Placement, wanted: Placement, load: Load) -> Placement:
    """`wanted` in the layers that get better by it, most gain a move first, within `budget` moves; else
    `now`.
    """
    gains = now.imbalance(load.tokens) - wanted.imbalance(load.tokens)
    steps = np.stack([np.zeros_like(gains), -gains])
    moves = np.stack([np.zeros(len(gains), dtype=np.int64), moves_a_layer(now.slots, wanted.slots)])
    taken = best_steps(steps, moves, budget, worth=0.0)
    return now.with_slots(np.where(taken[:, None] > 0, wanted.slots, now.slots))


def moves_a_layer(now: NDArray[np.int32], then: NDArray[np.int32]) -> NDArray[np.int64]:
    """Experts copied in each layer, `[L]`: slots that get another one."""
    return np.asarray(np.count_nonzero((now != then) & (then != EMPTY), axis=1))


def best_steps(
    imbalance: NDArray[np.float64], moves: NDArray[np.int64], budget: int, *, worth: float
) -> NDArray[np.int64]:
    """How many steps of its own path each layer takes, `[L]`.

    After k steps layer l has `imbalance[k, l]` and made `moves[k, l]` moves (`[steps + 1, L]` each). Each
    move must lower imbalance by `worth`; where the budget does not do, the price of a move is raised until it
    does, and what is left over goes to the best step that still fits.
    """

    def at(price: float) -> NDArray[np.int64]:
        return np.asarray((imbalance + price * moves).argmin(axis=0))

    layers = np.arange(imbalance.shape[1])
    taken = at(worth)
    if moves[taken, layers].sum() <= budget:
        return taken
    low, high = worth, float(imbalance.max())
    for _ in range(40):
        price = (low + high) / 2
        low, high = (price, high) if moves[at(price), layers].sum() > budget else (low, price)
    taken = at(high)
    if moves[taken, layers].sum() > budget:
        taken = np.zeros_like(taken)
    while True:
        left = budget - moves[taken, layers].sum()
        more = moves - moves[taken, layers]
        gain = imbalance[taken, layers] - imbalance - worth * more
        rate = np.where((more > 0) & (more <= left) & (gain > 0), gain / np.maximum(more, 1), 0.0)
        step, layer = np.unravel_index(int(rate.argmax()), rate.shape)
        if rate[step, layer] <= 0:
            return taken
        taken[layer] = step
