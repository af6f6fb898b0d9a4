"""`Search`, the walk downhill that all layers take at once: each step a swap or a replica."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moeserve.experts.balance.budget import moves_a_layer
from moeserve.experts.balance.objective import ReplicaCost
from moeserve.experts.balance.pairs import nearest_pair, steepest_pair
from moeserve.experts.balance.path import Paths, Steps
from moeserve.experts.load import Load
from moeserve.experts.placement import EMPTY, Placement

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CANDIDATES = 2048  # expert pairs looked at for one swap
CROWDED = 24  # slots a rank from which one swap can bring a rank to the mean
PARTNERS = 12  # most ranks looked at for one swap
MOST_WORK = 12_000_000  # slots looked at, over all layers and steps; binds above some hundred ranks
LIGHTER = 0.9  # how much lighter, against going round in circles
REPLICATED, SPARES = 2, 4  # hottest experts and lightest spare slots tried for a replica


class Search:
    """The working copy of a placement that steps are tried on; layers that are done leave it.

    Its ranks are the owners that have room, and its slots theirs.
    """

    def __init__(self, placement: Placement, load: Load, cost: ReplicaCost, nodes: int = 1) -> None:
        if load.tokens.shape != (placement.layers, placement.experts):
            raise ValueError(
                f"load {list(load.tokens.shape)} is not of {placement.layers} layers "
                f"and {placement.experts} experts"
            )
        if placement.owners % nodes:
            raise ValueError(f"{placement.owners} ranks must be a multiple of {nodes} nodes")
        holding = np.flatnonzero(placement.room)  # the others are not looked at
        numbers = np.arange(placement.slots.shape[1]).reshape(placement.owners, -1)
        self._numbers = numbers[holding].ravel()  # [S] slot numbers of the placement
        self._usable = placement.usable[self._numbers]  # [S] those that are slots
        self._start, self._ranks, self._cost = placement.slots[:, self._numbers], len(holding), cost
        self._whole = placement.slots
        self._node = holding // (placement.owners // nodes)
        self._many = nodes > 1
        self._width = placement.slots_per_owner
        self._layers = np.arange(placement.layers)  # those still walking
        self._ids = self._start.astype(np.int64)
        self._tokens = load.tokens.astype(np.float64)
        held = np.where(self._ids == EMPTY, placement.experts, self._ids)  # EMPTY counts as one expert more
        self._copies = np.stack([np.bincount(row, minlength=placement.experts + 1) for row in held])
        self._copies = self._copies[:, :-1]
        self._spread()
        self._even = self._loads.mean(axis=1)

    def imbalance(self) -> Floats:
        """Largest rank load over the mean at the start, of the layers that still walk; 1 without load.

        At the start, because a replica may add to the work of all, as of experts active in a small batch.
        """
        even = np.where(self._even > 0, self._even, 1.0)
        return np.where(self._even > 0, self._loads.max(axis=1) / even, 1.0)

    def walk(self, worth: float) -> Paths:
        """Steps until no layer finds one, or none could still gain `worth`."""
        slots = self._start.copy()
        steps: list[Steps] = []
        imbalance, moves = [self.imbalance()], [np.zeros(len(slots), dtype=np.int64)]
        for _ in range(min(8 * self._ranks + 16, max(MOST_WORK // slots.size, 32))):
            self._keep(self.imbalance() - 1 > worth)
            if not len(self._layers):
                break
            step, found = self._step()
            self._keep(found)
            layers = self._layers
            steps.append(Steps(layers, self._numbers[step.slots], step.experts))
            slots[layers[:, None], step.slots] = step.experts
            imbalance.append(imbalance[-1].copy())
            moves.append(moves[-1].copy())
            imbalance[-1][layers] = self.imbalance()
            moves[-1][layers] = moves_a_layer(self._start[layers], slots[layers])
        return Paths(self._whole, tuple(steps), np.stack(imbalance), np.stack(moves))

    def _step(self) -> tuple[Steps, NDArray[np.bool_]]:
        """Takes the better of a swap and a replica in each layer; the steps, and which layers found one."""
        self._hot = self._loads.argmax(axis=1)
        self._mean = self._loads.mean(axis=1)
        swap, gain = self._swap()
        if not self._spare().any():
            return self._take(swap, gain > 0)
        replica, other = self._replica()
        uphill, open_ = self._uphill()
        stuck = np.maximum(gain, other) <= 0
        replica.slots[stuck], replica.experts[stuck] = uphill.slots[stuck], uphill.experts[stuck]
        better = stuck | (other > gain / 2)  # a swap copies two experts
        chosen = [np.where(better[:, None], b, a) for a, b in zip(swap[1:], replica[1:], strict=True)]
        return self._take(Steps(swap.rows, *chosen), ~stuck | open_)

    def _take(self, steps: Steps, found: NDArray[np.bool_]) -> tuple[Steps, NDArray[np.bool_]]:
        """Applies the steps of the layers that found one."""
        done = steps.of(found)
        before = self._ids[done.rows[:, None], done.slots]
        self._ids[done.rows[:, None], done.slots] = done.experts
        for change, experts in ((-1, before), (1, done.experts)):
            rows = np.broadcast_to(done.rows[:, None], experts.shape)
            # a replica writes its one slot twice over: count it once
            once = (experts != EMPTY) & ((done.slots[:, :1] != done.slots) | (np.arange(2) == 0))
            np.add.at(self._copies, (rows[once], experts[once]), change)
        self._spread()
        return done, found

    def _swap(self) -> tuple[Steps, Floats]:
        """The swap of the hottest rank with a light one, and by how much it lowers the sum of squares."""
        rows = np.arange(len(self._layers))
        share = self._share.reshape(len(rows), self._ranks, self._width)
        light = self._light()
        over = self._loads[rows, self._hot] - self._mean
        under = self._mean[:, None] - self._loads[rows[:, None], light]
        hot, cool = share[rows, self._hot], share[rows[:, None], light]
        stay = self._staying(rows, light)
        if self._width >= CROWDED:  # the best one swap can do is to bring one of both to the mean
            goal = np.minimum(over, under[:, 0])
            pair = nearest_pair(hot, cool[:, 0], goal, (stay[0][:, 0], stay[1][:, 0]))
        else:
            banned = stay[0][:, :, :, None] | stay[1][:, :, None, :]
            pair = steepest_pair(hot, cool, over[:, None] + under, banned)
        moved = hot[rows, pair.mine] - cool[rows, pair.rank, pair.theirs]
        gain = np.where(pair.allowed, 2 * moved * (over + under[rows, pair.rank] - moved), 0.0)
        to = light[rows, pair.rank]
        slots = np.stack([self._hot * self._width + pair.mine, to * self._width + pair.theirs], axis=1)
        return Steps(rows, slots, self._ids[rows[:, None], slots][:, ::-1]), gain

    def _light(self) -> Ints:
        """Ranks to swap with, `[n, q]`: the lightest, and where there is room those that hold the lightest
        expert.

        Inside the hottest rank's node while that has a rank below the mean.
        """
        crowded = self._width >= CROWDED
        count = 1 if crowded else min(max(1, CANDIDATES // self._width**2), PARTNERS, self._ranks)
        away = np.zeros(self._loads.shape)
        if self._many:
            far = self._node != self._node[self._hot][:, None]
            inside = ~far & (self._loads < self._mean[:, None])
            away[far & inside.any(axis=1)[:, None]] = np.inf
        if count == 1:
            return np.asarray((self._loads + away).argmin(axis=1)[:, None])
        share = np.where(self._usable, self._share, np.inf)
        lightest = share.reshape(len(away), self._ranks, self._width).min(axis=2)
        half = (count + 1) // 2
        by_load, by_expert = (
            np.argpartition(key + away, many - 1, axis=1)[:, :many]
            for key, many in ((self._loads, half), (lightest, count - half))
        )
        return np.asarray(np.concatenate([by_load, by_expert], axis=1))

    def _staying(self, rows: Ints, light: Ints) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """What may not be swapped, of the hot rank and of the light ones, each `[n, light ranks, e]`.

        Numbers beyond a rank's room, and experts that both ranks hold.
        """
        hot, cool = self._doubled(rows, light)
        if self._usable.all():
            return hot, cool
        beyond = ~self._usable.reshape(self._ranks, self._width)
        return hot | beyond[self._hot][:, None], cool | beyond[light]

    def _doubled(self, rows: Ints, light: Ints) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Experts that may not be swapped as both ranks hold them: the hot one's and the light one's.

        Each `[n, light ranks, e]`.
        """
        ids = self._ids.reshape(len(rows), self._ranks, self._width)
        cool = ids[rows[:, None], light]
        if self._copies.max(initial=1) == 1:
            return np.zeros(cool.shape, dtype=bool), np.zeros(cool.shape, dtype=bool)
        hot = ids[rows, self._hot][:, None, :, None]
        same = (hot == cool[:, :, None, :]) & (hot != EMPTY)
        return same.any(axis=3), same.any(axis=2)

    def _spare(self) -> NDArray[np.bool_]:
        """Slots that may be overwritten, `[n, S]`: empty, or with another replica elsewhere."""
        copies = np.take_along_axis(self._copies, np.maximum(self._ids, 0), axis=1)
        return np.asarray(((self._ids == EMPTY) | (copies > 1)) & self._usable)

    def _replica(self) -> tuple[Steps, Floats]:
        """A replica of one of the hottest rank's experts over a spare slot, and its gain, as a swap's."""
        rows, slots = np.arange(len(self._layers)), self._ids.shape[1]
        more, fewer = (self._changed(by) for by in (1, -1))  # [n, E] cost of one replica
        width, hottest = self._width, min(REPLICATED, self._width)
        mine = self._share.reshape(len(rows), self._ranks, width)[rows, self._hot]
        top = np.argsort(-mine, axis=1)[:, :hottest] + (self._hot * width)[:, None]
        expert = np.take_along_axis(self._ids, top, axis=1)  # [n, hottest], EMPTY only on an idle rank
        rank = np.arange(slots) // width
        known = np.maximum(self._ids, 0)
        refilled = np.where(self._ids == EMPTY, 0.0, np.take_along_axis(fewer, known, axis=1) - self._share)
        weight = self._loads[:, rank] - self._share + refilled
        weight[~self._spare()] = np.inf
        if self._many:
            far = self._node[rank] != self._node[self._hot][:, None]
            near = np.isfinite(weight) & ~far & (self._loads[:, rank] < self._mean[:, None])
            weight[far & near.any(axis=1)[:, None]] = np.inf
        count = min(SPARES, slots)
        spare = np.argpartition(weight, count - 1, axis=1)[:, :count]
        best = Steps(rows, np.stack([spare[:, 0]] * 2, axis=1), np.stack([expert[:, 0]] * 2, axis=1))
        gain = np.zeros(len(rows))
        before = np.square(self._loads).sum(axis=1)  # not about the mean: more work in all is no gain
        for one in expert.T:
            for slot in spare.T:
                loads = self._loads_with(one, slot, more, fewer)
                after = np.square(loads).sum(axis=1)
                allowed = np.isfinite(weight[rows, slot]) & (one != EMPTY) & (self._ids[rows, slot] != one)
                allowed &= loads.max(axis=1) <= self._loads[rows, self._hot]
                allowed &= ~self._held_by(one, slot // width)
                better = allowed & (before - after > gain)
                gain[better] = (before - after)[better]
                best.slots[better], best.experts[better] = slot[better, None], one[better, None]
        return best, gain

    def _uphill(self) -> tuple[Steps, NDArray[np.bool_]]:
        """The way on from where nothing gains: a replica of the hottest rank's top expert, and where there is
        one.

        It may make another rank the hottest until swaps have followed; a path ends where it pays to end. What
        it overwrites must leave its expert's replicas lighter than the top expert's are now, so paths end.
        """
        rows, width = np.arange(len(self._layers)), self._width
        mine = self._share.reshape(len(rows), self._ranks, width)[rows, self._hot]
        top = mine.argmax(axis=1)
        expert = self._ids[rows, self._hot * width + top]
        left = np.where(
            self._ids == EMPTY, 0.0, np.take_along_axis(self._changed(-1), np.maximum(self._ids, 0), axis=1)
        )
        holds = (self._ids == expert[:, None]).reshape(len(rows), self._ranks, width).any(axis=2)
        open_ = self._spare() & (left < LIGHTER * mine[rows, top][:, None])
        open_ &= ~np.repeat(holds, width, axis=1) & (expert != EMPTY)[:, None]
        weight = np.where(open_, np.repeat(self._loads, width, axis=1) - self._share + left, np.inf)
        slot = weight.argmin(axis=1)
        pairs = (np.stack([one, one], axis=1) for one in (slot, expert))
        return Steps(rows, *pairs), np.isfinite(weight[rows, slot])

    def _loads_with(self, expert: Ints, slot: Ints, more: Floats, fewer: Floats) -> Floats:
        """Rank loads once `slot` holds `expert`: `[n, ranks]`."""
        rows = np.arange(len(expert))
        out = self._ids[rows, slot]
        grown = np.where(out == EMPTY, 0.0, fewer[rows, np.maximum(out, 0)])
        share = np.where(self._ids == expert[:, None], more[rows, expert][:, None], self._share)
        share = np.where((self._ids == out[:, None]) & (out != EMPTY)[:, None], grown[:, None], share)
        share[rows, slot] = more[rows, expert]
        return np.asarray(share.reshape(len(rows), self._ranks, self._width).sum(axis=2))

    def _held_by(self, expert: Ints, rank: Ints) -> NDArray[np.bool_]:
        """Whether each layer's `rank [n]` holds its `expert [n]`."""
        rows = np.arange(len(expert))
        held = self._ids.reshape(len(rows), self._ranks, self._width)[rows, rank]
        return np.asarray((held == expert[:, None]).any(axis=1))

    def _changed(self, by: int) -> Floats:
        """Cost of one replica of each expert with `by` more copies, `[n, E]`."""
        return self._cost(self._tokens, np.maximum(self._copies + by, 1).astype(np.float64))

    def _spread(self) -> None:
        """What each slot and each rank bears now."""
        each = self._cost(self._tokens, np.maximum(self._copies, 1).astype(np.float64))
        known = np.take_along_axis(each, np.maximum(self._ids, 0), axis=1)
        self._share = np.where(self._ids == EMPTY, 0.0, known)
        self._loads = self._share.reshape(len(self._ids), self._ranks, self._width).sum(axis=2)

    def _keep(self, layers: NDArray[np.bool_]) -> None:
        """Lets go of the other layers."""
        if layers.all():
            return
        self._layers, self._tokens = self._layers[layers], self._tokens[layers]
        self._ids, self._copies = self._ids[layers], self._copies[layers]
        self._share, self._loads = self._share[layers], self._loads[layers]
        self._even = self._even[layers]
